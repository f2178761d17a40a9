"""A state machine that calls the manager in any permitted order, also in ones that no engine would choose."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from kv_engine_model import Block, Ledger

from conflux_ray.kv import AllocationState, KVGeometry, KVManager


class AnyOrder(RuleBasedStateMachine):
    @initialize(sp_degree=st.integers(1, 3), base_tp=st.integers(1, 2), num_blocks=st.integers(6, 24))
    def create(self, sp_degree: int, base_tp: int, num_blocks: int) -> None:
        geometry = KVGeometry(block_size=2, sp_degree=sp_degree, num_blocks=num_blocks)
        self.manager = KVManager(geometry, sp_degree, sp_degree * base_tp)
        self.ledger = Ledger(geometry, sp_degree)
        self.totals: dict[int, int] = {}  # live allocations, released ones excluded
        self.decode_tokens: dict[int, int] = {}
        self.final_in_this_plan: set[int] = set()
        self.unacknowledged: dict[int, set[int]] = {}
        self.next_alloc = 0

    def pick(self, data: st.DataObject, *states: AllocationState) -> int | None:
        candidates = [a for a in self.totals if self.manager.state(a) in states]
        return data.draw(st.sampled_from(candidates)) if candidates else None

    def decode_blocks(self, alloc_id: int) -> set[Block]:
        rank = self.manager.decode_rank(alloc_id)
        assert rank is not None
        return {(rank, block) for block in self.manager.decode_table(alloc_id)}

    def prefill_blocks(self, alloc_id: int) -> set[Block]:
        return {(rank, block) for rank, table in enumerate(self.manager.prefill_tables(alloc_id)) for block in table}

    @rule(total=st.integers(1, 16), needs_placement=st.booleans())
    def start_prefill(self, total: int, needs_placement: bool) -> None:
        geometry = self.manager.geometry
        need = geometry.prefill_blocks(total) + needs_placement * geometry.decode_blocks(total + 1)
        if need > geometry.usable_blocks or not self.manager.can_start_prefill(total, needs_placement):
            return
        for rank, table in enumerate(self.manager.start_prefill(self.next_alloc, total, needs_placement)):
            self.ledger.hand_out(self.next_alloc, rank, table)
        self.totals[self.next_alloc] = total
        self.next_alloc += 1

    @rule(data=st.data())
    def place(self, data: st.DataObject) -> None:
        alloc_id = self.pick(data, AllocationState.PREFILLING)
        if alloc_id is None:
            return
        ranks = [r for r in range(self.manager.num_ranks) if self.manager.can_place(alloc_id, r)]
        if ranks:
            rank = data.draw(st.sampled_from(ranks))
            self.ledger.hand_out(alloc_id, rank, self.manager.place(alloc_id, rank))
            self.decode_tokens[alloc_id] = self.totals[alloc_id] + 1

    @rule(data=st.data())
    def begin_transfer(self, data: st.DataObject) -> None:
        alloc_id = self.pick(data, AllocationState.TRANSITION)
        if alloc_id is None or self.manager.is_resident(alloc_id):
            return
        start, total = self.manager.transferred_tokens(alloc_id), self.totals[alloc_id]
        end = data.draw(st.integers(start + 1, total))
        transfer = self.manager.begin_transfer(alloc_id, start, end, end == total)
        self.unacknowledged[transfer] = set(range(self.manager.num_workers))
        self.ledger.touching[f"transfer {transfer}"] = self.prefill_blocks(alloc_id) | self.decode_blocks(alloc_id)
        if end == total:
            self.final_in_this_plan.add(alloc_id)

    @rule(data=st.data(), more=st.integers(0, 5))
    def grow(self, data: st.DataObject, more: int) -> None:
        alloc_id = self.pick(data, AllocationState.TRANSITION, AllocationState.DECODING)
        if alloc_id is None or not self.manager.is_resident(alloc_id):
            return
        rank = self.manager.decode_rank(alloc_id)
        assert rank is not None
        added = self.manager.grow(alloc_id, self.decode_tokens[alloc_id] + more)
        if added is not None:
            self.ledger.hand_out(alloc_id, rank, added)
            self.decode_tokens[alloc_id] += more

    @rule()
    def issue(self) -> None:
        """The plan uses all that is alive: prefill blocks until the final transfer, decode blocks afterwards."""
        touched: set[Block] = set()
        for alloc_id in self.totals:
            if self.manager.is_resident(alloc_id) and alloc_id not in self.final_in_this_plan:
                touched |= self.decode_blocks(alloc_id)
            else:
                touched |= self.prefill_blocks(alloc_id)
        self.final_in_this_plan.clear()
        iteration = self.manager.last_issued + 1
        self.manager.issue(iteration)
        self.ledger.touching[f"iteration {iteration}"] = touched

    @precondition(lambda self: self.manager.last_retired < self.manager.last_issued)
    @rule()
    def retire(self) -> None:
        iteration = self.manager.last_retired + 1
        del self.ledger.touching[f"iteration {iteration}"]
        self.manager.retire(iteration)
        self.ledger.take_back(self.manager.drain_freed())

    @precondition(lambda self: self.unacknowledged)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        transfer = data.draw(st.sampled_from(sorted(self.unacknowledged)))
        self.acknowledge_one(transfer, data.draw(st.sampled_from(sorted(self.unacknowledged[transfer]))))

    def acknowledge_one(self, transfer: int, worker: int) -> None:
        self.unacknowledged[transfer].remove(worker)
        if not self.unacknowledged[transfer]:
            del self.unacknowledged[transfer]
            del self.ledger.touching[f"transfer {transfer}"]
        self.manager.acknowledge(transfer, worker)
        self.ledger.take_back(self.manager.drain_freed())

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        alloc_id = self.pick(data, *AllocationState)
        if alloc_id is not None:
            del self.totals[alloc_id]
            self.manager.release(alloc_id)
            self.ledger.take_back(self.manager.drain_freed())

    @invariant()
    def nothing_is_lost(self) -> None:
        self.manager.check()
        self.ledger.require_conserved(self.manager.snapshot().free)

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for alloc_id in list(self.totals):
            self.manager.release(alloc_id)
        self.totals.clear()
        self.issue()
        while self.manager.last_retired < self.manager.last_issued:
            self.manager.retire(self.manager.last_retired + 1)
        self.ledger.touching.clear()
        for transfer, workers in list(self.unacknowledged.items()):
            for worker in list(workers):
                self.manager.acknowledge(transfer, worker)
        self.ledger.take_back(self.manager.drain_freed())
        assert self.manager.is_idle
        assert not self.ledger.holder


AnyOrder.TestCase.settings = settings(max_examples=120, stateful_step_count=60, deadline=None, derandomize=True)
TestAnyOrder = AnyOrder.TestCase
