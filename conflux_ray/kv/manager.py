"""KV bookkeeping of one instance: who holds which block on which rank, and when it may be reused (design, section 5).

**Liveness.** A prefill takes all its prefill blocks, on every rank, with its first chunk, and can decode only when one
rank also has room for its whole decode residency. `start_prefill` therefore keeps this rule:

    sum of prefill blocks of all PREFILLING allocations + largest decode need among them <= usable blocks of a rank

Suppose every resident decode has ended or been preempted, and what drains has drained. Allocations in TRANSITION hold
all memory they need; they finish their chunks and transfers without more, become decodes, and leave. What
remains are the PREFILLING ones, and by the rule each rank then has room for any of them: the oldest can be placed, and
so on until none is left. So memory never blocks for ever, provided that the caller (a) schedules every placed
allocation to its end, (b) when a rank is to be made free for the oldest partial prefill, places no other there
first, and (c) re-admits preempted requests, each re-admission yielding at least one token.

**Reuse.** Iterations run ahead: plan k + 1 is issued while iteration k runs. A block returns to its pool only when
the last issued iteration that could touch it is retired and every transfer that touches it is acknowledged by every
worker. The order of calls for one iteration is:

    start_prefill / place / begin_transfer / grow / release ...  while plan k is made
    issue(k)                                                     plan k is sent
    acknowledge(...), retire(k)                                  the results of k are in (iteration k + 1 may run)

The caller does not release between making plan k and `issue(k)` an allocation that plan k uses.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from conflux_ray.kv.geometry import KVGeometry
from conflux_ray.kv.pool import BlockOwnershipError, BlockPool, OutOfBlocksError
from conflux_ray.kv.state import TRANSITIONS, AllocationState, IllegalTransitionError

RETAINED = -1
"""Owner, in the pools, of the blocks that the retention hook took over."""

Retain = Callable[[int, Sequence[Sequence[int]]], Collection[int]]
"""Retention hook of a prefix cache: `(alloc_id, prefill table of each rank) -> indices of the pages it takes over`.

