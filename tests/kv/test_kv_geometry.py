from __future__ import annotations

import pytest

from conflux_ray.kv import KVGeometry

GEOMETRY = KVGeometry(block_size=4, sp_degree=3, num_blocks=20)


def test_a_prefill_page_holds_p_times_the_tokens_of_a_block():
    assert GEOMETRY.prefill_page == 12


def test_the_null_block_is_not_usable():
    assert GEOMETRY.usable_blocks == 19


@pytest.mark.parametrize(
    ("tokens", "prefill", "decode"), [(0, 0, 0), (1, 1, 1), (4, 1, 1), (5, 1, 2), (12, 1, 3), (13, 2, 4)]
)
def test_blocks_of_both_views(tokens: int, prefill: int, decode: int):
    assert GEOMETRY.prefill_blocks(tokens) == prefill
    assert GEOMETRY.decode_blocks(tokens) == decode


def test_smallest_pool_holds_the_longest_request_in_both_views():
    # 25 tokens: 7 decode blocks, 3 pages; 2 of headroom; the null block.
    assert GEOMETRY.min_blocks(25, headroom=2) == 13


def test_a_pool_too_small_is_refused_by_name():
    geometry = KVGeometry(block_size=4, sp_degree=3, num_blocks=12)
    geometry.check_pool(25, headroom=1)
    with pytest.raises(ValueError, match=r"num_blocks=12 .*max_model_len=25.*needs 13 blocks.*lower max_model_len"):
        geometry.check_pool(25, headroom=2)


@pytest.mark.parametrize(("position", "slot"), [(0, 7 * 12), (11, 7 * 12 + 11), (12, 2 * 12), (17, 2 * 12 + 5)])
def test_prefill_slot(position: int, slot: int):
    assert GEOMETRY.prefill_slot([7, 2], position) == slot


@pytest.mark.parametrize(("position", "slot"), [(0, 28), (3, 31), (4, 8), (5, 9)])
def test_decode_slot(position: int, slot: int):
    assert GEOMETRY.decode_slot([7, 2], position) == slot


def test_a_position_past_the_table_is_an_error():
    with pytest.raises(IndexError):
        GEOMETRY.decode_slot([7, 2], 8)
    with pytest.raises(IndexError):
        GEOMETRY.prefill_slot([7, 2], 24)


def test_with_one_rank_the_two_views_are_one():
    geometry = KVGeometry(block_size=4, sp_degree=1, num_blocks=20)
    table = [3, 9, 1]
    assert [geometry.prefill_slot(table, p) for p in range(12)] == [geometry.decode_slot(table, p) for p in range(12)]


@pytest.mark.parametrize(
    ("block_size", "sp_degree", "num_blocks", "field"),
    [(0, 1, 2, "block_size=0"), (1, 0, 2, "sp_degree=0"), (1, 1, 1, "num_blocks=1")],
)
def test_impossible_sizes_are_refused_by_name(block_size: int, sp_degree: int, num_blocks: int, field: str):
    with pytest.raises(ValueError, match=field):
        KVGeometry(block_size, sp_degree, num_blocks)
