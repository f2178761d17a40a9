from __future__ import annotations

import pytest

from conflux_ray.kv import BlockOwnershipError, BlockPool, OutOfBlocksError


def test_blocks_come_in_the_order_in_which_they_became_free():
    pool = BlockPool(5)
    assert pool.allocate(3, owner=7) == [1, 2, 3]
    pool.free([2], owner=7)
    assert pool.allocate(2, owner=8) == [4, 2]


def test_the_null_block_is_never_handed_out():
    assert BlockPool(4).allocate(3, owner=7) == [1, 2, 3]


def test_asking_for_too_much_changes_nothing():
    pool = BlockPool(4)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(4, owner=7)
    assert pool.num_free == 3


@pytest.mark.parametrize("blocks", [[1], [0], [3], [99], [2, 2]], ids=["freed", "null", "foreign", "unknown", "twice"])
def test_only_the_holder_frees_a_block_and_once(blocks: list[int]):
    pool = BlockPool(5)
    pool.allocate(2, owner=7)
    pool.allocate(1, owner=8)
    pool.free([1], owner=7)
    with pytest.raises(BlockOwnershipError):
        pool.free(blocks, owner=7)
    assert (pool.num_free, pool.num_used) == (2, 2)


def test_handed_over_blocks_belong_to_the_new_owner():
    pool = BlockPool(4)
    pool.allocate(2, owner=7)
    pool.hand_over([1], owner=7, new_owner=8)
    with pytest.raises(BlockOwnershipError):
        pool.free([1], owner=7)
    pool.free([1], owner=8)


def test_freed_blocks_are_listed_once():
    pool = BlockPool(4)
    pool.free(pool.allocate(2, owner=7), owner=7)
    assert pool.drain_freed() == [1, 2]
    assert pool.drain_freed() == []


def test_a_freed_block_in_use_again_is_not_listed():
    pool = BlockPool(3)
    pool.free(pool.allocate(2, owner=7), owner=7)
    pool.allocate(1, owner=8)
    assert pool.drain_freed() == [2]


def test_a_block_freed_twice_between_calls_is_listed_once():
    pool = BlockPool(2)
    for owner in (7, 8):
        pool.free(pool.allocate(1, owner), owner)
    assert pool.drain_freed() == [1]


def test_a_lost_block_is_found():
    pool = BlockPool(4)
    pool.allocate(1, owner=7)
    pool.check()
    pool._free.pop()
    with pytest.raises(BlockOwnershipError, match=r"lost \[3\]"):
        pool.check()
