"""How busy an instance is, for the router: queued work in seconds relative to what the instance can do (section 5.1).

With a latency model the seconds are its own: prompt tokens left, at the rate that the scheduler plans beside the
resident decodes, and one iteration of those decodes. Without one the rate is that of recent iterations.
"""

from __future__ import annotations

from collections.abc import Sequence

from conflux_ray.execution.engine import Engine, Timing
from conflux_ray.execution.request import Request
from conflux_ray.planning.scheduler import Scheduler
from conflux_ray.wire import LoadReport

_WEIGHT = 0.1  # of the newest iteration in the running rate
_START_RATE = 1000.0  # prompt tokens per second assumed before the first measurement


class LoadMeter:
    """Turns an engine's queue into a report."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._measured_rate = _START_RATE
        self._seen = -1  # latest iteration counted

    def observe(self, timings: Sequence[Timing]) -> None:
        """Count the latest iteration, if it prefilled and is new."""
        if not timings or timings[-1].iteration == self._seen:
            return
        latest = timings[-1]
        self._seen = latest.iteration
        if latest.prefill_tokens and latest.measured > 0:
            self._measured_rate += _WEIGHT * (latest.prefill_tokens / latest.measured - self._measured_rate)

    def can_meet(self, request: Request, now: float) -> bool:
        """Whether a request that the engine does not have yet could have its first token by its deadline.

        With a latency model, behind what the policy serves before it; without one, behind all that is queued.

        Raises:
            ValueError: it has no prompt.
        """
        engine = self._engine
        if isinstance(engine.policy, Scheduler):
            wait = engine.policy.wait_of(engine.describe(request), engine.described(), engine.residents, now)
        else:
            load = self.report()
            wait = load.queued_work_s + len(request.prompt) / load.capacity
        return now + wait <= request.deadline

    def report(self, draining: bool = False, closing: bool = False) -> LoadReport:
        """The present load; see `LoadReport` for the arguments."""
        engine = self._engine
        remaining = sum(r.prefill_tokens - r.computed_tokens for r in engine.pending)
        rate, decodes = self._measured_rate, 0.0
        if isinstance(engine.policy, Scheduler):
            residents = engine.residents
            rate, decodes = engine.policy.prefill_rate(residents), engine.policy.decode_seconds(residents)
        free = engine.kv.snapshot()
        used = 1.0 - sum(free.free) / (free.capacity * engine.num_ranks)
        return LoadReport(
            queued_work_s=remaining / rate + decodes,
            capacity=rate,
            running=engine.num_running,
            waiting=engine.num_waiting,
            kv_used_fraction=used,
            draining=draining,
            closing=closing,
        )
