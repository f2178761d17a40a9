"""Rounds of measuring, without workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from conflux_ray.execution.plan import IterationPlan, WorkerResult
from conflux_ray.planning.fitting import ComponentRow, IterationRow
from conflux_ray.profiling.batches import Batch, BatchChunk, Case
from conflux_ray.profiling.measure import (
    HOT_SECONDS,
    MOST_RUNS,
    WorkerMeasure,
    run_rounds,
    runs_before,
    to_rows,
    warm_up,
)
from conflux_ray.profiling.plans import TableLayout
from conflux_ray.profiling.runner import timed
from conflux_ray.profiling.samples import SampleFile

pytestmark = pytest.mark.heavy

LINEAR = Case("linear", Batch(((), ()), (BatchChunk(0, (6, 2)),)), "gemm")
HOST = Case("host", Batch(((8,) * 5, (8,))), "host")
WHOLE = Case("whole", Batch(((8,), ()), (BatchChunk(4, (1, 1)),), overlap=False), held_out=True)
CASES = [LINEAR, HOST, WHOLE]


class Bench:
    """Takes one second a case, and counts."""

    def __init__(self, fails_after: int = 1 << 30) -> None:
        self.seen: list[str] = []
        self.fails_after = fails_after

    def __call__(self, case: Case) -> float:
        if len(self.seen) == self.fails_after:
            raise KeyboardInterrupt
        self.seen.append(case.name)
        return 1.0

    def clock(self) -> float:
        return float(len(self.seen))


def test_every_case_once_a_round_in_an_order_of_its_own(tmp_path: Path) -> None:
    bench = Bench()
    run_rounds(CASES, bench, SampleFile(tmp_path / "s", {}), rounds=6, seed=0)
    rounds = [bench.seen[i : i + 3] for i in range(0, 18, 3)]
    assert all(sorted(order) == ["host", "linear", "whole"] for order in rounds)
    assert len(set(map(tuple, rounds))) > 1


def test_an_interrupted_run_goes_on_where_it_was(tmp_path: Path) -> None:
    first, second = Bench(fails_after=4), Bench()
    with pytest.raises(KeyboardInterrupt):
        run_rounds(CASES, first, SampleFile(tmp_path / "s", {}), rounds=3, seed=0)
    run_rounds(CASES, second, SampleFile(tmp_path / "s", {}), rounds=3, seed=0)
    whole = Bench()
    run_rounds(CASES, whole, SampleFile(tmp_path / "t", {}), rounds=3, seed=0)
    assert first.seen + second.seen == whole.seen


def test_the_time_limit_ends_later_rounds_but_not_the_first(tmp_path: Path) -> None:
    short, longer = Bench(), Bench()
    run_rounds(CASES, short, SampleFile(tmp_path / "s", {}), rounds=3, seed=0, seconds=1, clock=short.clock)
    run_rounds(CASES, longer, SampleFile(tmp_path / "t", {}), rounds=3, seed=0, seconds=5, clock=longer.clock)
    assert (len(short.seen), len(longer.seen)) == (3, 5)


def test_one_case_of_each_kind_warms_up() -> None:
    bench = Bench()
    warm_up([LINEAR, LINEAR, HOST, WHOLE], bench)
    assert bench.seen == ["linear", "host", "whole"]


def test_components_are_seconds_of_a_layer_and_the_host_of_an_iteration(tmp_path: Path) -> None:
    samples = SampleFile(tmp_path / "s", {})
    for case in CASES:
        samples.add(case.name, 0, 3.0)
    assert to_rows(CASES, samples, num_layers=3) == [
        ComponentRow("gemm", 6, 1.0),
        ComponentRow("host", 5, 3.0),
        IterationRow(WHOLE.batch.load, 3.0, overlap=False, held_out=True),
    ]


class Cooling:
    """Workers whose iterations slow down until they have run for a while, as a device at its power limit does."""

    def __init__(self) -> None:
        self.issued: list[IterationPlan] = []
        self.most = self.done = 0

    def broadcast(self, plan: IterationPlan) -> None:
        self.issued.append(plan)
        self.most = max(self.most, len(self.issued) - self.done)

    def ready(self) -> bool:
        return True

    def collect(self, timeout: float) -> list[WorkerResult]:
        plan = self.issued[self.done]
        self.done += 1
        busy = 0.1 * plan.iteration
        return [WorkerResult(plan.iteration, rank, elapsed=0.1 if busy < HOT_SECONDS else 0.12) for rank in range(2)]


def test_a_busy_device_is_measured_at_its_power_limit() -> None:
    assert (runs_before(0.1), runs_before(1.0), runs_before(1e-9)) == (3, 1, MOST_RUNS)
    workers = Cooling()
    assert WorkerMeasure(workers, TableLayout(50, 4, 2, 300), steady=True)(WHOLE) == 0.12
    assert [plan.iteration for plan in workers.issued] == [0, 1, 2, 3, 4, 5]
    assert workers.most == 2  # the device always has the next one, and no more are under way than when it serves
    cold = Cooling()
    assert WorkerMeasure(cold, TableLayout(50, 4, 2, 300))(WHOLE) == 0.1


def test_a_part_runs_as_often_on_every_worker_before_its_sample() -> None:
    class Device:
        compiles = True

        def __init__(self) -> None:
            self.now, self.runs = 0.0, 0
            self.main = self

        def synchronize(self) -> None:
            pass

        def mark(self) -> float:
            return self.now

        def record(self) -> Device:
            return self

        def elapsed(self, start: float, end: float) -> float:
            return end - start

    device, asked = Device(), []

    def work() -> None:
        device.runs += 1
        device.now += 0.1

    def agree(value: int) -> int:
        asked.append(value)
        return 2  # another worker was slower

    assert timed(device, work, agree) == pytest.approx(0.1)
    assert asked == [3]
    assert device.runs == 1 + 2 + 1
