"""A small model of the engine and its hardware, independent of the manager's own idea of what is in use.

`Ledger` records who was given which block and what in flight may touch it. `EngineModel` makes random plans, runs them
late, moves KV later still and acknowledges in any order; its memory holds, for every token slot, whose token it is.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field

from conflux_ray.kv import AllocationState, KVGeometry, KVManager

Block = tuple[int, int]  # (rank, block id)
Tag = tuple[int, int]  # (allocation, position)


class ViolationError(AssertionError):
    """The manager let happen what must not."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ViolationError(message)


class Ledger:
    """Who holds each block, and which iterations and transfers in flight may touch it."""

    def __init__(self, geometry: KVGeometry, num_ranks: int) -> None:
        self.geometry = geometry
        self.num_ranks = num_ranks
        self.holder: dict[Block, int] = {}
        self.touching: dict[object, set[Block]] = {}  # iteration or transfer in flight -> blocks

    def hand_out(self, alloc_id: int, rank: int, blocks: list[int]) -> None:
        for block in blocks:
            require(0 < block < self.geometry.num_blocks, f"block {block} is not one of the pool")
            require((rank, block) not in self.holder, f"block {(rank, block)} is owned twice")
            self.holder[rank, block] = alloc_id

    def take_back(self, freed: list[Block]) -> None:
        for block in freed:
            require(block in self.holder, f"block {block} was freed twice")
            del self.holder[block]
            for what, blocks in self.touching.items():
                require(block not in blocks, f"block {block} was freed while {what} may touch it")

    def require_conserved(self, free: list[int]) -> None:
        held = [0] * self.num_ranks
        for rank, _ in self.holder:
            held[rank] += 1
        for rank in range(self.num_ranks):
            require(held[rank] + free[rank] == self.geometry.usable_blocks, f"rank {rank} lost blocks")


@dataclass
class Request:
    """A request of the workload, and how far it has come."""

    prompt: int
    max_tokens: int
    stop_after: int  # the stop token is output number `stop_after`; nobody knows before it arrives
    known: int = 0  # output tokens that arrived
    alloc: Alloc | None = None
    done: bool = False


@dataclass
class Alloc:
    """One admission of a request."""

    alloc_id: int
    request: Request
    total: int
    base: int  # output tokens known at admission
    needs_placement: bool
    prefill_tables: tuple[list[int], ...]
    rank: int | None = None
    decode_table: list[int] = field(default_factory=list)
    computed: int = 0  # prompt tokens planned
    transferred: int = 0
    sampled: int = 0  # output tokens planned since admission
    paused: bool = False

    @property
    def tokens_in_flight(self) -> int:
        return self.base + self.sampled - self.request.known


@dataclass
class Transfer:
    transfer_id: int
    alloc: Alloc
    start: int
    end: int
    unacknowledged: set[int]
    executed: bool = False  # its iteration ran, so it may move any time
    moved: bool = False


@dataclass
class Iteration:
    number: int
    poison: list[Block]
    chunks: list[tuple[Alloc, int, int]] = field(default_factory=list)
    decodes: list[tuple[Alloc, int]] = field(default_factory=list)  # (alloc, context, the new token included)
    transfers: list[Transfer] = field(default_factory=list)
    samples: list[Alloc] = field(default_factory=list)
    executed: bool = False


