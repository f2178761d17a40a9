"""The order in which pending prefills are considered (Algorithm 1, lines 3-4) and the registry of policies.

A policy is one function here and one line in `ORDERS`. Every order is total: priority first, then the policy's keys,
then the request id, so that equal keys never depend on the order in which the instance lists its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conflux_ray.planning.admission import capacity_before, moore_hodgson
from conflux_ray.planning.interface import PendingPrefill

Indices = NDArray[np.int64]
Column = NDArray[np.int64] | NDArray[np.float64]


class Queue:
    """The pending prefills R as columns; a column is built when an order first reads it."""

    def __init__(self, pending: Sequence[PendingPrefill]) -> None:
        self.pending = pending

    def _column(self, name: str, dtype: type) -> NDArray[Any]:
        return np.fromiter(map(attrgetter(name), self.pending), dtype, len(self.pending))

    @cached_property
    def one_class(self) -> bool:
        """Whether all requests have the same priority."""
        return len(set(map(attrgetter("priority"), self.pending))) <= 1

    @cached_property
    def priority(self) -> NDArray[np.int64]:
        return self._column("priority", np.int64)

    @cached_property
    def deadline(self) -> NDArray[np.float64]:
        """d_i, seconds."""
        return self._column("deadline", np.float64)

    @cached_property
    def arrival(self) -> NDArray[np.float64]:
        """Seconds."""
        return self._column("arrival", np.float64)

    @cached_property
    def remaining(self) -> NDArray[np.int64]:
        """m_i, tokens."""
        return self._column("remaining", np.int64)

    @cached_property
    def due(self) -> NDArray[np.float64]:
        """The deadline, or the arrival of a request that has none, seconds: overdue requests go in its order."""
        if self.deadline.max() < np.inf:
            return self.deadline
        return np.where(np.isinf(self.deadline), self.arrival, self.deadline)

    def sort(self, *keys: Column, subset: Indices | None = None) -> Indices:
        """Indices ordered by priority, then `keys`, the most significant first, equal ones by request id.

        Args:
            keys: columns of the queue.
            subset: sort these indices only.
        """
        columns = [*([] if self.one_class else [self.priority]), *keys]
        if subset is not None:
            columns = [column[subset] for column in columns]
        order = np.lexsort(columns[::-1]) if len(columns) > 1 else columns[0].argsort(kind="stable")
        equal: NDArray[np.bool_] | None = None
        for column in reversed(columns):  # the last key ties least often
            ranked = column[order]
            same = ranked[1:] == ranked[:-1]
            equal = same if equal is None else equal & same
            if not equal.any():
                break
        else:
            assert equal is not None
            if subset is not None:
                order = subset[order]
            self._break_ties(order, equal)
            return order
        return order if subset is None else subset[order]

    def _break_ties(self, order: Indices, equal: NDArray[np.bool_]) -> None:
        """Sort each run of equal keys in place; equal[k] says whether entries k and k + 1 have equal keys."""
        edges = np.flatnonzero(np.diff(np.concatenate(([False], equal, [False])).astype(np.int8)))
        for first, last in edges.reshape(-1, 2).tolist():
            run = order[first : last + 1].tolist()
            order[first : last + 1] = sorted(run, key=lambda i: self.pending[i].request_id)

    def longest_overdue(self, now: float, after: float) -> int | None:
        """The request whose deadline passed first, if that was more than `after` seconds before `now`."""
        earliest = self.due.min()
        if now - earliest <= after:
            return None
        return min(np.flatnonzero(self.due == earliest).tolist(), key=lambda i: self.pending[i].request_id)


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
    capacity = capacity_before(queue.deadline[by_deadline], budget, now, tau)
    classes = None if queue.one_class else queue.priority[by_deadline]
    admitted = moore_hodgson(queue.remaining[by_deadline], capacity, classes)
    rejected = by_deadline[~admitted]

    def indices() -> Iterator[int]:
        yield from by_deadline[admitted].tolist()
        yield from queue.sort(queue.remaining, queue.deadline, subset=rejected).tolist()

    return Order(indices(), rejected.tolist())


def fcfs(queue: Queue, budget: int, now: float, tau: float) -> Order:
    """First come, first served."""
    return Order(iter(queue.sort(queue.arrival).tolist()), overtakes=False)


def srpt(queue: Queue, budget: int, now: float, tau: float) -> Order:
    """Shortest remaining prefill first."""
    return Order(iter(queue.sort(queue.remaining, queue.arrival).tolist()))


ORDERS: dict[str, Callable[[Queue, int, float, float], Order]] = {"slo": slo, "fcfs": fcfs, "srpt": srpt}
"""The scheduling policies by name."""
