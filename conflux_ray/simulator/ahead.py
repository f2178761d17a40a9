"""When an engine plans: how many iterations it issues at once, and how late it plans the next one.

An engine that runs ahead issues iteration k + 1 while k runs, so that its device never waits for it. What k will have
done is then known, except for the values of its tokens, but a request that arrives after k + 1 was planned waits for
k + 2. Conflux plans k + 1 shortly before k is expected to end (`execution/loop.py`). vLLM 0.26, whose asynchronous
scheduling is on unless an option forbids it, plans k + 1 when k starts: its queue of two batches is filled before a
result is waited for (`vllm/v1/engine/core.py`, `step_with_batch_queue`).

Output lengths are known beforehand, as they are under a load that ignores the end token; an engine whose requests end
unforeseen computes one token more for each, which is discarded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import NamedTuple

from conflux_ray.simulator.clock import Clock


@dataclass(frozen=True, slots=True)
class Ahead:
    """How an engine issues its iterations.

    Args:
        iterations: issued at once, the running one included; 1 plans at the end of the one before.
        lead: the next iteration is planned so many seconds before the running one is expected to end; infinity plans
            it as soon as the running one has started.
        lead_share: the same as a share of the running iteration's expected time; the longer of both counts.
        planning: seconds from the beginning of planning until an idle device starts what was planned. Running ahead
            hides it. 0 where the fixed host time of the iterations has it already, as in the stated figures.
        gap: seconds that the device stands still between two iterations although the second one was issued in time.
            0 unless a server's iteration log shows one (`conflux bench timeline`).

    Raises:
        ValueError: a value is out of range.
    """

    iterations: int = 2
    lead: float = inf
    lead_share: float = 0.0
    planning: float = 0.0
    gap: float = 0.0

    def __post_init__(self) -> None:
        if self.iterations < 1:
            raise ValueError(f"run_ahead={self.iterations} must be at least 1 iteration")
        for name in ("lead", "lead_share", "planning", "gap"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")

    def plans_at(self, started: float, predicted: float) -> float:
        """When the iteration after one is planned that started at `started` and is expected to take `predicted`."""
        return started + predicted - max(self.lead, self.lead_share * predicted)


class Planned(NamedTuple):
    """An iteration as its engine planned it."""

    seconds: float  # that it takes
    predicted: float  # that the engine expects it to take, seconds
    ended: Callable[[], None]  # called when its results are there


class Issuer:
    """Has iterations planned ahead and run one after the other.

    Args:
        clock: of the simulation.
        plan: plans the iteration that starts at the time it is given, and applies what it will have done; None if
            there is nothing to run.
        ahead: when.
    """

    def __init__(self, clock: Clock, plan: Callable[[float], Planned | None], ahead: Ahead) -> None:
        self._clock = clock
        self._plan = plan
        self._ahead = ahead
        self._plan_next_at: deque[float] = deque()  # of the iterations in flight
        self._end = -ahead.gap  # of the last one issued
        self._timer = False

    @property
    def in_flight(self) -> int:
        """Iterations issued that have not ended."""
        return len(self._plan_next_at)

    def wake(self) -> None:
        """There is something new to plan. While something is in flight it waits for the next plan."""
        if not self._plan_next_at:
            self._issue()

    def _issue(self) -> None:
        clock, ahead = self._clock, self._ahead
        while len(self._plan_next_at) < ahead.iterations:
            if self._plan_next_at and self._plan_next_at[0] > clock.now:
                if not self._timer:
                    self._timer = True
                    clock.at(self._plan_next_at[0], self._ring)
                return
            start = max(self._end + ahead.gap, clock.now + ahead.planning)
            planned = self._plan(start)
            if planned is None:
                return
            self._end = start + planned.seconds
            self._plan_next_at.append(ahead.plans_at(start, planned.predicted))
            clock.at(self._end, partial(self._ended, planned))

    def _ring(self) -> None:
        self._timer = False
        self._issue()

    def _ended(self, planned: Planned) -> None:
        self._plan_next_at.popleft()
        planned.ended()
        self._issue()
