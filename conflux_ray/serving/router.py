"""The global router: which instance takes a request (paper, section 5.1, step 1).

The choice is the instance where the request's prefill would end first: its queued work and the request's own, in
seconds by its own latency model. Reports arrive with every iteration; in between, the router adds what it has
dispatched since, so that a burst spreads. Which dispatches a report already contains is known exactly: every request of
a session is numbered, and a report says how many its instance has received.

`ROUTING` has two other ways to choose, to compare with (`conflux bench routing`).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass, field

from conflux_ray.wire import LoadReport, Ready

DEFAULT_CAPACITY = 1000.0  # prompt tokens per second, until an instance has reported its own


class NoInstanceError(Exception):
    """No instance can take the request now."""


class UnsupportedError(Exception):
    """No instance that is ready supports what the request asks for; `features` names it."""

    def __init__(self, features: Iterable[str]) -> None:
        self.features = tuple(sorted(features))
        super().__init__(f"not supported by this deployment: {', '.join(self.features)}")


@dataclass(slots=True)
class InstanceLoad:
    """What the router knows of one instance with an open session."""

    ready: Ready
    report: LoadReport | None = None
    reported_at: float = 0.0
    in_flight: int = 0  # requests dispatched by this router and not released
    sent: int = 0  # requests numbered in this session
    unreported: deque[tuple[int, Dispatch]] = field(default_factory=deque)
    last_dispatch: int = 0
    open: bool = True

    @property
    def draining(self) -> bool:
        """Whether it takes nothing more."""
        return self.report is not None and self.report.draining

    @property
    def closing(self) -> bool:
        """Whether it takes only what has been let in: the deployment is being drained."""
        return self.report is not None and self.report.closing

    @property
    def open_to_new(self) -> bool:
        """Whether it has said that it takes new requests."""
        return self.report is not None and not (self.report.draining or self.report.closing)

    @property
    def capacity(self) -> float:
        """Prompt tokens per second."""
        return DEFAULT_CAPACITY if self.report is None else self.report.capacity

    @property
    def requests(self) -> int:
        """Requests that have not ended: of its report, from all ingresses, and what was dispatched since."""
        reported = 0 if self.report is None else self.report.running + self.report.waiting
        return reported + sum(not dispatch.released for _, dispatch in self.unreported)

    def queued_work(self, now: float) -> float:
        """Seconds until the instance would start on new work: its report, aged, and what was dispatched since."""
        reported = 0.0
        if self.report is not None:
            reported = max(0.0, self.report.queued_work_s - (now - self.reported_at))
        tokens = sum(dispatch.tokens for _, dispatch in self.unreported if not dispatch.released)
        return reported + tokens / self.capacity


class Dispatch:
    """One request's claim on one instance. Whoever gets it must `release` it, once or more; only the first counts."""

    __slots__ = ("_load", "instance_id", "released", "tokens")

    def __init__(self, load: InstanceLoad, tokens: int) -> None:
        self._load = load
        self.instance_id = load.ready.instance_id
        self.tokens = tokens
        self.released = False
        load.sent += 1
        load.in_flight += 1
        load.unreported.append((load.sent, self))

    def release(self) -> None:
        """Give the claim back: the request has finished, failed, been aborted, or moves on."""
        if not self.released:
            self.released = True
            self._load.in_flight -= 1


def _queued_work(load: InstanceLoad, tokens: int, now: float) -> tuple[float, ...]:
    # The request's own work counts, or an idle slow instance would look as good as an idle fast one.
    return load.queued_work(now) + tokens / load.capacity, load.in_flight


def _shortest_queue(load: InstanceLoad, tokens: int, now: float) -> tuple[float, ...]:
    return (load.requests,)


def _round_robin(load: InstanceLoad, tokens: int, now: float) -> tuple[float, ...]:
    return ()


ROUTING: dict[str, Callable[[InstanceLoad, int, float], tuple[float, ...]]] = {
    "queued_work": _queued_work,
    "shortest_queue": _shortest_queue,
    "round_robin": _round_robin,
}
"""`ingress.routing`: what an instance is chosen by, for a request of so many tokens, now.

The least wins; of equals, the instance whose last request is the oldest.
"""


