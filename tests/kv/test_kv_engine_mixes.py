"""Random request mixes, driven to the end by a model of the engine, which must also find planted bugs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kv_engine_model import ViolationError, make_model

from conflux_ray.kv import AllocationState, KVManager


@settings(max_examples=600, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    sp_degree=st.integers(1, 4),
    base_tp=st.integers(1, 2),
    block_size=st.integers(1, 4),
    num_requests=st.integers(1, 14),
    max_len=st.integers(2, 40),
    spare_blocks=st.integers(0, 12),
    abort_rate=st.sampled_from([0.0, 0.01, 0.1]),
)
def test_every_request_finishes_and_no_block_is_lost_shared_or_freed_early(seed: int, **shape):
    make_model(seed, **shape).run()


def test_the_mixes_contain_what_they_are_meant_to_exercise():
    seen: Counter[str] = Counter()
    for seed in range(40):
        model = make_model(seed, sp_degree=2 + seed % 2, base_tp=1 + seed % 2, num_requests=10, spare_blocks=seed % 4)
        model.run()
        seen.update(model.seen)
    rare = {
        what: seen[what]
        for what in (
            "mixed",
            "partial transfers",
            "preempted",
            "resumed",
            "aborted",
            "discarded tokens",
            "draining",
            "waited for a rank",
            "waited for room",
            "released in PREFILLING",
            "released in TRANSITION",
            "released in DECODING",
        )
        if seen[what] < 10
    }
    assert not rare


class FreesAtRelease(KVManager):
    def _untouched(self, allocation) -> bool:
        return allocation.state is AllocationState.DRAINING or super()._untouched(allocation)

    def acknowledge(self, transfer_id: int, worker: int) -> None:
        if self._transfers[transfer_id].alloc_id in self:
            super().acknowledge(transfer_id, worker)


class IgnoresTransfers(KVManager):
    def _untouched(self, allocation) -> bool:
        return allocation.last_touch <= self._retired


class IgnoresRunAhead(KVManager):
    def _untouched(self, allocation) -> bool:
        return not allocation.transfers


class ForgetsTheIterationInFlight(KVManager):
    def release(self, alloc_id: int) -> None:
        issued, self._issued = self._issued, self._issued - 1
        super().release(alloc_id)
        self._issued = issued


class TakesAnyWorkersAcknowledgementForAll(KVManager):
    def acknowledge(self, transfer_id: int, worker: int) -> None:
        if transfer_id in self._transfers:
            self._transfers[transfer_id].unacknowledged &= {worker}
            super().acknowledge(transfer_id, worker)


class LosesABlock(KVManager):
    def _free(self, allocation) -> None:
        if allocation.rank is not None:
            self._pools[allocation.rank]._owner.pop(allocation.decode_table.pop())
        super()._free(allocation)


class HandsOutABlockTwice(KVManager):
    def place(self, alloc_id: int, rank: int) -> list[int]:
        table = super().place(alloc_id, rank)
        self._pools[rank]._free.append(table[0])
        return table


class ReservesNothingForTheTransition(KVManager):
    def can_start_prefill(self, total_tokens: int, needs_placement: bool = True) -> bool:
        return self.geometry.prefill_blocks(total_tokens) <= min(pool.num_free for pool in self._pools)


class PlacesWithoutTheFirstDecode(KVManager):
    def _needs(self, total_tokens: int, needs_placement: bool) -> tuple[int, int]:
        prefill, decode = super()._needs(total_tokens, needs_placement)
        return prefill, self.geometry.decode_blocks(total_tokens) if decode else 0

    def grow(self, alloc_id: int, num_tokens: int) -> list[int] | None:
        first = num_tokens == self._allocations[alloc_id].decode_tokens
        return [] if first else super().grow(alloc_id, num_tokens)


class ReportsFreedBlocksLate(KVManager):
    """Lists freed blocks one call late, whoever holds them by then."""

    late: tuple[tuple[int, int], ...] = ()

    def drain_freed(self) -> list[tuple[int, int]]:
        late, self.late = self.late, tuple(super().drain_freed())
        return list(late)


@pytest.mark.parametrize(
    "manager_type",
    [
        FreesAtRelease,
        IgnoresTransfers,
        IgnoresRunAhead,
        ForgetsTheIterationInFlight,
        TakesAnyWorkersAcknowledgementForAll,
        LosesABlock,
        HandsOutABlockTwice,
        ReservesNothingForTheTransition,
        PlacesWithoutTheFirstDecode,
        ReportsFreedBlocksLate,
    ],
)
def test_the_model_finds_a_planted_bug(manager_type: type[KVManager]):
    """By itself, without the manager's own `check`."""

    def is_found(seed: int) -> bool:
        try:
            make_model(seed, manager_type, num_requests=10, max_len=24, verify=False).run(max_steps=4000)
        except (ViolationError, IndexError):  # IndexError: a block table that does not reach a position
            return True
        return False

    assert any(is_found(seed) for seed in range(20))


def test_the_same_mixes_pass_without_a_planted_bug():
    for seed in range(20):
        make_model(seed, KVManager, num_requests=10, max_len=24, verify=False).run(max_steps=4000)
