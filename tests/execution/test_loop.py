"""When the iteration loop plans, and what it writes down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conflux_ray.execution.engine import Engine
from conflux_ray.execution.iteration_log import IterationLog
from conflux_ray.execution.loop import LEAD_SECONDS, LEAD_SHARE, IterationLoop
from conflux_ray.execution.plan import IterationPlan, WorkerResult
from conflux_ray.planning.plain import PlainPolicy
from tests.cluster.test_load import NUM_RANKS, add, engine


class Workers:
    """Workers that keep what they are sent; they answer when they are asked."""

    def __init__(self) -> None:
        self.plans: list[IterationPlan] = []
        self.ended = False

    def broadcast(self, plan: IterationPlan) -> None:
        self.plans.append(plan)

    def ready(self) -> bool:
        return self.ended

    def collect(self, timeout: float) -> list[WorkerResult]:
        plan = self.plans.pop(0)
        results = []
        for rank in range(NUM_RANKS):
            ids = [d.alloc_id for d in plan.decodes[rank]]
            ids += [c.alloc_id for c in plan.chunks if c.samples and c.shards[-1].rank == rank]
            done = [t.transfer_id for t in plan.transfers]
            results.append(WorkerResult(plan.iteration, rank, ids, [5] * len(ids), elapsed=0.25, acknowledged=done))
        return results


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def loop_of(instance: Engine, **options) -> tuple[IterationLoop, Workers, Clock]:
    workers, clock = Workers(), Clock()
    return IterationLoop(instance, workers, clock=clock, **options), workers, clock


def test_the_next_iteration_is_planned_shortly_before_the_running_one_ends() -> None:
    instance = engine()
    loop, workers, clock = loop_of(instance, late=True)
    add(instance, "a", 300)
    assert loop.pause() == 0  # nothing runs: the first is due at once
    assert loop.step() == []
    assert [p.iteration for p in workers.plans] == [0]
    predicted = instance.predicted_oldest
    lead = max(LEAD_SECONDS, LEAD_SHARE * predicted)
    assert loop.pause() == pytest.approx(predicted - lead)
    clock.now += predicted - lead - 0.001
    assert loop.step() == []
    assert len(workers.plans) == 1
    add(instance, "b", 1)  # arrives while the first one runs
    clock.now += 0.002
    loop.step()
    assert instance.num_in_flight == 1  # the second was issued, the first collected
    assert workers.plans[0].iteration == 1
    assert len(workers.plans[0].new_prefills) == 1
    # The second began when the first had ended.
    assert loop.pause() == pytest.approx(instance.predicted_oldest - max(LEAD_SECONDS, LEAD_SHARE * predicted), rel=0.5)


def test_an_iteration_that_ends_early_is_followed_at_once() -> None:
    instance = engine()
    loop, workers, _ = loop_of(instance, late=True)
    add(instance, "a", 300)
    loop.step()
    assert loop.pause() > 0
    workers.ended = True
    loop.step()
    assert [p.iteration for p in workers.plans] == [1]


@pytest.mark.parametrize("late", [False, True])
def test_all_tokens_come_however_late_it_plans(late: bool) -> None:
    instance = engine()
    loop, _, clock = loop_of(instance, late=late)
    add(instance, "a", 300)
    add(instance, "b", 40)
    tokens = 0
    while instance.has_work:
        tokens += len(loop.step())
        clock.now += max(loop.pause(), 0.0001)
    assert tokens == 2 * 50


@pytest.mark.parametrize(("late", "policy"), [(False, None), (True, PlainPolicy(64, 8))])
def test_without_late_planning_or_a_prediction_it_plans_at_once(late: bool, policy: PlainPolicy | None) -> None:
    instance = engine(policy)
    loop, workers, _ = loop_of(instance, late=late)
    add(instance, "a", 300)
    loop.step()
    assert [p.iteration for p in workers.plans] == [1]  # the first was collected while the second was there
    assert loop.pause() == 0


def test_the_log_has_a_line_for_every_iteration(tmp_path: Path) -> None:
    instance = engine()
    path = tmp_path / "iterations.jsonl"
    log = IterationLog(path)
    loop, *_ = loop_of(instance, log=log)
    add(instance, "a", 300)
    while instance.has_work:
        loop.step()
    log.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["iteration"] for line in lines] == list(range(instance.counters.iterations))
    assert sum(sum(tokens) for line in lines for _, _, tokens in line["chunks"]) == 300
    assert sum(sum(line["decodes"]) for line in lines) == 49  # the first token is prefill's
    assert [sum(line["context"]) for line in lines if sum(line["decodes"])] == list(range(301, 350))
    assert [line["transfers"] for line in lines].count(1) == 1
    assert {a for line in lines for a in line["allocations"]} == {lines[0]["allocations"][0]}
    assert all(len(line["allocations"]) == len(line["chunks"]) for line in lines)
    n = instance.num_ranks
    assert [sum(line["incoming"]) for line in lines if line["transfers"]] == [300 * (n - 1) / n]
    assert all(line["elapsed"] == [0.25, 0.25] and line["planned"] <= line["collected"] for line in lines)
    assert lines[0]["predicted"] > 0
    assert lines[0]["pending"] == 1


def test_a_log_that_cannot_be_written_ends_alone(tmp_path: Path) -> None:
    class Full:
        def write(self, line: str) -> int:
            raise OSError("no space left on device")

    instance = engine()
    log = IterationLog(tmp_path / "iterations.jsonl")
    log._file = Full()
    loop, *_ = loop_of(instance, log=log)
    add(instance, "a", 300)
    while instance.has_work:
        loop.step()
    assert instance.counters.finished == 1
    log.close()
    with pytest.raises(OSError, match="nowhere"):
        IterationLog(tmp_path / "nowhere" / "iterations.jsonl")
