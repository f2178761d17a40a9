"""Unit tests of the manager: block_size 2, two ranks, so a block holds 2 decode tokens and a page 4 prefilled ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

from conflux_ray.kv import (
    TRANSITIONS,
    AllocationState,
    IllegalTransitionError,
    KVGeometry,
    KVManager,
    OutOfBlocksError,
    RankUsage,
)

PREFILLING, TRANSITION, DECODING, DRAINING, FREED = AllocationState


def make_manager(num_blocks: int = 21, num_workers: int = 2, **kwargs) -> KVManager:
    return KVManager(KVGeometry(2, 2, num_blocks), num_ranks=2, num_workers=num_workers, **kwargs)


def run_iteration(manager: KVManager) -> None:
    manager.issue(manager.last_issued + 1)
    manager.retire(manager.last_issued)


def acknowledge(manager: KVManager, transfer: int) -> None:
    for worker in range(manager.num_workers):
        manager.acknowledge(transfer, worker)


def start_decode(manager: KVManager, alloc_id: int, rank: int, tokens: int = 5) -> None:
    """A request whose whole prompt ran, moved and was acknowledged."""
    manager.start_prefill(alloc_id, tokens)
    manager.place(alloc_id, rank)
    transfer = manager.begin_transfer(alloc_id, 0, tokens, final=True)
    run_iteration(manager)
    acknowledge(manager, transfer)


def free(manager: KVManager) -> list[int]:
    return manager.snapshot().free


class TestPrefill:
    def test_holds_its_pages_on_every_rank(self):
        manager = make_manager()
        assert manager.start_prefill(0, 5) == ([1, 2], [1, 2])
        assert free(manager) == [18, 18]
        assert manager.state(0) is PREFILLING

    def test_ids_differ_between_ranks(self):
        manager = make_manager()
        start_decode(manager, 0, rank=1)  # pages 1, 2 on both; 3, 4, 5 of rank 1; the pages come back behind 20
        assert manager.start_prefill(1, 3) == ([3], [6])

    def test_starts_only_if_some_rank_could_later_take_any_partial_prefill(self):
        manager = make_manager(num_blocks=11)  # 10 usable
        manager.start_prefill(0, 9)  # 3 pages, 5 decode blocks
        assert not manager.can_start_prefill(9)  # 6 pages + 5 > 10
        assert manager.can_start_prefill(8)  # 5 pages + 5
        manager.start_prefill(1, 8)
        assert not manager.can_start_prefill(1)
        with pytest.raises(OutOfBlocksError):
            manager.start_prefill(2, 1)
        manager.check()

    def test_the_largest_decode_need_may_be_the_new_one(self):
        manager = make_manager(num_blocks=11)
        manager.start_prefill(0, 1)  # 1 page, 1 decode block
        assert manager.can_start_prefill(11)  # 1 + 3 pages + 6 decode blocks
        assert not manager.can_start_prefill(12)  # 1 + 3 pages + 7

    def test_a_placed_prefill_no_longer_counts(self):
        manager = make_manager(num_blocks=11)
        manager.start_prefill(0, 9)
        manager.place(0, 0)  # rank 0 has 2 free blocks, rank 1 has 7
        assert manager.can_start_prefill(7)  # 2 pages, 4 decode blocks
        assert not manager.can_start_prefill(9)  # 3 pages are not free on rank 0

    def test_of_a_request_that_ends_with_its_first_token_needs_no_room_to_decode(self):
        manager = make_manager(num_blocks=4)
        assert manager.can_start_prefill(12, needs_placement=False)
        with pytest.raises(ValueError, match="total_tokens=12 needs 10 blocks"):
            manager.can_start_prefill(12)

    def test_of_a_request_that_ends_with_its_first_token_is_released_unplaced(self):
        manager = make_manager()
        manager.start_prefill(0, 5, needs_placement=False)
        assert not manager.can_place(0, 0)
        with pytest.raises(ValueError, match="never decodes"):
            manager.place(0, 0)
        run_iteration(manager)
        manager.release(0)
        assert manager.is_idle

    @pytest.mark.parametrize("alloc_id", [0, -1])
    def test_needs_a_new_name(self, alloc_id: int):
        manager = make_manager()
        manager.start_prefill(0, 5)
        with pytest.raises(ValueError, match="alloc_id"):
            manager.start_prefill(alloc_id, 5)


class TestPlacement:
    def test_reserves_room_for_prompt_and_first_decode_on_one_rank(self):
        manager = make_manager()
        manager.start_prefill(0, 6)
        assert manager.place(0, 1) == [3, 4, 5, 6]  # 7 tokens
        assert free(manager) == [18, 14]
        assert manager.state(0) is TRANSITION
        assert manager.decode_rank(0) == 1

    def test_keeps_the_headroom_free(self):
        manager = make_manager(num_blocks=9)  # 8 usable
        manager.start_prefill(0, 5)  # 2 pages; 3 decode blocks
        assert manager.can_place(0, 0, headroom=3)
        assert not manager.can_place(0, 0, headroom=4)

    def test_without_room_changes_nothing(self):
        manager = make_manager(num_blocks=9)
        start_decode(manager, 0, rank=0, tokens=5)  # 3 blocks of rank 0
        manager.grow(0, 8)  # 4
        manager.start_prefill(1, 5)  # leaves 2 of rank 0
        with pytest.raises(OutOfBlocksError):
            manager.place(1, 0)
        assert manager.state(1) is PREFILLING
        assert free(manager) == [2, 6]
        assert manager.can_place(1, 1)

    @pytest.mark.parametrize("rank", [-1, 2])
    def test_on_a_rank_that_is_not_there_is_refused(self, rank: int):
        manager = make_manager()
        manager.start_prefill(0, 5)
        with pytest.raises(ValueError, match="rank="):
            manager.place(0, rank)

    def test_happens_once(self):
        manager = make_manager()
        manager.start_prefill(0, 5)
        manager.place(0, 0)
        with pytest.raises(IllegalTransitionError, match="allocation 0 is TRANSITION, not PREFILLING"):
            manager.place(0, 1)


class TestTransition:
    def test_ends_with_the_last_acknowledgement_of_the_last_transfer(self):
        manager = make_manager(num_workers=4)
        manager.start_prefill(0, 9)
        manager.place(0, 0)
        first = manager.begin_transfer(0, 0, 4, final=False)
        run_iteration(manager)
        acknowledge(manager, first)
        assert manager.state(0) is TRANSITION
        second = manager.begin_transfer(0, 4, 9, final=True)
        run_iteration(manager)
        for worker in (3, 0, 2):
            manager.acknowledge(second, worker)
        assert manager.state(0) is TRANSITION
        manager.acknowledge(second, 1)
        assert manager.state(0) is DECODING
        assert free(manager) == [15, 20]
        assert manager.prefill_tables(0) == ([], [])

    def test_waits_for_an_earlier_transfer_that_is_acknowledged_later(self):
        manager = make_manager()
        manager.start_prefill(0, 9)
        manager.place(0, 0)
        first = manager.begin_transfer(0, 0, 4, final=False)
        second = manager.begin_transfer(0, 4, 9, final=True)
        run_iteration(manager)
        acknowledge(manager, second)
        assert manager.state(0) is TRANSITION
        acknowledge(manager, first)
        assert manager.state(0) is DECODING

    def test_waits_for_the_iteration_that_carried_the_last_transfer(self):
        manager = make_manager()
        manager.start_prefill(0, 5)
        manager.place(0, 0)
        manager.issue(0)  # an iteration before it, still running
        transfer = manager.begin_transfer(0, 0, 5, final=True)
        manager.issue(1)
        acknowledge(manager, transfer)
        manager.retire(0)
        assert manager.state(0) is TRANSITION
        manager.retire(1)
        assert manager.state(0) is DECODING

    def test_does_not_wait_for_iterations_after_the_carrier(self):
        manager = make_manager()
        manager.start_prefill(0, 5)
        manager.place(0, 0)
        transfer = manager.begin_transfer(0, 0, 5, final=True)
        manager.issue(0)
        manager.issue(1)
        manager.retire(0)
        acknowledge(manager, transfer)
        assert manager.state(0) is DECODING

    @pytest.mark.parametrize(
        ("start", "end", "final"),
        [(0, 0, False), (1, 4, False), (0, 10, True), (0, 9, False), (0, 4, True)],
        ids=["empty", "gap", "too long", "last not final", "final not last"],
    )
    def test_refuses_ranges_that_do_not_continue(self, start: int, end: int, final: bool):
        manager = make_manager()
        manager.start_prefill(0, 9)
        manager.place(0, 0)
        with pytest.raises(ValueError, match="allocation 0"):
            manager.begin_transfer(0, start, end, final)
        assert manager.transferred_tokens(0) == 0

    def test_sends_no_token_twice(self):
        manager = make_manager()
        manager.start_prefill(0, 9)
        manager.place(0, 0)
        manager.begin_transfer(0, 0, 4, final=False)
        with pytest.raises(ValueError, match="must continue at 4"):
            manager.begin_transfer(0, 0, 9, final=True)

    def test_needs_a_placement(self):
        manager = make_manager()
        manager.start_prefill(0, 9)
        with pytest.raises(IllegalTransitionError):
            manager.begin_transfer(0, 0, 9, final=True)

    @pytest.mark.parametrize(
        ("transfer", "worker"), [(0, 0), (0, 2), (1, 1)], ids=["twice", "no worker", "no transfer"]
    )
    def test_refuses_acknowledgements_of_nothing(self, transfer: int, worker: int):
        manager = make_manager()
        manager.start_prefill(0, 9)
        manager.place(0, 0)
        manager.begin_transfer(0, 0, 9, final=True)
        manager.issue(0)
        manager.acknowledge(0, 0)
        with pytest.raises(ValueError, match="nothing to acknowledge"):
            manager.acknowledge(transfer, worker)


class TestDecode:
    def test_grows_by_the_blocks_it_lacks(self):
        manager = make_manager()
        start_decode(manager, 0, rank=0)  # 6 tokens: blocks 3, 4, 5
        assert manager.grow(0, 6) == []
        assert manager.grow(0, 7) == [6]
        assert manager.grow(0, 11) == [7, 8]
        assert manager.decode_table(0) == [3, 4, 5, 6, 7, 8]

    def test_without_room_changes_nothing(self):
        manager = make_manager(num_blocks=7)  # 6 usable
        start_decode(manager, 0, rank=0)
        assert manager.grow(0, 13) is None
        assert len(manager.decode_table(0)) == 3
        assert manager.grow(0, 12) is not None
        manager.check()

    def test_does_not_shrink(self):
        manager = make_manager()
        start_decode(manager, 0, rank=0)
        manager.grow(0, 9)
        with pytest.raises(ValueError, match="num_tokens=8 is below 9"):
            manager.grow(0, 8)

    def test_runs_from_the_iteration_after_the_final_transfer_is_planned(self):
        manager = make_manager()
        manager.start_prefill(0, 5)
        manager.place(0, 0)
        assert not manager.is_resident(0)
        with pytest.raises(IllegalTransitionError, match="before its final transfer"):
            manager.grow(0, 6)
        manager.begin_transfer(0, 0, 5, final=True)
        assert manager.is_resident(0)
        assert manager.grow(0, 7) == [6]

    def test_newest_resident_comes_first(self):
        manager = make_manager(num_blocks=41)
        for alloc_id in (0, 1, 2, 3):
            manager.start_prefill(alloc_id, 5)
        for alloc_id in (3, 2, 1, 0):
            manager.place(alloc_id, rank=alloc_id == 1)
        for alloc_id in (2, 1, 0):
            manager.begin_transfer(alloc_id, 0, 5, final=True)
        assert manager.decodes_newest_first(0) == [0, 2]
        assert manager.decodes_newest_first(1) == [1]
        manager.release(0)
        assert manager.decodes_newest_first(0) == [2]


class TestRelease:
    def test_frees_at_once_what_nothing_in_flight_touches(self):
        manager = make_manager()
        start_decode(manager, 0, rank=0)
        manager.release(0)
        assert manager.is_idle
        assert 0 not in manager
        assert free(manager) == [20, 20]

    def test_waits_for_every_iteration_issued_before_it(self):
        manager = make_manager()
        start_decode(manager, 0, rank=0)  # iteration 0
        manager.issue(1)
        manager.issue(2)
        manager.release(0)
        manager.issue(3)
        manager.retire(1)
        assert manager.state(0) is DRAINING
        assert (manager.num_draining, manager.draining_blocks(0), manager.draining_blocks(1)) == (1, 3, 0)
        manager.retire(2)
        assert manager.is_idle

    def test_in_a_transition_keeps_source_and_target_until_acknowledged(self):
        manager = make_manager()
        manager.start_prefill(0, 9)
        manager.place(0, 0)
        transfer = manager.begin_transfer(0, 0, 4, final=False)
        run_iteration(manager)
        manager.release(0)
        manager.acknowledge(transfer, 0)
        assert free(manager) == [12, 17]
        manager.acknowledge(transfer, 1)
        assert free(manager) == [20, 20]

    def test_waits_for_the_transfer_of_a_plan_not_issued_yet(self):
        manager = make_manager()
        manager.start_prefill(0, 9)
        manager.place(0, 0)
        transfer = manager.begin_transfer(0, 0, 9, final=True)
        manager.release(0)
        manager.issue(0)
        acknowledge(manager, transfer)
        assert 0 in manager
        manager.retire(0)
        assert manager.is_idle

    def test_lets_the_request_run_again_under_a_new_name_meanwhile(self):
        manager = make_manager()
        start_decode(manager, 0, rank=0)
        manager.issue(1)
        manager.release(0)
        manager.start_prefill(1, 6)
        manager.place(1, 0)
        manager.retire(1)
        assert 0 not in manager
        assert manager.state(1) is TRANSITION
        manager.check()

    def test_a_second_time_is_an_error(self):
        manager = make_manager()
        manager.issue(0)
        manager.start_prefill(0, 9)
        manager.release(0)
        with pytest.raises(IllegalTransitionError, match="DRAINING -> DRAINING"):
            manager.release(0)
        manager.retire(0)
        with pytest.raises(KeyError):
            manager.release(0)

    def test_ends_every_other_use(self):
        manager = make_manager()
        start_decode(manager, 0, rank=0)
        manager.issue(1)
        manager.release(0)
        with pytest.raises(IllegalTransitionError):
            manager.grow(0, 7)
        assert manager.decodes_newest_first(0) == []
        assert not manager.is_resident(0)


class TestIterations:
    @pytest.mark.parametrize("iteration", [4, 5])
    def test_are_issued_in_ascending_order(self, iteration: int):
        manager = make_manager()
        manager.issue(5)
        with pytest.raises(ValueError, match="above the last one issued, 5"):
            manager.issue(iteration)

    @pytest.mark.parametrize("iteration", [0, 2])
    def test_are_retired_once_and_after_they_are_issued(self, iteration: int):
        manager = make_manager()
        manager.issue(0)
        manager.issue(1)
        manager.retire(0)
        with pytest.raises(ValueError, match=f"iteration={iteration}"):
            manager.retire(iteration)


class TestFreedBlocks:
    def test_are_listed_with_their_rank_once(self):
        manager = make_manager()
        manager.start_prefill(0, 5)
        manager.release(0)
        assert manager.drain_freed() == [(0, 1), (0, 2), (1, 1), (1, 2)]
        assert manager.drain_freed() == []

    def test_are_not_listed_once_they_have_a_new_holder(self):
        manager = make_manager(num_blocks=5)  # 4 usable
        manager.start_prefill(0, 5, needs_placement=False)
        manager.release(0)  # free, in this order: 3, 4, 1, 2
        manager.start_prefill(1, 9, needs_placement=False)
        assert manager.prefill_tables(1) == ([3, 4, 1], [3, 4, 1])
        assert manager.drain_freed() == [(0, 2), (1, 2)]

    def test_of_a_transition_are_those_of_the_prefill(self):
        manager = make_manager()
        start_decode(manager, 0, rank=0)
        assert manager.drain_freed() == [(0, 1), (0, 2), (1, 1), (1, 2)]


class Cache:
    """A retention hook that records its calls and keeps the pages it is told to."""

    def __init__(self, keep: tuple[int, ...] = ()) -> None:
        self.keep = keep
        self.calls: list[tuple[int, list[list[int]]]] = []

    def __call__(self, alloc_id: int, tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
        self.calls.append((alloc_id, [list(table) for table in tables]))
        return self.keep


class TestRetention:
    def test_takes_over_the_pages_it_names_and_the_rest_is_freed(self):
        cache = Cache(keep=(0,))
        manager = make_manager(retain=cache)
        start_decode(manager, 7, rank=0)
        assert cache.calls == [(7, [[1, 2], [1, 2]])]
        assert manager.usage(1) == RankUsage(free=19, prefilling=0, transition=0, decoding=0, draining=0, retained=1)
        manager.check()

    def test_gets_each_allocation_once(self):
        cache = Cache()
        manager = make_manager(retain=cache)
        start_decode(manager, 7, rank=0)
        manager.release(7)
        assert [alloc_id for alloc_id, _ in cache.calls] == [7]

    def test_is_asked_only_when_nothing_in_flight_touches_the_pages(self):
        cache = Cache()
        manager = make_manager(retain=cache)
        manager.start_prefill(7, 5, needs_placement=False)
        manager.issue(0)
        manager.release(7)
        assert cache.calls == []
        manager.retire(0)
        assert [alloc_id for alloc_id, _ in cache.calls] == [7]

    def test_gives_its_pages_back(self):
        manager = make_manager(retain=Cache(keep=(1,)))
        start_decode(manager, 7, rank=0)
        manager.release(7)
        manager.drain_freed()
        manager.reclaim([(2, 2)])
        assert free(manager) == [20, 20]
        assert manager.drain_freed() == [(0, 2), (1, 2)]
        manager.check()


def test_usage_by_state_adds_up():
    manager = make_manager(num_blocks=41)
    start_decode(manager, 0, rank=0)  # 3 blocks
    start_decode(manager, 1, rank=0)  # 3, to drain
    manager.start_prefill(2, 5)  # 2
    manager.start_prefill(3, 5)  # 2 + 3
    manager.place(3, 0)
    manager.issue(manager.last_issued + 1)
    manager.release(1)
    usage = manager.usage(0)
    assert usage == RankUsage(free=27, prefilling=2, transition=5, decoding=3, draining=3, retained=0)
    assert usage.used == 13


def test_the_snapshot_lists_the_partial_prefills():
    manager = make_manager()
    manager.start_prefill(0, 5)
    manager.start_prefill(1, 4, needs_placement=False)
    manager.start_prefill(2, 8)
    manager.place(2, 1)
    assert manager.snapshot() == (20, [15, 10], [(2, 3), (1, 0)])


def test_the_snapshot_is_the_planners_state():
    planning = pytest.importorskip("conflux_ray.planning.interface")
    manager = make_manager()
    manager.start_prefill(0, 5)
    state = planning.KVState(*manager.snapshot())
    assert (state.capacity, state.free, state.partial_prefills) == (20, [18, 18], [(2, 3)])


@pytest.mark.parametrize(("num_ranks", "num_workers"), [(3, 3), (2, 3), (2, 0)])
def test_ranks_and_workers_must_fit_the_geometry(num_ranks: int, num_workers: int):
    with pytest.raises(ValueError, match="must"):
        KVManager(KVGeometry(2, 2, 20), num_ranks, num_workers)


def test_every_state_has_its_transitions_and_only_freed_is_final():
    assert set(TRANSITIONS) == set(AllocationState)
    assert [state for state, following in TRANSITIONS.items() if not following] == [FREED]


def test_importing_kv_loads_no_heavy_package():
    code = "import sys, conflux_ray.kv; print(sorted({'torch', 'ray', 'vllm', 'numpy'} & sys.modules.keys()))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
