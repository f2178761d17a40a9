"""A rank's part of a plan, followed by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from conflux_ray.execution.batch import Segment, build_batch, gather_slots, stack_tables
from conflux_ray.execution.engine import pack_tokens
from conflux_ray.execution.plan import Chunk, Decode, IterationPlan, Shard
from conflux_ray.kv import KVGeometry

PLAN = IterationPlan(
    0,
    decodes=((Decode(1, 20),), (), (Decode(2, 7), Decode(3, 9))),
    chunks=(
        # allocation 4: tokens 3..8, nothing on rank 1, completing on rank 0
        Chunk(4, pack_tokens([43, 44, 45, 46, 47]), (Shard(2, 3, 5), Shard(0, 5, 8)), samples=True),
        # allocation 5: tokens 0..3, one on each rank
        Chunk(5, pack_tokens([50, 51, 52]), (Shard(0, 0, 1), Shard(1, 1, 2), Shard(2, 2, 3))),
    ),
)


def test_rank_0_computes_its_decode_and_its_shards_and_samples_twice() -> None:
    batch = build_batch(PLAN, 0, 3)
    assert batch.decode_ids == [1]
    assert batch.positions.tolist() == [20, 5, 6, 7, 0]
    assert batch.shard_tokens.tolist() == [45, 46, 47, 50]
    assert batch.sample_ids == [1, 4]
    assert batch.sample_rows.tolist() == [0, 3]  # the decode, and the last token of allocation 4
    assert batch.sample_positions == [21, 8]


def test_a_rank_with_an_empty_shard_still_receives_everyones_tokens() -> None:
    batch = build_batch(PLAN, 1, 3)
    assert batch.shard_sizes == [4, 1, 3]
    assert batch.received == [Segment(4, 5, 8), Segment(5, 0, 1), Segment(5, 1, 2), Segment(4, 3, 5), Segment(5, 2, 3)]
    assert batch.num_received == 8
    assert batch.num_decodes == 0
    assert batch.sample_ids == []


def test_all_ranks_agree_on_what_is_exchanged() -> None:
    batches = [build_batch(PLAN, rank, 3) for rank in range(3)]
    assert all(b.shard_sizes == batches[0].shard_sizes and b.received == batches[0].received for b in batches)
    assert [b.num_shard_tokens for b in batches] == batches[0].shard_sizes


@given(
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)
def test_slots_are_the_views_of_the_kv_geometry(block_size: int, degree: int, length: int, rng) -> None:
    geometry = KVGeometry(block_size, degree, 200)
    table = rng.sample(range(1, 200), geometry.decode_blocks(length))
    segment = [Segment(0, 0, length)]
    blocks, offsets = gather_slots(segment, {0: np.array(table)}, block_size)
    assert (blocks * block_size + offsets).tolist() == [geometry.decode_slot(table, p) for p in range(length)]
    page = geometry.prefill_page
    blocks, offsets = gather_slots(segment, {0: np.array(table)}, page)
    assert (blocks * page + offsets).tolist() == [geometry.prefill_slot(table, p) for p in range(length)]


def test_stacked_tables_are_cut_to_what_is_needed() -> None:
    stacked = stack_tables([np.array([7, 8, 9]), np.array([5, 6])], [9, 3], 4)
    assert stacked.tolist() == [[7, 8, 9], [5, 0, 0]]