class Router:
    """Chooses instances and keeps account of what was sent to each.

    Args:
        stale_after: a report older than this (seconds) makes an instance the last choice.
        clock: monotonic seconds.
        routing: a key of `ROUTING`.

    Raises:
        ValueError: there is no such routing.
    """

    def __init__(
        self,
        stale_after: float = 2.0,
        clock: Callable[[], float] = time.monotonic,
        routing: str = "queued_work",
    ) -> None:
        if routing not in ROUTING:
            raise ValueError(f"routing={routing!r} is unknown; choose one of {', '.join(ROUTING)}")
        self._rank = ROUTING[routing]
        self._stale_after = stale_after
        self._clock = clock
        self._loads: dict[str, InstanceLoad] = {}
        self._order = itertools.count(1)

    @property
    def instances(self) -> dict[str, InstanceLoad]:
        """Instances with an open session, by id."""
        return self._loads

    @property
    def features(self) -> frozenset[str]:
        """What at least one instance supports."""
        return frozenset().union(*(load.ready.features for load in self._loads.values()))

    def has_instance(self) -> bool:
        """Whether some instance takes new requests."""
        return any(load.open_to_new for load in self._loads.values())

    def is_closing(self) -> bool:
        """Whether the deployment is being drained: no instance takes new requests, and none that does will come."""
        return bool(self._loads) and all(load.closing for load in self._loads.values())

    def is_ending(self) -> bool:
        """Whether it is drained and every instance goes: no successor will come."""
        return self.is_closing() and all(load.draining for load in self._loads.values())

    def add_instance(self, ready: Ready) -> None:
        """A session with this instance has opened."""
        self._loads[ready.instance_id] = InstanceLoad(ready, reported_at=self._clock())

    def remove_instance(self, instance_id: str) -> None:
        """The session has ended; its dispatches may still be released."""
        if (load := self._loads.pop(instance_id, None)) is not None:
            load.open = False

    def update(self, instance_id: str, received: int, report: LoadReport) -> None:
        """Take a report that counts the first `received` requests of the session."""
        load = self._loads.get(instance_id)
        if load is None:
            return
        load.report, load.reported_at = report, self._clock()
        while load.unreported and load.unreported[0][0] <= received:
            load.unreported.popleft()

    def check(self, features: Set[str]) -> None:
        """Raise UnsupportedError if instances are ready but none supports all of `features`."""
        if self._loads and not any(features <= set(load.ready.features) for load in self._loads.values()):
            raise UnsupportedError(features - self.features or features)

    def dispatch(
        self,
        num_tokens: int,
        features: Set[str] = frozenset(),
        exclude: Set[str] = frozenset(),
        prefer: str | None = None,
    ) -> Dispatch:
        """Choose an instance for a request that has been let in, and account for it.

        One that is being drained with the whole deployment comes last: whoever has let a request in, or has had a part
        of its answer, is not turned away any more.

        Args:
            num_tokens: tokens to prefill (prompt and output so far).
            features: what the instance must support.
            exclude: instances not to use.
            prefer: an instance to use if it is eligible (n > 1: where the siblings are, which share the prompt).

        Raises:
            UnsupportedError: see `check`.
            NoInstanceError: every instance that could take it is draining, excluded, too small or gone.
        """
        self.check(features)
        now = self._clock()
        eligible = [
            load
            for load in self._loads.values()
            if not load.draining
            and load.ready.instance_id not in exclude
            and num_tokens < load.ready.max_model_len
            and features <= set(load.ready.features)
        ]
        if not eligible:
            raise NoInstanceError(f"none of {len(self._loads)} connected instances can take the request")
        chosen = next((load for load in eligible if load.ready.instance_id == prefer), None)
        if chosen is None:
            chosen = min(eligible, key=lambda load: self._cost(load, num_tokens, now))
        chosen.last_dispatch = next(self._order)
        return Dispatch(chosen, num_tokens)

    def _cost(self, load: InstanceLoad, tokens: int, now: float) -> tuple[float, ...]:
        stale = now - load.reported_at > self._stale_after
        return stale, load.closing, *self._rank(load, tokens, now), load.last_dispatch