Called once for each allocation, when nothing in flight touches its prefill blocks any more. Page j is entry j of every
rank's table. Pages not named return to the pools; those named come back through `KVManager.reclaim`.
"""


class KVSnapshot(NamedTuple):
    """The arguments of `planning.KVState`, in its order, as fresh lists that the planner may change."""

    capacity: int  # usable blocks of one rank
    free: list[int]  # free blocks per rank
    partial_prefills: list[tuple[int, int]]  # (prefill blocks per rank, decode blocks it will need) of each PREFILLING


@dataclass(frozen=True, slots=True)
class RankUsage:
    """Blocks of one rank by what holds them; the fields add up to its usable blocks."""

    free: int
    prefilling: int
    transition: int
    decoding: int
    draining: int
    retained: int

    @property
    def used(self) -> int:
        return self.prefilling + self.transition + self.decoding + self.draining + self.retained


@dataclass(slots=True)
class _Transfer:
    alloc_id: int
    unacknowledged: set[int]  # workers


@dataclass(slots=True)
class _Allocation:
    alloc_id: int
    total_tokens: int
    decode_need: int  # blocks on the decode rank for the prompt and its first decode; 0: ends with its first token
    prefill_tables: tuple[list[int], ...]
    state: AllocationState = AllocationState.PREFILLING
    rank: int | None = None  # decode rank
    decode_table: list[int] = field(default_factory=list)
    decode_tokens: int = 0  # tokens that the decode table is asked to hold
    transferred: int = 0  # tokens [0, transferred) are covered by transfers begun
    transfers: set[int] = field(default_factory=set)  # begun, not acknowledged by all
    last_touch: int = -1  # blocks waiting to be freed are free of iterations once this one is retired

    @property
    def resident(self) -> bool:
        """Whether its last transfer is planned, so that it decodes from the next iteration on."""
        return self.transferred == self.total_tokens

    def to(self, state: AllocationState) -> None:
        if state not in TRANSITIONS[self.state]:
            raise IllegalTransitionError(
                f"allocation {self.alloc_id}: {self.state.name} -> {state.name} is not permitted"
            )
        self.state = state


class KVManager:
    """Owns the pools of all ranks and every allocation in them.

    Allocations are named by `alloc_id`, a non-negative integer chosen by the caller, a new one for each admission of a
    request: after a preemption the old allocation may still drain while the request runs again under a new one.
    A freed allocation is forgotten; `alloc_id in manager` tells whether one is alive.

    Misuse raises before anything changes: KeyError for an unknown (or freed) `alloc_id`, `IllegalTransitionError` for a
    call that the allocation's state does not permit, ValueError for bad values.
    """

    def __init__(self, geometry: KVGeometry, num_ranks: int, num_workers: int, retain: Retain | None = None) -> None:
        """Create empty pools.

        Args:
            geometry: of every rank's pool.
            num_ranks: N, logical ranks; the SP degree of the geometry.
            num_workers: worker processes that acknowledge each transfer, N x base TP.
            retain: hook of a prefix cache; without it all prefill blocks return to the pools.

        Raises:
            ValueError: the numbers do not fit together.
        """
        if num_ranks != geometry.sp_degree:
            raise ValueError(f"num_ranks={num_ranks} must equal sp_degree={geometry.sp_degree}")
        if num_workers < num_ranks or num_workers % num_ranks:
            raise ValueError(f"num_workers={num_workers} must be a multiple of num_ranks={num_ranks} (N x base TP)")
        self.geometry = geometry
        self.num_ranks = num_ranks
        self.num_workers = num_workers
        self._retain = retain
        self._pools = tuple(BlockPool(geometry.num_blocks) for _ in range(num_ranks))
        self._allocations: dict[int, _Allocation] = {}
        self._prefilling: dict[int, _Allocation] = {}  # in order of start
        self._resident: tuple[dict[int, _Allocation], ...] = tuple({} for _ in range(num_ranks))  # oldest first
        self._waiting: dict[int, _Allocation] = {}  # to become DECODING or FREED once nothing in flight touches them
        self._draining: dict[int, _Allocation] = {}
        self._retained: list[int] = [0] * num_ranks
        self._transfers: dict[int, _Transfer] = {}
        self._next_transfer = 0
        self._issued = -1
        self._retired = -1

    # Prefill

    def can_start_prefill(self, total_tokens: int, needs_placement: bool = True) -> bool:
        """Whether a prefill of `total_tokens` may take its blocks on every rank now (see Liveness above).

        Args:
            total_tokens: of the prompt; for a resumed request, prompt and output so far.
            needs_placement: False for a request that ends with its first token and so never decodes.

        Raises:
            ValueError: no state of the pools would ever permit it (`KVGeometry.check_pool` at start-up prevents this).
        """
        prefill, decode = self._needs(total_tokens, needs_placement)
        if prefill > min(pool.num_free for pool in self._pools):
            return False
        held = sum(self.geometry.prefill_blocks(a.total_tokens) for a in self._prefilling.values())
        largest = max((a.decode_need for a in self._prefilling.values()), default=0)
        return held + prefill + max(largest, decode) <= self.geometry.usable_blocks

    def start_prefill(self, alloc_id: int, total_tokens: int, needs_placement: bool = True) -> tuple[list[int], ...]:
        """Take all prefill blocks of a request, on every rank; its state is PREFILLING.

        Args:
            alloc_id: name of the new allocation.
            total_tokens: as in `can_start_prefill`.
            needs_placement: as in `can_start_prefill`.

        Returns:
            The prefill block table of each rank, `prefill_blocks(total_tokens)` ids each.

        Raises:
            ValueError: `alloc_id` is alive or negative, or the request can never fit.
            OutOfBlocksError: `can_start_prefill` is False.
        """
        if alloc_id < 0 or alloc_id in self._allocations:
            raise ValueError(f"alloc_id={alloc_id} is negative or still in use; give each admission a new one")
        if not self.can_start_prefill(total_tokens, needs_placement):
            raise OutOfBlocksError(f"allocation {alloc_id}: no room for a prefill of {total_tokens} tokens now")
        prefill, decode = self._needs(total_tokens, needs_placement)
        tables = tuple(pool.allocate(prefill, alloc_id) for pool in self._pools)
        allocation = _Allocation(alloc_id, total_tokens, decode, tables)
        self._allocations[alloc_id] = self._prefilling[alloc_id] = allocation
        return tuple(list(table) for table in tables)

    # Placement and transition

    def can_place(self, alloc_id: int, rank: int, headroom: int = 0) -> bool:
        """Whether `rank` can take the decode residency of a PREFILLING allocation and keep `headroom` blocks free."""
        allocation = self._get(alloc_id, AllocationState.PREFILLING)
        return allocation.decode_need > 0 and self._pool(rank).num_free >= allocation.decode_need + headroom

    def place(self, alloc_id: int, rank: int) -> list[int]:
        """Reserve the decode residency of an allocation on `rank`; its state is TRANSITION.

        May come long before the last chunk, so that the KV of earlier chunks moves early.

        Returns:
            The decode block table: room for `total_tokens + 1` tokens, since the first decode writes at position
            `total_tokens`.

        Raises:
            ValueError: there is no such rank, or the request ends with its first token and has nothing to place.
            OutOfBlocksError: `rank` has too few free blocks.
        """
        allocation = self._get(alloc_id, AllocationState.PREFILLING)
        if allocation.decode_need == 0:
            raise ValueError(f"allocation {alloc_id} was started with needs_placement=False: it never decodes")
        blocks = self._pool(rank).allocate(allocation.decode_need, alloc_id)
        allocation.to(AllocationState.TRANSITION)
        del self._prefilling[alloc_id]
        allocation.rank = rank
        allocation.decode_table = blocks
        allocation.decode_tokens = allocation.total_tokens + 1
        return list(blocks)

    def begin_transfer(self, alloc_id: int, start: int, end: int, final: bool) -> int:
        """Record that the iteration being planned sends the KV of tokens [start, end) to the decode rank.

        With the final one the allocation is resident: it may decode from the next iteration on. The plan that
        carries a transfer must be issued; every worker acknowledges it, also one that has nothing to send.

        Args:
            alloc_id: a placed allocation.
            start: first token, where the transfer before ended (0 for the first): each token is sent once.
            end: one past the last token.
            final: whether it is the last one, `end == total_tokens`.

        Returns:
            The transfer's id, unique in this manager.

        Raises:
            ValueError: the range is empty, leaves a gap, overlaps, or `final` does not fit it.
        """
        allocation = self._get(alloc_id, AllocationState.TRANSITION)
        if start != allocation.transferred or not start < end <= allocation.total_tokens:
            raise ValueError(
                f"allocation {alloc_id}: transfer [{start}, {end}) must continue at {allocation.transferred} and end "
                f"by {allocation.total_tokens}"
            )
        if final != (end == allocation.total_tokens):
            raise ValueError(
                f"allocation {alloc_id}: final={final} for a transfer that ends at {end} of {allocation.total_tokens}"
            )
        transfer_id = self._next_transfer
        self._next_transfer += 1
        self._transfers[transfer_id] = _Transfer(alloc_id, set(range(self.num_workers)))
        allocation.transfers.add(transfer_id)
        allocation.transferred = end
        allocation.last_touch = self._issued + 1
        if final:
            assert allocation.rank is not None
            self._resident[allocation.rank][alloc_id] = allocation
            self._waiting[alloc_id] = allocation
        return transfer_id

    def acknowledge(self, transfer_id: int, worker: int) -> None:
        """Record that `worker` will no longer read or write blocks for a transfer.

        With the last acknowledgement of the last transfer the prefill blocks are released and the state is DECODING;
        if the iteration that carried the last transfer is not retired yet, that happens with its `retire`. A released
        allocation is freed by the same rule.

        Args:
            transfer_id: of `begin_transfer`.
            worker: 0 .. num_workers - 1.

        Raises:
            ValueError: the transfer is unknown or `worker` has acknowledged it.
        """
        transfer = self._transfers.get(transfer_id)
        if transfer is None or worker not in transfer.unacknowledged:
            raise ValueError(f"worker {worker} has nothing to acknowledge for transfer {transfer_id}")
        transfer.unacknowledged.remove(worker)
        if transfer.unacknowledged:
            return
        del self._transfers[transfer_id]
        allocation = self._allocations[transfer.alloc_id]
        allocation.transfers.remove(transfer_id)
        self._settle([allocation])

    # Decode

    def grow(self, alloc_id: int, num_tokens: int) -> list[int] | None:
        """Make the decode table of a resident allocation hold `num_tokens` tokens.

        When it returns None, the caller preempts (`decodes_newest_first`) or waits for blocks that drain
        (`draining_blocks`); with iterations in flight neither gives room at once, so the decode pauses meanwhile.

        Args:
            alloc_id: a resident allocation: DECODING, or TRANSITION with its final transfer begun.
            num_tokens: context length, the token being computed included; never less than in the call before.

        Returns:
            The ids appended to the table, maybe none; None, with nothing changed, if the rank has too few free blocks.

        Raises:
            ValueError: `num_tokens` shrinks.
        """
        allocation = self._get(alloc_id, AllocationState.TRANSITION, AllocationState.DECODING)
        if not allocation.resident:
            raise IllegalTransitionError(f"allocation {alloc_id} cannot grow before its final transfer is planned")
        if num_tokens < allocation.decode_tokens:
            raise ValueError(f"allocation {alloc_id}: num_tokens={num_tokens} is below {allocation.decode_tokens}")
        assert allocation.rank is not None
        pool = self._pools[allocation.rank]
        needed = self.geometry.decode_blocks(num_tokens) - len(allocation.decode_table)
        if needed > pool.num_free:
            return None
        blocks = pool.allocate(needed, alloc_id)
        allocation.decode_table += blocks
        allocation.decode_tokens = num_tokens
        return blocks

    def decodes_newest_first(self, rank: int) -> list[int]:
        """Resident allocations of `rank`, the last to become resident first: the order of preemption.

        Includes those whose final transfer is under way; their blocks drain until it is acknowledged.
        """
        return list(reversed(self._resident[rank]))

    # The end, and what is in flight

    def release(self, alloc_id: int) -> None:
        """End an allocation: finished, preempted or aborted, in any state before DRAINING.

        Its blocks return to the pools once every iteration issued so far is retired and all its transfers are
        acknowledged; within this call if nothing is in flight. The plan being made must not use it.

        Raises:
            KeyError: it is unknown or already freed.
            IllegalTransitionError: it was released before.
        """
        allocation = self._get(alloc_id)
        allocation.to(AllocationState.DRAINING)
        self._prefilling.pop(alloc_id, None)
        if allocation.rank is not None:
            self._resident[allocation.rank].pop(alloc_id, None)
        allocation.last_touch = max(allocation.last_touch, self._issued)
        self._waiting[alloc_id] = self._draining[alloc_id] = allocation
        self._settle([allocation])

    def issue(self, iteration: int) -> None:
        """Record that the plan of `iteration` is sent to the workers.

        Raises:
            ValueError: `iteration` is not above the one issued before.
        """
        if iteration <= self._issued:
            raise ValueError(f"iteration={iteration} must be above the last one issued, {self._issued}")
        self._issued = iteration

    def retire(self, iteration: int) -> None:
        """Record that all workers reported the end of `iteration`, and with it of all earlier ones.

        Raises:
            ValueError: `iteration` was not issued, or is retired.
        """
        if not self._retired < iteration <= self._issued:
            raise ValueError(
                f"iteration={iteration} must be above the last one retired, {self._retired}, and at most the last one "
                f"issued, {self._issued}"
            )
        self._retired = iteration
        self._settle(list(self._waiting.values()))

    def reclaim(self, pages: Iterable[Sequence[int]]) -> None:
        """Return pages that the retention hook took over to the pools.

        Args:
            pages: per page, its block id on each rank. No in-flight iteration or transfer may touch them.

        Raises:
            BlockOwnershipError: a block is not a retained one.
        """
        for page in pages:
            for rank, (pool, block) in enumerate(zip(self._pools, page, strict=True)):
                pool.free([block], RETAINED)
                self._retained[rank] -= 1

    def drain_freed(self) -> list[tuple[int, int]]:
        """(rank, block) of every block that was freed since the last call and is free now, for poisoning.

        A block that was freed and handed out again between two calls is not listed: its new holder may have written
        to it. The workers may overwrite what is listed as the first thing they do in the next iteration to be issued,
        and in no later one. Called first when a plan is made, it lists every block that the plan may reuse, so
        nothing is reused without having been poisoned; called last, it lists only blocks that nobody holds in that
        iteration. Both are safe.
        """
        return [(rank, block) for rank, pool in enumerate(self._pools) for block in pool.drain_freed()]

    # Accessors

    def __contains__(self, alloc_id: int) -> bool:
        return alloc_id in self._allocations

    def state(self, alloc_id: int) -> AllocationState:
        """State of an allocation that is alive.

        Raises:
            KeyError: it is unknown or freed.
        """
        return self._get(alloc_id).state

    def is_resident(self, alloc_id: int) -> bool:
        """Whether it may decode in the plan being made, or after it: placed, and its final transfer begun."""
        allocation = self._get(alloc_id)
        return allocation.resident and allocation.state is not AllocationState.DRAINING

    def decode_rank(self, alloc_id: int) -> int | None:
        """Rank of its decode residency; None before `place`."""
        return self._get(alloc_id).rank

    def prefill_tables(self, alloc_id: int) -> tuple[Sequence[int], ...]:
        """Prefill block table of each rank; empty tables once they are released. Not to be changed."""
        return self._get(alloc_id).prefill_tables

    def decode_table(self, alloc_id: int) -> Sequence[int]:
        """Decode block table on `decode_rank`; empty before `place`. Not to be changed; grows with `grow`."""
        return self._get(alloc_id).decode_table

    def transferred_tokens(self, alloc_id: int) -> int:
        """Tokens covered by the transfers begun so far: where the next one starts."""
        return self._get(alloc_id).transferred

    @property
    def last_issued(self) -> int:
        """Last iteration issued; -1 before the first."""
        return self._issued

    @property
    def last_retired(self) -> int:
        """Last iteration retired; -1 before the first."""
        return self._retired

    @property
    def num_draining(self) -> int:
        """Released allocations that still hold blocks."""
        return len(self._draining)

    @property
    def is_idle(self) -> bool:
        """Whether every block on every rank is free, those kept by the retention hook aside."""
        return not self._allocations

    def draining_blocks(self, rank: int) -> int:
        """Blocks of `rank` that return without further decisions, once what is in flight ends."""
        return sum(self._held(a, rank) for a in self._draining.values())

    def usage(self, rank: int) -> RankUsage:
        """Blocks of `rank` by what holds them. Visits all allocations."""
        by_state = dict.fromkeys(AllocationState, 0)
        for allocation in self._allocations.values():
            by_state[allocation.state] += self._held(allocation, rank)
        return RankUsage(
            free=self._pool(rank).num_free,
            prefilling=by_state[AllocationState.PREFILLING],
            transition=by_state[AllocationState.TRANSITION],
            decoding=by_state[AllocationState.DECODING],
            draining=by_state[AllocationState.DRAINING],
            retained=self._retained[rank],
        )

    def snapshot(self) -> KVSnapshot:
        """What a planner needs to know: `planning.KVState(*manager.snapshot())`."""
        return KVSnapshot(
            capacity=self.geometry.usable_blocks,
            free=[pool.num_free for pool in self._pools],
            partial_prefills=[
                (self.geometry.prefill_blocks(a.total_tokens), a.decode_need) for a in self._prefilling.values()
            ],
        )

    def check(self) -> None:
        """Verify all invariants. Visits all blocks: for tests and debug mode.

        Raises:
            BlockOwnershipError: a block is lost, owned twice, or missing in its owner's table.
            AssertionError: tables, states and indices do not agree.
        """
        for rank, pool in enumerate(self._pools):
            pool.check()
            held = 0
            for allocation in self._allocations.values():
                blocks = list(allocation.prefill_tables[rank])
                if allocation.rank == rank:
                    blocks += allocation.decode_table
                if sorted(blocks) != sorted(pool.owned_by(allocation.alloc_id)):
                    raise BlockOwnershipError(f"rank {rank}: the tables of {allocation.alloc_id} are not what it owns")
                held += len(blocks)
            if len(pool.owned_by(RETAINED)) != self._retained[rank]:
                raise BlockOwnershipError(f"rank {rank}: {self._retained[rank]} retained blocks are not what is owned")
            if held + self._retained[rank] != pool.num_used:
                raise BlockOwnershipError(f"rank {rank}: {pool.num_used} blocks used, {held} in tables")
        for allocation in self._allocations.values():
            self._check_allocation(allocation)
        assert set(self._transfers) == {t for a in self._allocations.values() for t in a.transfers}
        partial = self.snapshot().partial_prefills
        need = sum(prefill for prefill, _ in partial) + max((decode for _, decode in partial), default=0)
        assert need <= self.geometry.usable_blocks, "the partial prefills could not all make their transitions"

    # Internals

    def _needs(self, total_tokens: int, needs_placement: bool) -> tuple[int, int]:
        if total_tokens < 1:
            raise ValueError(f"total_tokens={total_tokens} must be at least 1")
        prefill = self.geometry.prefill_blocks(total_tokens)
        decode = self.geometry.decode_blocks(total_tokens + 1) if needs_placement else 0
        if prefill + decode > self.geometry.usable_blocks:
            raise ValueError(
                f"total_tokens={total_tokens} needs {prefill + decode} blocks on one rank, num_blocks="
                f"{self.geometry.num_blocks} has {self.geometry.usable_blocks} usable; give the KV pool more memory or "
                f"lower max_model_len"
            )
        return prefill, decode

    def _get(self, alloc_id: int, *states: AllocationState) -> _Allocation:
        allocation = self._allocations.get(alloc_id)
        if allocation is None:
            raise KeyError(f"allocation {alloc_id} is unknown or freed")
        if states and allocation.state not in states:
            wanted = " or ".join(state.name for state in states)
            raise IllegalTransitionError(f"allocation {alloc_id} is {allocation.state.name}, not {wanted}")
        return allocation

    def _pool(self, rank: int) -> BlockPool:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank={rank} must be in [0, {self.num_ranks})")
        return self._pools[rank]

    @staticmethod
    def _held(allocation: _Allocation, rank: int) -> int:
        decode = len(allocation.decode_table) if allocation.rank == rank else 0
        return len(allocation.prefill_tables[rank]) + decode

    def _settle(self, candidates: Iterable[_Allocation]) -> None:
        """Move on those that wait for in-flight work, if there is none left that may touch their blocks."""
        for allocation in candidates:
            if allocation.alloc_id not in self._waiting or not self._untouched(allocation):
                continue
            del self._waiting[allocation.alloc_id]
            self._give_back_prefill(allocation)
            if allocation.state is AllocationState.DRAINING:
                self._free(allocation)
            else:
                allocation.to(AllocationState.DECODING)

    def _untouched(self, allocation: _Allocation) -> bool:
        return not allocation.transfers and allocation.last_touch <= self._retired

    def _free(self, allocation: _Allocation) -> None:
        if allocation.rank is not None:
            self._pools[allocation.rank].free(allocation.decode_table, allocation.alloc_id)
        allocation.to(AllocationState.FREED)
        del self._draining[allocation.alloc_id]
        del self._allocations[allocation.alloc_id]

    def _give_back_prefill(self, allocation: _Allocation) -> None:
        """Return prefill blocks to the retention hook or the pools: the one place where they leave an allocation."""
        tables = allocation.prefill_tables
        if not tables[0]:
            return
        kept = set(self._retain(allocation.alloc_id, tables)) if self._retain is not None else set()
        for rank, (pool, table) in enumerate(zip(self._pools, tables, strict=True)):
            pool.hand_over([table[page] for page in sorted(kept)], allocation.alloc_id, RETAINED)
            pool.free([block for page, block in enumerate(table) if page not in kept], allocation.alloc_id)
            self._retained[rank] += len(kept)
        allocation.prefill_tables = tuple([] for _ in tables)

    def _check_allocation(self, allocation: _Allocation) -> None:
        state, geometry = allocation.state, self.geometry
        placed = state in (AllocationState.TRANSITION, AllocationState.DECODING)
        prefill = {len(table) for table in allocation.prefill_tables}
        decode = len(allocation.decode_table)
        if state in (AllocationState.PREFILLING, AllocationState.TRANSITION):
            assert prefill == {geometry.prefill_blocks(allocation.total_tokens)}
        if state is AllocationState.PREFILLING:
            assert allocation.rank is None
            assert decode == 0
        if placed:
            assert allocation.decode_tokens > allocation.total_tokens
            assert decode == geometry.decode_blocks(allocation.decode_tokens)
        if state is AllocationState.DECODING:
            assert prefill == {0}
            assert allocation.resident
            assert not allocation.transfers
        if state is AllocationState.DRAINING:
            assert not self._untouched(allocation)
        resident = allocation.rank is not None and allocation.alloc_id in self._resident[allocation.rank]
        assert resident == (placed and allocation.resident)
        assert (allocation.alloc_id in self._prefilling) == (state is AllocationState.PREFILLING)
        assert (allocation.alloc_id in self._draining) == (state is AllocationState.DRAINING)
