"""One rank's part of an iteration plan, as index arrays (design, section 4).

The rank computes `[decode tokens | prefill shard tokens]` through the shared linear operators. At attention it sends
its shard's Q, K and V to all ranks, split by head, and receives every rank's tokens for its own heads: *received
tokens* come in order of source rank, and within a source in order of chunk. Each shard is a sequence of its own in the
attention call: its queries see the request's KV up to the shard's end, all of which is written first, so received
tokens need no reordering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from conflux_ray.execution.plan import IterationPlan

IntArray = npt.NDArray[np.int64]
BlockTable = npt.NDArray[np.int64]


class Segment(NamedTuple):
    """One shard as an attention sequence: queries [start, end) of an allocation, keys [0, end)."""

    alloc_id: int
    start: int
    end: int


@dataclass(slots=True)
class RankBatch:
    """Index arrays of one rank for one iteration. n_d decodes, n_p own prefill tokens, T received tokens."""

    decode_ids: list[int]  # alloc_id per decode, n_d
    decode_positions: IntArray  # (n_d,)
    own_segments: list[Segment]  # this rank's shards, in order of chunk
    shard_tokens: IntArray  # (n_p,) token ids of the own shards
    received: list[Segment]  # all shards, in order of source rank, then chunk
    shard_sizes: list[int]  # prefill tokens per source rank; sizes of the all-to-all
    sample_ids: list[int]  # alloc_id per sampled row: the decodes, then completing prefills of this rank
    sample_rows: IntArray  # rows of the hidden states to sample from
    sample_positions: list[int]  # position of the token each row samples

    @property
    def num_decodes(self) -> int:
        return len(self.decode_ids)

    @property
    def num_shard_tokens(self) -> int:
        """n_p, this rank's prefill tokens."""
        return len(self.shard_tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens through the shared linear operators."""
        return self.num_decodes + self.num_shard_tokens

    @property
    def num_received(self) -> int:
        """T, prefill tokens of all ranks."""
        return sum(self.shard_sizes)

    @property
    def positions(self) -> IntArray:
        """Position of every token in its request, (n_d + n_p,)."""
        return np.concatenate([self.decode_positions, segment_positions(self.own_segments)])


def segment_positions(segments: Sequence[Segment]) -> IntArray:
    """Positions of the tokens of `segments`, one after the other."""
    if not segments:
        return np.empty(0, np.int64)
    return np.concatenate([np.arange(s.start, s.end, dtype=np.int64) for s in segments])


def build_batch(plan: IterationPlan, rank: int, num_ranks: int) -> RankBatch:
    """Derive the part of logical rank `rank` from the plan."""
    decodes = plan.decodes[rank]
    by_rank: list[list[Segment]] = [[] for _ in range(num_ranks)]
    tokens: list[npt.NDArray[np.int32]] = []
    sample_ids = [d.alloc_id for d in decodes]
    sample_rows = list(range(len(decodes)))
    sample_positions = [d.position + 1 for d in decodes]
    row = len(decodes)
    for chunk in plan.chunks:
        for shard in chunk.shards:
            by_rank[shard.rank].append(Segment(chunk.alloc_id, shard.start, shard.end))
            if shard.rank == rank:
                ids = np.frombuffer(chunk.token_ids, "<i4")
                tokens.append(ids[shard.start - chunk.start : shard.end - chunk.start])
                row += shard.end - shard.start
                if chunk.samples and shard.end == chunk.end:
                    sample_ids.append(chunk.alloc_id)
                    sample_rows.append(row - 1)
                    sample_positions.append(shard.end)
    return RankBatch(
        decode_ids=[d.alloc_id for d in decodes],
        decode_positions=np.array([d.position for d in decodes], np.int64),
        own_segments=by_rank[rank],
        shard_tokens=np.concatenate(tokens).astype(np.int64) if tokens else np.empty(0, np.int64),
        received=[segment for source in by_rank for segment in source],
        shard_sizes=[sum(s.end - s.start for s in source) for source in by_rank],
        sample_ids=sample_ids,
        sample_rows=np.array(sample_rows, np.int64),
        sample_positions=sample_positions,
    )


def slots(table: BlockTable, positions: IntArray, page: int) -> tuple[IntArray, IntArray]:
    """(block, offset) of each position in a view whose blocks hold `page` tokens (see kv.geometry for both views)."""
    return table[positions // page], positions % page


def gather_slots(segments: Sequence[Segment], tables: Mapping[int, BlockTable], page: int) -> tuple[IntArray, IntArray]:
    """(block, offset) of every token of `segments`, one after the other."""
    parts = [slots(tables[s.alloc_id], np.arange(s.start, s.end, dtype=np.int64), page) for s in segments]
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate([b for b, _ in parts]), np.concatenate([o for _, o in parts])


def stack_tables(tables: Sequence[BlockTable], lengths: Sequence[int], page: int) -> npt.NDArray[np.int32]:
    """Block tables as one int32 matrix, each cut to the blocks that `lengths` tokens need, padded with block 0."""
    needed = [-(-length // page) for length in lengths]
    out = np.zeros((len(tables), max(needed, default=0)), np.int32)
    for row, (table, count) in enumerate(zip(tables, needed, strict=True)):
        out[row, :count] = table[:count]
    return out
