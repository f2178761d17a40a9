"""The order in which pending prefills are considered (Algorithm 1, lines 3-4) and the registry of policies.

A policy is one function here and one line in `ORDERS`. Every order is total: priority first, then the policy's keys,
then the request id, so that equal keys never depend on the order in which the instance lists its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, compress, islice
from math import inf
from operator import lt, not_
from typing import TypeVar

from conflux_ray.planning.admission import capacity_before, moore_hodgson
from conflux_ray.planning.interface import PendingPrefill

Column = list[int] | list[float]
T = TypeVar("T")


class Queue:
    """The pending prefills R as columns; one that not every order reads is built when it is first read.

    Args:
        pending: R.
        tokens_per_pair: what a token pair of prefill attention costs, in tokens of the budget (`Dispatcher`).

    Attributes:
        deadline: d_i, seconds.
        due: the deadline, or the arrival of a request that has none, seconds: overdue requests go in its order.
        one_class: whether all requests have the same priority.
    """

    def __init__(self, pending: Sequence[PendingPrefill], tokens_per_pair: float = 0.0) -> None:
        self.pending = pending
        self.tokens_per_pair = tokens_per_pair
        self.deadline = [request.deadline for request in pending]
        self.due = self.deadline
        if not sum(self.deadline) < inf:  # some term is infinite; `max` takes three times as long
            self.due = [r.arrival if r.deadline == inf else r.deadline for r in pending]
        self.one_class = len({request.priority for request in pending}) <= 1

    @cached_property
    def priority(self) -> list[int]:
        return [request.priority for request in self.pending]

    @cached_property
    def arrival(self) -> list[float]:
        """Seconds."""
        return [request.arrival for request in self.pending]

    @cached_property
    def remaining(self) -> list[int]:
        """m_i, tokens."""
        return [request.remaining for request in self.pending]

    @cached_property
    def cost(self) -> list[int]:
        """m_i with its prefill attention, as tokens of a budget that leaves attention out.

        B_0 counts tokens as if they attended to nothing. In a long prompt attention adds half as much again, and one
        admitted by its length alone takes the time of others and is late itself.
        """
        if not self.tokens_per_pair:
            return self.remaining
        half_pairs = max(1, round(2 / self.tokens_per_pair))  # whole numbers: half the time of floats
        return [
            m + m * (2 * request.computed_tokens + m + 1) // half_pairs
            for m, request in zip(self.remaining, self.pending, strict=True)
        ]

    def sort(self, *keys: Column) -> Sequence[int]:
        """Indices ordered by priority, then `keys`, the most significant first, equal ones by request id."""
        *more_significant, last = keys
        order: Sequence[int] = range(len(last))
        if not increases(last):
            order = sorted(order, key=last.__getitem__)
            if len(set(last)) < len(order):
                order = sorted(order, key=lambda i: (last[i], self.pending[i].request_id))
        for column in reversed(more_significant):
            order = sorted(order, key=column.__getitem__)
        return self.by_class(order)

    def by_class(self, order: Sequence[int]) -> Sequence[int]:
        """`order` with priority as the most significant key."""
        return order if self.one_class else sorted(order, key=self.priority.__getitem__)

    def longest_overdue(self, now: float, after: float) -> int | None:
        """The request whose deadline passed first, if that was more than `after` seconds before `now`."""
        earliest = min(self.due)
        if now - earliest <= after:
            return None
        overdue = [i for i, due in enumerate(self.due) if due == earliest]
        return min(overdue, key=lambda i: self.pending[i].request_id)


def increases(column: Column) -> bool:
    """Whether every value is larger than the one before it."""
    return all(map(lt, column, islice(column, 1, None)))


def ordered(column: list[T], order: Sequence[int]) -> list[T]:
    """The column's values in `order`; the column itself where that is the queue's own."""
    return column if isinstance(order, range) else [column[i] for i in order]


@dataclass(frozen=True, slots=True)
class Order:
    """Which requests are tried first.

    Args:
        indices: lazily, into the queue: the scheduler stops reading when its budget is used up.
        rejected: how many are not expected to meet their deadline.
        overtakes: whether a later arrival may be served before an earlier one for ever, so that waiting requests need
            the starvation bound.
    """

    indices: Iterator[int]
    rejected: int = 0
    overtakes: bool = True


def slo(queue: Queue, budget: int, now: float, tau: float) -> Order:
    """Algorithm 1: those that Moore-Hodgson admits by deadline, then the rejected, least work first.

    Args:
        queue: R.
        budget: B_0, tokens.
        now: t, seconds, by which deadlines are judged.
        tau: seconds.
    """
    by_deadline = queue.sort(queue.deadline)
    capacity = capacity_before(ordered(queue.deadline, by_deadline), budget, now, tau)
    classes = None if queue.one_class else ordered(queue.priority, by_deadline)
    admitted = moore_hodgson(ordered(queue.cost, by_deadline), capacity, classes)

    def least_work_first() -> Iterator[int]:
        rejected = compress(by_deadline, map(not_, admitted))
        yield from queue.by_class(sorted(rejected, key=queue.cost.__getitem__))

    return Order(chain(compress(by_deadline, admitted), least_work_first()), rejected=admitted.count(False))


def fcfs(queue: Queue, budget: int, now: float, tau: float) -> Order:
    """First come, first served."""
    return Order(iter(queue.sort(queue.arrival)), overtakes=False)


def srpt(queue: Queue, budget: int, now: float, tau: float) -> Order:
    """Shortest remaining prefill first."""
    return Order(iter(queue.sort(queue.remaining, queue.arrival)))


ORDERS: dict[str, Callable[[Queue, int, float, float], Order]] = {"slo": slo, "fcfs": fcfs, "srpt": srpt}
"""The scheduling policies by name."""
