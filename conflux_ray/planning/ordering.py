"""The order in which pending prefills are considered (Algorithm 1, lines 3-4) and the registry of policies.

A policy is one function here and one line in `ORDERS`. Every order is total: priority first, then the policy's keys,
then the request id, so that equal keys never depend on the order in which the instance lists its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress
from math import inf
from operator import attrgetter, not_

from conflux_ray.planning.admission import capacity_before, moore_hodgson
from conflux_ray.planning.interface import PendingPrefill

Column = Sequence[int] | Sequence[float]


class Queue:
    """The pending prefills R as columns; a column is built when an order first reads it."""

    def __init__(self, pending: Sequence[PendingPrefill]) -> None:
        self.pending = pending

    @cached_property
    def priority(self) -> list[int]:
        return list(map(attrgetter("priority"), self.pending))

    @cached_property
    def one_class(self) -> bool:
        """Whether all requests have the same priority."""
        return len(set(self.priority)) <= 1

    @cached_property
    def deadline(self) -> list[float]:
        """d_i, seconds."""
        return list(map(attrgetter("deadline"), self.pending))

    @cached_property
    def arrival(self) -> list[float]:
        """Seconds."""
        return list(map(attrgetter("arrival"), self.pending))

    @cached_property
    def remaining(self) -> list[int]:
        """m_i, tokens."""
        return list(map(attrgetter("remaining"), self.pending))

    @cached_property
    def due(self) -> list[float]:
        """The deadline, or the arrival of a request that has none, seconds: overdue requests go in its order."""
        if max(self.deadline) < inf:
            return self.deadline
        return [a if d == inf else d for d, a in zip(self.deadline, self.arrival, strict=True)]

    def sort(self, *keys: Column) -> list[int]:
        """Indices ordered by priority, then `keys`, the most significant first, equal ones by request id."""
        *more_significant, last = keys
        order = sorted(range(len(last)), key=last.__getitem__)
        if len(set(last)) < len(order):
            order = sorted(order, key=lambda i: (last[i], self.pending[i].request_id))
        for column in reversed(more_significant):
            order.sort(key=column.__getitem__)
        return self.by_class(order)

    def by_class(self, order: list[int]) -> list[int]:
        """`order` with priority as the most significant key."""
        return order if self.one_class else sorted(order, key=self.priority.__getitem__)

    def longest_overdue(self, now: float, after: float) -> int | None:
        """The request whose deadline passed first, if that was more than `after` seconds before `now`."""
        earliest = min(self.due)
        if now - earliest <= after:
            return None
        overdue = [i for i, due in enumerate(self.due) if due == earliest]
        return min(overdue, key=lambda i: self.pending[i].request_id)


@dataclass(frozen=True, slots=True)
class Order:
    """Which requests are tried first.

    Args:
        indices: lazily, into the queue: the scheduler stops reading when its budget is used up.
        rejected: those not expected to meet their deadline.
        overtakes: whether a later arrival may be served before an earlier one for ever, so that waiting requests need
            the starvation bound.
    """

    indices: Iterator[int]
    rejected: Sequence[int] = ()
    overtakes: bool = True


def slo(queue: Queue, budget: int, now: float, tau: float) -> Order:
    """Algorithm 1: those that Moore-Hodgson admits by deadline, then the rejected, shortest first.

    Args:
        queue: R.
        budget: B_0, tokens.
        now: t, seconds.
        tau: seconds.
    """
    by_deadline = queue.sort(queue.deadline)
    capacity = capacity_before([queue.deadline[i] for i in by_deadline], budget, now, tau)
    classes = None if queue.one_class else [queue.priority[i] for i in by_deadline]
    admitted = moore_hodgson([queue.remaining[i] for i in by_deadline], capacity, classes)
    rejected = list(compress(by_deadline, map(not_, admitted)))

    def shortest_first() -> Iterator[int]:
        yield from queue.by_class(sorted(rejected, key=queue.remaining.__getitem__))

    return Order(chain(compress(by_deadline, admitted), shortest_first()), rejected)


def fcfs(queue: Queue, budget: int, now: float, tau: float) -> Order:
    """First come, first served."""
    return Order(iter(queue.sort(queue.arrival)), overtakes=False)


def srpt(queue: Queue, budget: int, now: float, tau: float) -> Order:
    """Shortest remaining prefill first."""
    return Order(iter(queue.sort(queue.remaining, queue.arrival)))


ORDERS: dict[str, Callable[[Queue, int, float, float], Order]] = {"slo": slo, "fcfs": fcfs, "srpt": srpt}
"""The scheduling policies by name."""
