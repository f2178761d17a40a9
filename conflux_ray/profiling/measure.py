"""Runs cases on workers, in rounds of random order, and turns what was measured into rows for fitting.

A case is measured once a round, so its samples lie minutes apart: a burst of foreign load, or a clock that falls as
the device warms up, touches a sample of many cases rather than all samples of one, and medians leave it out.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tqdm import tqdm

from conflux_ray.execution.loop import RUN_AHEAD, Workers
from conflux_ray.execution.plan import IterationPlan
from conflux_ray.planning.fitting import ComponentRow, IterationRow, Row
from conflux_ray.profiling.batches import Case
from conflux_ray.profiling.plans import TableLayout, make_plans
from conflux_ray.profiling.samples import SampleFile

HOT_SECONDS = 0.25
"""Of the same work before a sample on a device that works on its own. One that has just
idled runs large matrix products a sixth faster than one under load, for a while (docs/simulator.md)."""

MOST_RUNS = 64
"""Of one case before its sample: what takes less than 4 ms, and little power, is warm for less than `HOT_SECONDS`."""

TIMEOUT = 600.0
"""Most seconds one iteration may take before the workers count as lost."""


class Measure(Protocol):
    """Runs a case once; returns seconds."""

    def __call__(self, case: Case) -> float: ...


class WorkerMeasure:
    """Measures on workers that run `profiling.runner.ProfilingRunner`.

    Args:
        workers: of one instance.
        layout: of their KV pools.
        steady: measure a whole iteration as it runs behind others, with the host's part hidden as far as it can be and
            the device as warm as serving makes it (`HOT_SECONDS`); for a device that works on its own.
    """

    def __init__(self, workers: Workers, layout: TableLayout, steady: bool = False) -> None:
        self._workers = workers
        self._layout = layout
        self._steady = steady

    def __call__(self, case: Case) -> float:
        """Seconds that the slowest worker takes."""
        plans = make_plans(case, self._layout)
        self._run(plans.setup)
        if self._steady and not case.part:
            first = self._run(plans.numbered(1))
            return self._run(*(plans.numbered(2 + k) for k in range(runs_before(first) + 1)))
        return self._run(plans.numbered(1))

    def _run(self, *iterations: IterationPlan) -> float:
        """Seconds of the last of some iterations, of which two are under way at any time."""
        for plan in iterations[:RUN_AHEAD]:
            self._workers.broadcast(plan)
        seconds = 0.0
        for number in range(len(iterations)):
            seconds = max(result.elapsed for result in self._workers.collect(TIMEOUT))
            if number + RUN_AHEAD < len(iterations):
                self._workers.broadcast(iterations[number + RUN_AHEAD])
        return seconds


def runs_before(seconds: float) -> int:
    """How often something that takes `seconds` runs before its sample."""
    return max(1, min(MOST_RUNS, math.ceil(HOT_SECONDS / max(seconds, 1e-6))))


def warm_up(cases: Sequence[Case], measure: Measure) -> None:
    """Run one middling case of each kind, unmeasured: first uses load and compile things."""
    kinds: dict[tuple[str, str], list[Case]] = {}
    for case in cases:
        kinds.setdefault((case.part, case.batch.kind), []).append(case)
    for alike in kinds.values():
        measure(alike[len(alike) // 2])


def run_rounds(
    cases: Sequence[Case],
    measure: Measure,
    samples: SampleFile,
    rounds: int,
    seed: int,
    seconds: float = float("inf"),
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Measure what `samples` lacks. An exception of `measure`, KeyboardInterrupt too, loses nothing measured before.

    Args:
        cases: what to measure.
        measure: runs one.
        samples: where to.
        rounds: samples of each case.
        seed: of the order.
        seconds: time for all of it; the first round is completed even so.
        clock: monotonic seconds.
    """
    started = clock()
    order = [(number, case) for number in range(rounds) for case in _shuffled(cases, f"{seed}/{number}")]
    left = [(number, case) for number, case in order if (case.name, number) not in samples]
    with tqdm(total=len(order), initial=len(order) - len(left), desc="measuring", unit="sample") as bar:
        for number, case in left:
            if number and clock() - started >= seconds:
                return
            bar.set_postfix_str(case.name, refresh=False)
            samples.add(case.name, number, measure(case))
            bar.update()


def _shuffled(cases: Sequence[Case], seed: str) -> list[Case]:
    return random.Random(seed).sample(cases, len(cases))


def to_rows(cases: Sequence[Case], samples: SampleFile, num_layers: int) -> list[Row]:
    """The rows of measured cases; raises KeyError if one is not."""
    rows: list[Row] = []
    for case in cases:
        seconds = samples.median(case.name)
        if case.part:
            per = 1 if case.part == "host" else num_layers
            rows.append(ComponentRow(case.part, case.workload, seconds / per))
        else:
            batch = case.batch
            rows.append(IterationRow(batch.load, seconds, batch.overlap, batch.decode_sms, case.held_out))
    return rows
