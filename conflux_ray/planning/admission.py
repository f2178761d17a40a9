"""TTFT-aware admission: the most requests that can still meet their deadlines (section 6.4, Algorithm 4, appendix G).

Moore and Hodgson's rule maximises the number of on-time jobs on one machine of constant speed, here B_0 tokens every
tau seconds. Priority classes are served strictly one after the other, so each class is solved with what the more
urgent ones left of the capacity.

Plain lists and `heapq`: at the queue lengths of an instance they are faster than arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappush, heapreplace
from itertools import accumulate, compress, groupby
from math import floor, inf
from operator import gt


def capacity_before(deadlines: Sequence[float], budget: int, now: float, tau: float) -> list[float]:
    """K_i = max(0, floor((d_i - t) / tau)) * B_0, tokens (line 6).

    Args:
        deadlines: d_i, seconds; infinity means none.
        budget: B_0, tokens an iteration.
        now: t, seconds.
        tau: the length of an iteration, seconds.
    """
    try:
        return [floor((d - now) / tau) * budget if d > now else 0 for d in deadlines]
    except OverflowError:  # infinity has no floor; asking for it first would cost every finite deadline a comparison
        return [inf if d == inf else floor((d - now) / tau) * budget if d > now else 0 for d in deadlines]


def moore_hodgson(
    remaining: Sequence[int], capacity: Sequence[float], priority: Sequence[int] | None = None
) -> list[bool]:
    """Which requests are admitted.

    Args:
        remaining: m_i, tokens as `capacity` counts them, in order of (priority, deadline).
        capacity: K_i, tokens; not decreasing within a priority class.
        priority: the class of each request, not decreasing; None if there is only one.

    Returns:
        True for the admitted. Of equally large requests the one with the latest deadline is rejected first.
    """
    if priority is None:
        return _admit_class(remaining, capacity)
    admitted: list[bool] = []
    promised = 0
    for _, members in groupby(priority):
        first = len(admitted)
        last = first + len(list(members))
        admitted += _admit_class(remaining[first:last], [k - promised for k in capacity[first:last]])
        promised += sum(compress(remaining[first:last], admitted[first:]))
    return admitted


def _admit_class(remaining: Sequence[int], capacity: Sequence[float]) -> list[bool]:
    """Lines 2-9 for requests of one class, in EDF order.

    The heap is left alone where its answer is known. When i comes, C <= K holds for those before it, and K_i is no
    smaller, so if C + m_i > K_i one request goes: the largest in the heap with i, of equal ones the latest. That is i
    itself unless a request in the heap is larger.
    """
    count = len(remaining)
    for start, late in enumerate(map(gt, accumulate(remaining), capacity)):  # noqa: B007  the first that is late
        if late:
            break
    else:
        return [True] * count
    admitted = [True] * start + [False] * (count - start)
    total = sum(remaining[:start])
    # A max-heap on (m_i, i), as one negative integer each; `largest` is the m_i on its top, 0 if it is empty.
    heap = [-(tokens * count + i) for i, tokens in enumerate(remaining[:start])]
    heapify(heap)
    largest = -heap[0] // count if heap else 0
    for i in range(start, count):
        tokens = remaining[i]
        if total + tokens <= capacity[i]:
            total += tokens
            heappush(heap, -(tokens * count + i))
            if tokens > largest:
                largest = tokens
        elif tokens < largest:
            total += tokens - largest
            admitted[-heapreplace(heap, -(tokens * count + i)) % count] = False
            largest = -heap[0] // count
        else:
            continue
        admitted[i] = True
    return admitted