class EngineModel:
    """Drives a manager with requests until all are done.

    Args:
        manager: under test.
        requests: the workload.
        rng: decides everything that is not determined.
        abort_rate: chance of aborting a random request, per step.
        verify: call the manager's own `check` as well. Off to show what this model sees by itself.
    """

    RUN_AHEAD = 2  # iterations issued and not retired

    def __init__(
        self,
        manager: KVManager,
        requests: list[Request],
        rng: random.Random,
        abort_rate: float = 0.0,
        verify: bool = True,
    ) -> None:
        self.manager = manager
        self.geometry = manager.geometry
        self.requests = requests
        self.rng = rng
        self.abort_rate = abort_rate
        self.verify = verify
        self.ledger = Ledger(manager.geometry, manager.num_ranks)
        self.memory: dict[tuple[int, str, int], object] = {}  # (rank, view, slot) -> tag
        self.in_flight: list[Iteration] = []
        self.transfers: list[Transfer] = []
        self.freed: list[Block] = []  # free and not poisoned yet
        self.next_alloc = 0
        self.next_iteration = 0
        self.seen: dict[str, int] = defaultdict(int)

    def run(self, max_steps: int = 20_000) -> None:
        """To the end: every request done or aborted, every block back."""
        for _ in range(max_steps):
            if all(r.done for r in self.requests) and not self.in_flight and not self.transfers:
                require(self.manager.is_idle, "the manager is not idle after the last request")
                require(self.manager.num_draining == 0, "something drains for ever")
                require(not self.ledger.holder, f"blocks never came back: {self.ledger.holder}")
                return
            self.step()
        raise ViolationError(f"requests did not finish within {max_steps} steps")

    def step(self) -> None:
        if self.rng.random() < self.abort_rate:
            self.abort(self.rng.choice(self.requests))
        stuck = not self.in_flight and not self.transfers
        if stuck or self.rng.random() < 0.5:
            preempted = self.seen["preempted"]
            planned = len(self.in_flight) < self.RUN_AHEAD and self.plan(eager=stuck)
            progress = planned or self.seen["preempted"] > preempted or all(r.done for r in self.requests)
            require(progress or not stuck, "deadlock: nothing can be planned")
        if self.rng.random() < 0.5:
            self.execute_one()
        if self.rng.random() < 0.4:
            self.deliver_one()
        for transfer in self.rng.sample(self.transfers, len(self.transfers)):
            if transfer.executed and self.rng.random() < 0.3:
                self.move(transfer)
                self.acknowledge(transfer)

    # Planning

    def plan(self, eager: bool) -> bool:
        """Plan and issue one iteration; `eager` leaves out nothing that is possible. False if there is nothing."""
        self.freed = [b for b in self.freed if b not in self.ledger.holder]
        poison_first = self.rng.random() < 0.5
        plan = Iteration(self.next_iteration, list(self.freed) if poison_first else [])
        self.plan_decodes(plan)
        self.plan_chunks(plan, eager)
        if not plan.chunks and not plan.decodes:
            return False
        self.freed = [b for b in self.freed if b not in self.ledger.holder]
        if not poison_first:
            plan.poison = list(self.freed)
        self.freed = []
        self.next_iteration += 1
        self.ledger.touching[f"iteration {plan.number}"] = self.touched_by(plan)
        self.manager.issue(plan.number)
        self.in_flight.append(plan)
        self.seen["mixed"] += bool(plan.chunks and plan.decodes)
        return True

    def plan_decodes(self, plan: Iteration) -> None:
        for rank in range(self.manager.num_ranks):
            by_id = {r.alloc.alloc_id: r.alloc for r in self.requests if r.alloc is not None}
            for alloc_id in reversed(self.manager.decodes_newest_first(rank)):  # oldest first
                alloc = by_id[alloc_id]
                if alloc.paused or alloc.base + alloc.sampled >= alloc.request.max_tokens:
                    continue
                context = alloc.total + alloc.sampled
                added = self.manager.grow(alloc_id, context)
                if added is None:
                    self.make_room(rank, by_id)
                    continue
                self.ledger.hand_out(alloc_id, rank, added)
                alloc.decode_table += added
                alloc.sampled += 1
                plan.decodes.append((alloc, context))
                plan.samples.append(alloc)

    def make_room(self, rank: int, by_id: dict[int, Alloc]) -> None:
        newest = by_id[self.manager.decodes_newest_first(rank)[0]]
        if self.manager.draining_blocks(rank) or any(a.paused and a.rank == rank for a in by_id.values()):
            self.seen["waited for room"] += 1
            return
        newest.paused = True
        self.preempt_if_known(newest)

    def plan_chunks(self, plan: Iteration, eager: bool) -> None:
        candidates = [r for r in self.requests if not r.done and (r.alloc is None or r.alloc.computed < r.alloc.total)]
        if not eager:
            candidates = self.rng.sample(candidates, self.rng.randint(0, min(4, len(candidates))))
        for request in candidates:
            alloc = request.alloc or self.admit(request)
            if alloc is None:
                continue
            start = alloc.computed
            end = self.rng.randint(start + 1, alloc.total) if self.rng.random() < 0.7 else alloc.total
            early = end < alloc.total and self.rng.random() < 0.3
            if alloc.needs_placement and alloc.rank is None and (early or end == alloc.total) and not self.place(alloc):
                end = min(end, alloc.total - 1)
                if end <= start:
                    self.seen["waited for a rank"] += 1
                    continue
            self.plan_chunk(plan, alloc, start, end)

    def admit(self, request: Request) -> Alloc | None:
        total, needs_placement = request.prompt + request.known, request.max_tokens - request.known > 1
        if not self.manager.can_start_prefill(total, needs_placement):
            return None
        alloc_id = self.next_alloc
        self.next_alloc += 1
        tables = self.manager.start_prefill(alloc_id, total, needs_placement)
        for rank, table in enumerate(tables):
            self.ledger.hand_out(alloc_id, rank, table)
        request.alloc = Alloc(alloc_id, request, total, request.known, needs_placement, tables)
        self.seen["resumed"] += request.known > 0
        return request.alloc

    def place(self, alloc: Alloc) -> bool:
        ranks = [r for r in range(self.manager.num_ranks) if self.manager.can_place(alloc.alloc_id, r)]
        if not ranks:
            return False
        alloc.rank = self.rng.choice(ranks)
        alloc.decode_table = self.manager.place(alloc.alloc_id, alloc.rank)
        self.ledger.hand_out(alloc.alloc_id, alloc.rank, alloc.decode_table)
        return True

    def plan_chunk(self, plan: Iteration, alloc: Alloc, start: int, end: int) -> None:
        alloc.computed = end
        plan.chunks.append((alloc, start, end))
        completes = end == alloc.total
        if completes:
            alloc.sampled = 1
            plan.samples.append(alloc)
        if alloc.rank is not None and (completes or self.rng.random() < 0.7):
            upto = alloc.total if completes else self.rng.randint(alloc.transferred, end)
            if upto > alloc.transferred:
                self.begin_transfer(plan, alloc, upto)

    def begin_transfer(self, plan: Iteration, alloc: Alloc, end: int) -> None:
        transfer_id = self.manager.begin_transfer(alloc.alloc_id, alloc.transferred, end, end == alloc.total)
        workers = set(range(self.manager.num_workers))
        transfer = Transfer(transfer_id, alloc, alloc.transferred, end, workers)
        self.seen["partial transfers"] += end < alloc.total
        alloc.transferred = end
        self.transfers.append(transfer)
        plan.transfers.append(transfer)
        self.ledger.touching[f"transfer {transfer_id}"] = self.prefill_blocks(alloc) | self.decode_blocks(alloc)

    def touched_by(self, plan: Iteration) -> set[Block]:
        blocks: set[Block] = set()
        for alloc, _, _ in plan.chunks:
            blocks |= self.prefill_blocks(alloc)
        for alloc, _ in plan.decodes:
            blocks |= self.decode_blocks(alloc)
        return blocks

    @staticmethod
    def prefill_blocks(alloc: Alloc) -> set[Block]:
        return {(rank, block) for rank, table in enumerate(alloc.prefill_tables) for block in table}

    @staticmethod
    def decode_blocks(alloc: Alloc) -> set[Block]:
        assert alloc.rank is not None
        return {(alloc.rank, block) for block in alloc.decode_table}

    # What the hardware does, as late as it may

    def execute_one(self) -> None:
        plan = next((i for i in self.in_flight if not i.executed), None)
        if plan is None:
            return
        poison = set(plan.poison)
        self.memory = {key: tag for key, tag in self.memory.items() if self.block_of(key) not in poison}
        for alloc, start, end in plan.chunks:
            self.write_prefill(alloc, start, end)
            self.read_prefill(alloc, 0, end)
        for alloc, context in plan.decodes:
            for transfer in [t for t in self.transfers if t.alloc is alloc]:
                self.move(transfer)  # the first decode waits for the KV's arrival, not for its acknowledgement
            self.write_decode(alloc, context - 1)
            self.read_decode(alloc, context)
        for transfer in plan.transfers:
            transfer.executed = True
        plan.executed = True

    def move(self, transfer: Transfer) -> None:
        if not transfer.moved:
            self.read_prefill(transfer.alloc, transfer.start, transfer.end)
            for position in range(transfer.start, transfer.end):
                self.write_decode(transfer.alloc, position)
            transfer.moved = True

    def block_of(self, key: tuple[int, str, int]) -> Block:
        rank, view, slot = key
        return rank, slot // (self.geometry.prefill_page if view == "prefill" else self.geometry.block_size)

    def write(self, rank: int, view: str, slot: int, tag: Tag) -> None:
        self.memory[rank, view, slot] = tag
        # The two views are the same bytes: a block that was written in one holds nothing of the other.
        _, block = self.block_of((rank, view, slot))
        other, width = (
            ("decode", self.geometry.block_size) if view == "prefill" else ("prefill", self.geometry.prefill_page)
        )
        for stale in range(block * width, (block + 1) * width):
            self.memory.pop((rank, other, stale), None)

    def write_prefill(self, alloc: Alloc, start: int, end: int) -> None:
        for rank, table in enumerate(alloc.prefill_tables):
            for position in range(start, end):
                slot = self.geometry.prefill_slot(table, position)
                self.write(rank, "prefill", slot, (alloc.alloc_id, position))

    def write_decode(self, alloc: Alloc, position: int) -> None:
        assert alloc.rank is not None
        slot = self.geometry.decode_slot(alloc.decode_table, position)
        self.write(alloc.rank, "decode", slot, (alloc.alloc_id, position))

    def read_prefill(self, alloc: Alloc, start: int, end: int) -> None:
        for rank, table in enumerate(alloc.prefill_tables):
            for position in range(start, end):
                found = self.memory.get((rank, "prefill", self.geometry.prefill_slot(table, position)))
                require(found == (alloc.alloc_id, position), f"prefill KV of {(alloc.alloc_id, position)} is {found}")

    def read_decode(self, alloc: Alloc, context: int) -> None:
        for position in range(context):
            slot = self.geometry.decode_slot(alloc.decode_table, position)
            found = self.memory.get((alloc.rank or 0, "decode", slot))
            require(found == (alloc.alloc_id, position), f"decode KV of {(alloc.alloc_id, position)} is {found}")

    # What comes back

    def deliver_one(self) -> None:
        """The results of the oldest iteration in flight arrive."""
        if not self.in_flight or not self.in_flight[0].executed:
            return
        plan = self.in_flight.pop(0)
        del self.ledger.touching[f"iteration {plan.number}"]
        self.manager.retire(plan.number)
        self.observe()
        for alloc in plan.samples:
            if alloc.request.alloc is alloc:  # not ended meanwhile
                self.deliver_token(alloc)

    def deliver_token(self, alloc: Alloc) -> None:
        request = alloc.request
        request.known += 1
        if request.known in (request.stop_after, request.max_tokens):
            self.seen["discarded tokens"] += alloc.tokens_in_flight > 0
            self.finish(request)
        elif alloc.paused:
            self.preempt_if_known(alloc)

    def acknowledge(self, transfer: Transfer) -> None:
        worker = self.rng.choice(sorted(transfer.unacknowledged))
        transfer.unacknowledged.remove(worker)
        if not transfer.unacknowledged:
            self.transfers.remove(transfer)
            del self.ledger.touching[f"transfer {transfer.transfer_id}"]
        self.manager.acknowledge(transfer.transfer_id, worker)
        self.observe()

    def preempt_if_known(self, alloc: Alloc) -> None:
        if alloc.tokens_in_flight == 0:
            self.seen["preempted"] += 1
            self.release(alloc)

    def abort(self, request: Request) -> None:
        if not request.done:
            self.seen["aborted"] += 1
            self.finish(request)

    def finish(self, request: Request) -> None:
        request.done = True
        if request.alloc is not None:
            self.release(request.alloc)

    def release(self, alloc: Alloc) -> None:
        self.seen[f"released in {self.manager.state(alloc.alloc_id).name}"] += 1
        alloc.request.alloc = None
        self.manager.release(alloc.alloc_id)
        self.observe()

    def observe(self) -> None:
        """After whatever may free blocks: see at once what was freed."""
        freed = self.manager.drain_freed()
        self.ledger.take_back(freed)
        self.freed += freed
        self.ledger.require_conserved(self.manager.snapshot().free)
        if self.verify:
            self.manager.check()
            self.seen["draining"] += self.manager.num_draining > 0
            live = [r.alloc.alloc_id for r in self.requests if r.alloc is not None]
            require(
                all(self.manager.state(a) is not AllocationState.DRAINING for a in live), "a live allocation drains"
            )


def make_model(
    seed: int,
    manager_type: type[KVManager] = KVManager,
    sp_degree: int = 2,
    base_tp: int = 1,
    block_size: int = 2,
    num_requests: int = 8,
    max_len: int = 24,
    spare_blocks: int = 2,
    abort_rate: float = 0.02,
    verify: bool = True,
) -> EngineModel:
    """A model whose pool holds the longest request and `spare_blocks` blocks more."""
    rng = random.Random(seed)
    requests = []
    for _ in range(num_requests):
        prompt = rng.randint(1, max_len - 1)
        max_tokens = rng.randint(1, max_len - prompt)
        requests.append(Request(prompt, max_tokens, rng.randint(1, 2 * max_tokens)))
    sizes = KVGeometry(block_size, sp_degree, 2)
    geometry = KVGeometry(block_size, sp_degree, sizes.min_blocks(max_len) + spare_blocks)
    manager = manager_type(geometry, sp_degree, sp_degree * base_tp)
    return EngineModel(manager, requests, rng, abort_rate, verify)
