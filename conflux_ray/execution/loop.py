"""The instance's iteration loop: issue the next iteration before the running one ends, collect that one, apply it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from conflux_ray.execution.engine import Engine, TokenOutput
from conflux_ray.execution.iteration_log import IterationLog
from conflux_ray.execution.plan import IterationPlan, WorkerResult

RUN_AHEAD = 2
"""Iterations issued at once: the one that runs, and the next, so that workers never wait for the instance."""

LEAD_SECONDS = 0.005
"""How long before the running iteration's predicted end the next one is planned, at least: planning, encoding and the
workers' own preparation take some 3 ms."""

LEAD_SHARE = 0.1
"""The same as a share of the prediction, which may be off by as much."""

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

    def ready(self) -> bool:
        """Whether a result of the oldest iteration not collected is there."""
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
        late: plan an iteration shortly before the running one's predicted end, so that it knows of what has arrived
            meanwhile, where the policy predicts; otherwise as soon as the running one has begun.
        log: gets every iteration.
    """

    def __init__(
        self,
        engine: Engine,
        workers: Workers,
        timeout: float = 120.0,
        clock: Callable[[], float] = time.monotonic,
        watch: Callable[[IterationPlan], None] | None = None,
        late: bool = False,
        log: IterationLog | None = None,
    ) -> None:
        self.engine = engine
        self.workers = workers
        self.timeout = timeout
        self.clock = clock
        self.watch = watch
        self.late = late
        self.log = log
        self._began = 0.0  # the oldest iteration in flight, on the clock

    def step(self) -> list[TokenOutput]:
        """Issue what is due, then wait for the oldest iteration; returns at once if there is none.

        It also returns at once, without outputs, while the next iteration is not due yet (`pause`): what arrives until
        then can still be in it.

        Raises:
            WorkerLostError: see `Workers.collect`.
        """
        engine = self.engine
        while engine.num_in_flight < RUN_AHEAD:
            if self.pause() > 0 and not self.workers.ready():
                return []
            if not self._issue():
                break
        if not engine.num_in_flight:
            return []
        results = self.workers.collect(self.patience())
        if self.log is not None:
            self.log.collected(results)
        self._began = now = self.clock()
        return engine.apply(results, now)

    def pause(self) -> float:
        """Seconds until the next iteration is to be planned; 0 when that is due."""
        predicted = self.engine.predicted_oldest if self.late else None
        if predicted is None or self.engine.num_in_flight >= RUN_AHEAD:
            return 0.0
        lead = max(LEAD_SECONDS, LEAD_SHARE * predicted)
        return max(0.0, self._began + predicted - lead - self.clock())

    def _issue(self) -> bool:
        """Plan an iteration and send it; whether there was something to do."""
        start = self.clock()
        plan = self.engine.plan(start)
        if plan is None:
            return False
        if self.engine.num_in_flight == 1:
            self._began = start
        if self.log is not None:
            self.log.issued(self.engine, plan, self.clock() - start)
        self.workers.broadcast(plan)
        if self.watch is not None:
            self.watch(plan)
        return True

    def patience(self) -> float:
        """Seconds to wait for the oldest iteration in flight."""
        predicted = self.engine.predicted_in_flight
        if predicted is None:
            return self.timeout
        return min(self.timeout, LEAST_PATIENCE + PATIENCE * predicted)
