"""The instance's iteration loop: keep two iterations issued, collect the older one, apply it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from conflux_ray.execution.engine import Engine, TokenOutput
from conflux_ray.execution.plan import IterationPlan, WorkerResult

RUN_AHEAD = 2
"""Iterations issued at once: the one that runs, and the next, so that workers never wait for the instance."""


LEAST_PATIENCE = 20.0
"""Seconds that an iteration may take whatever was predicted: first uses compile, machines pause."""

PATIENCE = 50.0
"""How many times its predicted time an iteration may take, beyond that."""


class WorkerLostError(RuntimeError):
    """A worker died, failed or hangs. The instance cannot go on and must be restarted."""


class Workers(Protocol):
    """The worker group of an instance, as the loop sees it."""

    def broadcast(self, plan: IterationPlan) -> None:
        """Send a plan to every worker."""
        ...

    def collect(self, timeout: float) -> list[WorkerResult]:
        """The results of the oldest iteration not collected, in order of worker.

        Raises:
            WorkerLostError: a worker reported an error, died, or did not answer within `timeout` seconds.
        """
        ...


class IterationLoop:
    """Drives an engine and its workers.

    Args:
        engine: plans and applies.
        workers: run the plans.
        timeout: most seconds an iteration may take before the workers count as lost; less if the policy predicts
            its time (`PATIENCE`).
        clock: monotonic seconds.
        watch: called with every plan that is issued.
    """

    def __init__(
        self,
        engine: Engine,
        workers: Workers,
        timeout: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        watch: Callable[[IterationPlan], None] | None = None,
    ) -> None:
        self.engine = engine
        self.workers = workers
        self.timeout = timeout
        self.clock = clock
        self.watch = watch

    def step(self) -> list[TokenOutput]:
        """Issue what may be issued, then wait for the oldest iteration; returns at once if there is none.

        Raises:
            WorkerLostError: see `Workers.collect`.
        """
        while self.engine.num_in_flight < RUN_AHEAD:
            plan = self.engine.plan(self.clock())
            if plan is None:
                break
            self.workers.broadcast(plan)
            if self.watch is not None:
                self.watch(plan)
        if not self.engine.num_in_flight:
            return []
        return self.engine.apply(self.workers.collect(self.patience()), self.clock())

    def patience(self) -> float:
        """Seconds to wait for the oldest iteration in flight."""
        predicted = self.engine.predicted_in_flight
        if predicted is None:
            return self.timeout
        return min(self.timeout, LEAST_PATIENCE + PATIENCE * predicted)
