"""Dual-mode decode placement: the rank on which a completing request will decode (section 6.3, Algorithm 3).

Spreading decodes keeps decode attention even and the prefill budget large, packing them keeps room for long requests.
While a feasible rank is below the KV-utilization threshold eta the least loaded one is taken, afterwards the fullest.
"""

from __future__ import annotations

from collections.abc import Sequence

from conflux_ray.planning.interface import KVState, PendingPrefill


def feasible_ranks(
    request: PendingPrefill, kv: KVState, residents: Sequence[int], max_decodes: int, headroom: int
) -> list[int]:
    """G: ranks that can take the request's decode residency (line 1).

    The headroom is there for the growth of the decodes that already live on a rank, so a rank without any may be
    filled to its last block; otherwise a request as large as a rank could never decode.

    Args:
        request: the completing request; blocks it has yet to take for its prefill count as taken.
        kv: free blocks, with this step's earlier starts and placements.
        residents: decodes on each rank, this step's placements included.
        max_decodes: most resident decodes of one rank.
        headroom: h, blocks that must stay free.
    """
    return [
        rank
        for rank, resident in enumerate(residents)
        if resident < max_decodes and kv.fits(request, rank, request.prefill_blocks + (headroom if resident else 0))
    ]


def choose_rank(ranks: Sequence[int], kv: KVState, context: Sequence[int], eta: float) -> int | None:
    """g*: worst-fit below eta, best-fit above, None if there is no rank (lines 2-7).

    Args:
        ranks: G, ascending.
        kv: as for `feasible_ranks`.
        context: aggregate decode context of each rank, tokens, this step's placements included.
        eta: KV-utilization threshold, 0..1.

    Returns:
        The rank; equal ones go to the lowest number.
    """
    if not ranks:
        return None
    low = [rank for rank in ranks if kv.utilization(rank) < eta]
    if low:
        return min(low, key=context.__getitem__)
    return max(ranks, key=kv.utilization)
