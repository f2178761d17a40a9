"""One plan, worked out by hand for each rank; slots against the KV geometry's own definition."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conflux_ray.execution.batch import (
    RankBatch,
    Segment,
    build_batch,
    gather_slots,
    segment_positions,
    slots,
    stack_tables,
)
from conflux_ray.execution.plan import Chunk, Decode, IterationPlan, Shard, order_shards
from conflux_ray.kv import KVGeometry


def chunk(alloc_id: int, shards: tuple[Shard, ...], first_token: int, samples: bool = False) -> Chunk:
    """A chunk whose token ids count up from `first_token`."""
    length = shards[-1].end - shards[0].start
    return Chunk(alloc_id, struct.pack(f"<{length}i", *range(first_token, first_token + length)), shards, samples)


# Allocation 7 decodes on rank 0 at position 30, 8 and 9 on rank 1 at 4 and 11. Allocation 3 continues at token 8 and
# completes on rank 0; allocation 5 starts, takes two tokens of rank 1 only, and does not complete.
TWO_RANKS = IterationPlan(
    iteration=4,
    decodes=((Decode(7, 30),), (Decode(8, 4), Decode(9, 11))),
    chunks=(
        chunk(3, order_shards(8, (2, 3), 0), first_token=100, samples=True),
        chunk(5, order_shards(0, (0, 2), None), first_token=200),
    ),
)


class TestTwoRanks:
    @pytest.fixture
    def first(self) -> RankBatch:
        return build_batch(TWO_RANKS, 0, 2)

    @pytest.fixture
    def second(self) -> RankBatch:
        return build_batch(TWO_RANKS, 1, 2)

    def test_own_tokens_follow_the_decodes(self, first: RankBatch, second: RankBatch):
        # Rotated so that rank 0 comes last: rank 1 has tokens 8..10 of allocation 3, rank 0 has 11 and 12.
        assert first.decode_ids == [7]
        assert first.shard_tokens.tolist() == [103, 104]
        assert first.positions.tolist() == [30, 11, 12]
        assert second.decode_ids == [8, 9]
        assert second.shard_tokens.tolist() == [100, 101, 102, 200, 201]
        assert second.positions.tolist() == [4, 11, 8, 9, 10, 0, 1]

    def test_own_segments_are_in_order_of_chunk(self, first: RankBatch, second: RankBatch):
        assert first.own_segments == [Segment(3, 11, 13)]
        assert second.own_segments == [Segment(3, 8, 11), Segment(5, 0, 2)]

    def test_every_rank_receives_all_shards_by_source_rank_then_chunk(self, first: RankBatch, second: RankBatch):
        assert first.received == [Segment(3, 11, 13), Segment(3, 8, 11), Segment(5, 0, 2)]
        assert second.received == first.received
        assert first.shard_sizes == second.shard_sizes == [2, 5]

    def test_the_completing_prefill_samples_on_the_rank_of_its_last_shard(self, first: RankBatch, second: RankBatch):
        assert (first.sample_ids, first.sample_rows.tolist(), first.sample_positions) == ([7, 3], [0, 2], [31, 13])
        assert (second.sample_ids, second.sample_rows.tolist(), second.sample_positions) == ([8, 9], [0, 1], [5, 12])

    def test_counts(self, first: RankBatch, second: RankBatch):
        counts = [(b.num_decodes, b.num_shard_tokens, b.num_tokens, b.num_received) for b in (first, second)]
        assert counts == [(1, 2, 3, 7), (2, 5, 7, 7)]


# Rank 1 has neither a decode nor a token; both chunks complete, on rank 2 and on rank 0.
THREE_RANKS = IterationPlan(
    iteration=0,
    decodes=((), (), (Decode(1, 6),)),
    chunks=(
        chunk(2, order_shards(0, (1, 0, 2), 2), first_token=10, samples=True),
        chunk(4, order_shards(5, (2, 0, 1), 0), first_token=20, samples=True),
    ),
)


class TestThreeRanks:
    def test_a_rank_without_a_shard_still_receives_every_token(self):
        batch = build_batch(THREE_RANKS, 1, 3)
        assert batch.num_tokens == 0
        assert batch.own_segments == []
        assert batch.positions.tolist() == batch.shard_tokens.tolist() == batch.sample_rows.tolist() == []
        assert batch.shard_sizes == [3, 0, 3]
        assert batch.received == [Segment(2, 0, 1), Segment(4, 6, 8), Segment(2, 1, 3), Segment(4, 5, 6)]

    def test_the_first_rank_ends_the_second_chunk(self):
        batch = build_batch(THREE_RANKS, 0, 3)
        assert batch.shard_tokens.tolist() == [10, 21, 22]
        assert batch.positions.tolist() == [0, 6, 7]
        assert (batch.sample_ids, batch.sample_rows.tolist(), batch.sample_positions) == ([4], [2], [8])

    def test_the_last_rank_samples_its_decode_then_the_end_of_the_first_chunk(self):
        batch = build_batch(THREE_RANKS, 2, 3)
        assert batch.shard_tokens.tolist() == [11, 12, 20]
        assert batch.positions.tolist() == [6, 1, 2, 5]
        assert (batch.sample_ids, batch.sample_rows.tolist(), batch.sample_positions) == ([1, 2], [0, 2], [7, 3])


def test_an_iteration_without_work_has_empty_arrays_of_the_index_type():
    batch = build_batch(IterationPlan(0, ((), ())), 0, 2)
    for array in (batch.decode_positions, batch.shard_tokens, batch.positions, batch.sample_rows):
        assert (array.dtype, array.shape) == (np.int64, (0,))
    assert batch.shard_sizes == [0, 0]


def test_positions_of_segments_come_one_after_the_other():
    assert segment_positions([Segment(0, 3, 5), Segment(1, 0, 1), Segment(0, 7, 9)]).tolist() == [3, 4, 0, 7, 8]
    assert segment_positions([]).tolist() == []


@st.composite
def plans(draw: st.DrawFn) -> tuple[IterationPlan, int]:
    num_ranks = draw(st.integers(1, 4))
    count = st.integers(0, 5)
    chunks = []
    for alloc_id in range(draw(st.integers(0, 4))):
        counts = tuple(draw(st.lists(count, min_size=num_ranks, max_size=num_ranks).filter(any)))
        samples = draw(st.booleans())
        last = draw(st.sampled_from([r for r in range(num_ranks) if counts[r]])) if samples else None
        chunks.append(chunk(alloc_id, order_shards(draw(count), counts, last), 1000 * alloc_id, samples))
    decodes = tuple(
        tuple(Decode(10 * rank + i + 10, draw(count)) for i in range(draw(count))) for rank in range(num_ranks)
    )
    return IterationPlan(0, decodes, tuple(chunks)), num_ranks


class TestAnyPlan:
    @settings(max_examples=50, deadline=None)
    @given(plans())
    def test_all_ranks_together_compute_every_token_of_every_chunk_once(self, drawn: tuple[IterationPlan, int]):
        plan, num_ranks = drawn
        batches = [build_batch(plan, rank, num_ranks) for rank in range(num_ranks)]
        computed = {}
        for batch in batches:
            owners = [s.alloc_id for s in batch.own_segments for _ in range(s.start, s.end)]
            positions = segment_positions(batch.own_segments).tolist()
            computed |= dict(zip(zip(owners, positions, strict=True), batch.shard_tokens.tolist(), strict=True))
        expected = {
            (c.alloc_id, c.start + i): 1000 * c.alloc_id + i for c in plan.chunks for i in range(c.end - c.start)
        }
        assert computed == expected
        assert sum(b.num_shard_tokens for b in batches) == len(expected)

    @settings(max_examples=50, deadline=None)
    @given(plans())
    def test_what_is_received_is_what_the_ranks_own_one_after_the_other(self, drawn: tuple[IterationPlan, int]):
        plan, num_ranks = drawn
        batches = [build_batch(plan, rank, num_ranks) for rank in range(num_ranks)]
        for batch in batches:
            assert batch.received == [segment for b in batches for segment in b.own_segments]
            assert batch.shard_sizes == [b.num_shard_tokens for b in batches]

    @settings(max_examples=50, deadline=None)
    @given(plans())
    def test_every_decode_and_every_completing_chunk_samples_once_after_its_own_position(
        self, drawn: tuple[IterationPlan, int]
    ):
        plan, num_ranks = drawn
        sampled = []
        for rank in range(num_ranks):
            batch = build_batch(plan, rank, num_ranks)
            assert (batch.positions[batch.sample_rows] + 1).tolist() == batch.sample_positions
            sampled += batch.sample_ids
        expected = [d.alloc_id for rank in plan.decodes for d in rank]
        expected += [c.alloc_id for c in plan.chunks if c.samples]
        assert sorted(sampled) == sorted(expected)


GEOMETRY = st.builds(KVGeometry, st.integers(1, 16), st.integers(1, 8), st.just(1000))
TABLE = st.lists(st.integers(1, 999), min_size=1, max_size=12, unique=True)


class TestSlots:
    def test_by_hand(self):
        block, offset = slots(np.array([5, 9, 2]), np.array([0, 3, 4, 11]), page=4)
        assert block.tolist() == [5, 5, 9, 2]
        assert offset.tolist() == [0, 3, 0, 3]

    @settings(max_examples=50, deadline=None)
    @given(GEOMETRY, TABLE)
    def test_the_prefill_view_is_the_geometrys(self, geometry: KVGeometry, table: list[int]):
        page = geometry.prefill_page
        positions = np.arange(len(table) * page)
        block, offset = slots(np.array(table), positions, page)
        assert (block * page + offset).tolist() == [geometry.prefill_slot(table, int(p)) for p in positions]

    @settings(max_examples=50, deadline=None)
    @given(GEOMETRY, TABLE)
    def test_the_decode_view_is_the_geometrys(self, geometry: KVGeometry, table: list[int]):
        positions = np.arange(len(table) * geometry.block_size)
        block, offset = slots(np.array(table), positions, geometry.block_size)
        expected = [geometry.decode_slot(table, int(p)) for p in positions]
        assert (block * geometry.block_size + offset).tolist() == expected

    def test_a_table_that_is_too_short_is_an_error(self):
        with pytest.raises(IndexError):
            slots(np.array([5, 9]), np.array([8]), page=4)

    def test_slots_of_segments_use_each_requests_own_table(self):
        tables = {1: np.array([4, 6]), 2: np.array([8])}
        block, offset = gather_slots([Segment(1, 3, 6), Segment(2, 0, 2)], tables, page=4)
        assert block.tolist() == [4, 6, 6, 8, 8]
        assert offset.tolist() == [3, 0, 1, 0, 1]

    def test_no_segments_have_no_slots(self):
        block, offset = gather_slots([], {}, page=4)
        assert block.tolist() == offset.tolist() == []


class TestStackedTables:
    def test_each_is_cut_to_what_its_length_needs_and_padded_with_the_null_block(self):
        stacked = stack_tables([np.array([3, 4, 5, 6]), np.array([7, 8]), np.array([9])], [9, 5, 4], page=4)
        assert stacked.tolist() == [[3, 4, 5], [7, 8, 0], [9, 0, 0]]
        assert stacked.dtype == np.int32

    def test_no_tables_make_an_empty_matrix(self):
        assert stack_tables([], [], page=4).shape == (0, 0)
