"""TTFT-aware admission: the most requests that can still meet their deadlines (section 6.4, Algorithm 4, appendix G).

Moore and Hodgson's rule maximises the number of on-time jobs on one machine of constant speed, here B_0 tokens every
tau seconds. Priority classes are served strictly one after the other, so each class is solved with what the more
urgent ones left of the capacity.
"""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


def capacity_before(deadlines: NDArray[np.float64], budget: int, now: float, tau: float) -> NDArray[np.float64]:
    """K_i = max(0, floor((d_i - t) / tau)) * B_0, tokens (line 6).

    Args:
        deadlines: d_i, seconds; infinity means none.
        budget: B_0, tokens an iteration.
        now: t, seconds.
        tau: the length of an iteration, seconds.
    """
    if budget <= 0:
        return np.where(np.isinf(deadlines) & (deadlines > 0), np.inf, 0.0)
    return np.maximum(0.0, np.floor((deadlines - now) / tau)) * budget


def moore_hodgson(
    remaining: NDArray[np.int64], capacity: NDArray[np.float64], priority: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """Which requests are admitted.

    Args:
        remaining: m_i, tokens, in order of (priority, deadline).
        capacity: K_i, tokens; not decreasing within a priority class.
        priority: the class of each request, not decreasing; None if there is only one.

    Returns:
        True for the admitted. Of equally large requests the one with the latest deadline is rejected first.
    """
    admitted = remaining <= capacity  # the others are popped as soon as they are pushed
    borders = [0, len(remaining)]
    if priority is not None:
        borders[1:1] = (np.flatnonzero(np.diff(priority)) + 1).tolist()
    promised = 0
    for first, last in pairwise(borders):
        possible = first + np.flatnonzero(admitted[first:last])
        rejected = _reject(remaining[possible], capacity[possible] - promised)
        admitted[possible[rejected]] = False
        if last < len(remaining):
            promised += int(remaining[first:last][admitted[first:last]].sum())
    return admitted


def _reject(remaining: NDArray[np.int64], capacity: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices that Moore and Hodgson's rule rejects, of one class in EDF order (lines 2-9)."""
    excess = np.cumsum(remaining) - capacity  # C - K_i, had nothing been rejected
    late = excess > 0
    if not late.any():
        return np.empty(0, dtype=np.int64)
    start = int(late.argmax())  # before it nothing is rejected
    count = len(remaining)
    # A max-heap on (m_i, i), as one integer each: heapq pops the smallest, and key // count is -m_i.
    keys = (np.arange(count - 1, -1, -1) - remaining * count).tolist()
    heap = keys[:start]
    heapq.heapify(heap)
    removed = 0
    rejected: list[int] = []
    for key, over in zip(keys[start:], excess[start:].tolist(), strict=True):
        if over > removed:
            largest = heapq.heappushpop(heap, key)
            removed -= largest // count
            rejected.append(largest)
        else:
            heapq.heappush(heap, key)
    return count - 1 - np.array(rejected, dtype=np.int64) % count
