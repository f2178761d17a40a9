"""The plain policy: first come first served, even split, worst-fit. No latency model; a fixed token budget."""

from __future__ import annotations

from collections.abc import Sequence

from conflux_ray.planning.dispatch import ensure_token
from conflux_ray.planning.interface import Decision, DecodeState, KVState, PendingPrefill, PrefillChunk


def even_split(length: int, num_ranks: int) -> list[int]:
    """Cut `length` tokens into `num_ranks` shards that differ by at most one token."""
    return [length // num_ranks + (r < length % num_ranks) for r in range(num_ranks)]


class PlainPolicy:
    """FCFS within a fixed budget of prefill tokens an iteration.

    A request that finds no memory closes the door for those that would start behind it, not for those that already
    hold blocks: they may hold the very memory that it waits for.

    Args:
        budget: prefill tokens an iteration may hold, over all ranks.
        max_decodes: most resident decodes of one rank.
    """

    def __init__(self, budget: int, max_decodes: int) -> None:
        self.budget = budget
        self.max_decodes = max_decodes

    def schedule(self, pending: Sequence[PendingPrefill], decodes: DecodeState, kv: KVState, now: float) -> Decision:
        n = decodes.num_ranks
        context, resident = list(decodes.context), list(decodes.tokens)
        left = self.budget
        chunks: list[PrefillChunk] = []
        placements: dict[str, int] = {}
        closed = False
        for request in sorted(pending, key=lambda p: (p.priority, p.arrival, p.request_id)):
            length = min(request.remaining, left)
            if length == 0:
                break
            if request.prefill_blocks and (closed or not kv.can_start(request)):
                closed = True
                continue
            completes = length == request.remaining
            shard = even_split(length, n)
            if completes and request.needs_placement:
                ranks = [
                    r
                    for r in range(n)
                    if kv.fits(request, r, request.prefill_blocks) and resident[r] < self.max_decodes
                ]
                if not ranks:
                    closed = True
                    continue
                rank = min(ranks, key=lambda r: (context[r], r))
                placements[request.request_id] = rank
                context[rank] += request.total_tokens
                resident[rank] += 1
                shard = ensure_token(shard, rank)
            kv.start(request)
            if request.request_id in placements:
                kv.place(request, placements[request.request_id])
            left -= length
            chunks.append(PrefillChunk(request.request_id, request.computed_tokens, length, tuple(shard), completes))
        return Decision(tuple(chunks), placements, budget=self.budget)

    def observe(self, decision: Decision, measured: float) -> None:
        """The plain policy learns nothing."""
