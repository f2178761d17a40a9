"""LoongServe: elastic isolation. Prefill and decode take turns on a changing number of single-rank engines.

Decode runs in macro-iterations of ten steps, prefill in macro-iterations of whole prompts on groups of ranks. A dynamic
programme over requests and ranks cuts the waiting prompts into batches with a group each, minimising the sum of
T * sum of 1 / len, with T = A + B * sum of len + C * sum of len^2 for its group. Ranks that decode may be borrowed, or
emptied by moving their KV to another, when that sum falls by more than the decodes lose in the same unit. After a
prefill its KV stays on as few ranks as possible, at no cost. Prefill groups use Ring-SP, whose traffic does not shrink
with the degree and hides behind attention as far as attention lasts.

A request's KV lives on one rank; LoongServe can also spread a decode over ranks, which the lengths here never need.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import inf

from conflux_ray.planning.latency_model import chunk_work
from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.decodes import DecodePool
from conflux_ray.simulator.deployment import BLOCK_SIZE, Deployment, Instance, prefill_rate
from conflux_ray.simulator.request import Phase, Request
from conflux_ray.simulator.systems.chunked import Ordered

DECODE_STEPS = 10
"""Decode steps between two chances to prefill."""
MAX_BATCHED = 12
"""Most requests of one prefill macro-iteration; the dynamic programme grows with its square."""


@dataclass(slots=True)
class _Rank:
    """One elastic instance: its memory and residents."""

    free: int
    pool: DecodePool
    prefilling: bool = False


@dataclass(frozen=True, slots=True)
class _Choice:
    """A prefill macro-iteration that could start: batches with the size of their group, and what it costs."""

    ranks: tuple[int, ...]
    batches: tuple[tuple[tuple[Request, ...], int], ...]
    cost: float
    migrate: tuple[int, int] | None = None  # (from, to)
    delay: float = 0.0


class LoongServeInstance(Instance):
    """A group of elastic instances with one manager.

    Args:
        clock: of the simulation.
        deployment: memory and cache.
        base_tp: GPUs of one rank.
        max_sp: most ranks of one prefill.
        batch: most tokens of a prefill macro-iteration; a longer prompt runs alone.
        policy: "fcfs" or "srpt".
    """

    def __init__(
        self, clock: Clock, deployment: Deployment, base_tp: int, max_sp: int, batch: int, policy: str
    ) -> None:
        num_ranks = deployment.gpus // base_tp
        super().__init__(clock, deployment.new_cache(base_tp, num_ranks))
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1 token")
        hardware = deployment.hardware
        self.model = hardware.latency(1, base_tp)
        self.max_sp = max_sp
        self.batch = batch
        self.blocks = deployment.kv_blocks(base_tp)
        self.ranks = [_Rank(self.blocks, DecodePool(1, BLOCK_SIZE)) for _ in range(num_ranks)]
        self.waiting = Ordered(policy)
        self.capacity = prefill_rate(self.model) * num_ranks
        device = hardware.device
        self._ring_token = hardware.shape.kv_layer_bytes / (device.copy_bandwidth.value * base_tp)
        self._ring_step = device.copy_fixed.value
        self._move_token = hardware.shape.kv_bytes / (device.copy_bandwidth.value * base_tp)
        self._prefilling = 0  # tokens
        self._stepping: list[int] = []  # ranks in the present decode step
        self._steps = 0  # of the present decode macro-iteration
        self._joining: list[tuple[Request, int]] = []  # prefilled while their rank was in a step

    def queued_tokens(self) -> int:
        return self.waiting.tokens() + self._prefilling

    def kv_in_use(self) -> int:
        return sum(self.blocks - rank.free for rank in self.ranks)

    def submit(self, request: Request) -> None:
        if -(-(request.prompt_tokens + request.output_tokens) // BLOCK_SIZE) > self.blocks:
            request.to(Phase.REJECTED)
            return
        self.waiting.add(request)
        self._prefill()

    # Prefill

    def prefill_seconds(self, requests: Sequence[Request], ranks: int) -> float:
        """Time of a batch on a group of `ranks`, seconds."""
        return self._seconds(*self._sizes(requests), ranks)

    def _sizes(self, requests: Sequence[Request]) -> tuple[int, float, int]:
        """Tokens to compute, their attention work in token pairs, and tokens of KV that circulate."""
        tokens, work, circulating = 0, 0.0, 0
        for request in requests:
            cached = self.cached(request)
            length = request.total_tokens - cached
            tokens += length
            work += chunk_work(length, cached)
            circulating += request.total_tokens
        return tokens, work, circulating

    def _seconds(self, tokens: int, work: float, circulating: int, ranks: int) -> float:
        model = self.model
        attention = model.prefill(work / ranks)
        if ranks > 1:
            ring = circulating * (ranks - 1) / ranks * self._ring_token + (ranks - 1) * self._ring_step
            attention = max(attention, ring)
        return model.num_layers * (model.linear(tokens / ranks) + attention) + model.host(0)

    def _prefill(self) -> None:
        """Start a prefill macro-iteration on ranks that are free to, if it is worth it."""
        if not len(self.waiting):
            return
        free = [r for r in range(len(self.ranks)) if not self.ranks[r].prefilling and r not in self._stepping]
        choice = self._choose(free)
        if choice is None:
            return
        if choice.migrate is not None:
            self._migrate(*choice.migrate)
        remaining = list(choice.ranks)
        for requests, size in choice.batches:
            group, remaining = remaining[:size], remaining[size:]
            self._start(requests, group, choice)

    def _choose(self, free: Sequence[int]) -> _Choice | None:
        idle = [r for r in free if not self.ranks[r].pool.count]
        busy = sorted((r for r in free if self.ranks[r].pool.count), key=lambda r: self.blocks - self.ranks[r].free)
        choices = [self._with(idle + busy[:k], busy[:k]) for k in range(len(busy) + 1) if idle or k]
        if len(busy) > 1:
            choices.append(self._after_moving(idle, busy[0], busy[1:]))
        possible = [c for c in choices if c is not None]
        return min(possible, key=lambda c: c.cost) if possible else None

    def _with(self, ranks: Sequence[int], borrowed: Sequence[int]) -> _Choice | None:
        """The best use of `ranks`, of which `borrowed` hold decodes that would wait."""
        requests = self._fitting(ranks)
        if not requests:
            return None
        cost, batches = self._cut(requests, len(ranks))
        longest = max(self.prefill_seconds(batch, size) for batch, size in batches)
        lost = sum(
            1 / self.ranks[r].pool.generated(member, 0) for r in borrowed for member in self.ranks[r].pool.members(0)
        )
        # Requests that this choice leaves waiting lose the time of a macro-iteration.
        left = sum(1 / r.total_tokens for r in islice(self.waiting, len(requests), MAX_BATCHED))
        return _Choice(tuple(ranks), batches, cost + longest * (lost + left))

    def _after_moving(self, idle: Sequence[int], source: int, others: Sequence[int]) -> _Choice | None:
        """The use of `source` and the idle ranks once the KV of `source` has moved to another rank."""
        held = self.blocks - self.ranks[source].free
        room = [r for r in others if self.ranks[r].free > held + self.ranks[source].pool.count]
        if not room:
            return None
        choice = self._with([*idle, source], [])
        if choice is None:
            return None
        members = self.ranks[source].pool.members(0)
        delay = self.ranks[source].pool.context[0] * self._move_token
        waits = sum(1 / self.ranks[source].pool.generated(m, 0) for m in members)
        waits += sum(1 / request.total_tokens for batch, _ in choice.batches for request in batch)
        target = min(room, key=lambda r: self.ranks[r].free)
        return _Choice(choice.ranks, choice.batches, choice.cost + delay * waits, (source, target), delay)

    def _fitting(self, ranks: Sequence[int]) -> list[Request]:
        """The head of the queue, as far as it fits the token limit and the memory of `ranks`."""
        free = [self.ranks[r].free for r in ranks]
        requests: list[Request] = []
        tokens = 0
        for request in self.waiting:
            needed = -(-(request.total_tokens + 1) // BLOCK_SIZE)
            fits = [k for k, f in enumerate(free) if f >= needed]
            over = bool(requests) and tokens + request.total_tokens > self.batch
            if not fits or over or len(requests) == MAX_BATCHED:
                break
            free[min(fits, key=lambda k: free[k])] -= needed
            requests.append(request)
            tokens += request.total_tokens
        return requests

    def _cut(
        self, requests: Sequence[Request], num_ranks: int
    ) -> tuple[float, tuple[tuple[tuple[Request, ...], int], ...]]:
        """The dynamic programme: consecutive batches of the requests, longest first, with a group of ranks each."""
        ordered = sorted(requests, key=lambda r: (-r.total_tokens, r.index))
        count = len(ordered)
        costs: dict[tuple[int, int, int], float] = {}
        for first in range(count):
            for last in range(first + 1, count + 1):
                batch = ordered[first:last]
                sizes, share = self._sizes(batch), sum(1 / r.total_tokens for r in batch)
                for size in range(1, min(num_ranks, self.max_sp) + 1):
                    costs[first, last, size] = self._seconds(*sizes, size) * share
        # best[i, j]: the first i requests on the first j ranks, and where its last batch begins.
        best: dict[tuple[int, int], tuple[float, int, int]] = {(0, 0): (0.0, 0, 0)}
        for (first, last, size), cost in sorted(costs.items(), key=lambda entry: (entry[0][1], entry[0])):
            for j in range(size, num_ranks + 1):
                before = best.get((first, j - size))
                if before is not None and before[0] + cost < best.get((last, j), (inf, 0, 0))[0]:
                    best[last, j] = (before[0] + cost, first, size)
        used = min((j for i, j in best if i == count), key=lambda j: best[count, j][0])
        total = best[count, used][0]
        batches: list[tuple[tuple[Request, ...], int]] = []
        while count:
            _, first, size = best[count, used]
            batches.append((tuple(ordered[first:count]), size))
            count, used = first, used - size
        return total, tuple(reversed(batches))

    def _migrate(self, source: int, target: int) -> None:
        """All residents of `source` go on decoding on `target`."""
        for request in self.ranks[source].pool.members(0):
            self.ranks[source].free += self.ranks[source].pool.leave(request, 0)
            self.ranks[target].free -= -(-request.total_tokens // BLOCK_SIZE)
            request.transferred_tokens += request.total_tokens - 1
            self.ranks[target].pool.enter(request, 0)

    def _start(self, batch: Sequence[Request], group: Sequence[int], choice: _Choice) -> None:
        placed: list[tuple[Request, int, int]] = []
        for request in batch:
            needed = -(-(request.total_tokens + 1) // BLOCK_SIZE)
            rank = self._fullest(group, needed)
            if rank is None:
                rank = self._fullest(choice.ranks, needed)
            if rank is None:
                continue  # the batches took the memory in another order than `_fitting` did
            self.ranks[rank].free -= needed
            placed.append((request, rank, needed))
        if not placed:
            return
        chosen = [request for request, _, _ in placed]
        seconds = choice.delay + self.prefill_seconds(chosen, len(group))
        for request in chosen:
            self.waiting.remove(request)
            self.begin(request)
        self._prefilling += sum(request.total_tokens for request in chosen)
        for rank in group:
            self.ranks[rank].prefilling = True
        self.clock.after(seconds, partial(self._end, placed, group))

    def _fullest(self, ranks: Sequence[int], needed: int) -> int | None:
        fits = [r for r in ranks if self.ranks[r].free >= needed]
        return min(fits, key=lambda r: (self.ranks[r].free, r)) if fits else None

    def _end(self, placed: Sequence[tuple[Request, int, int]], group: Sequence[int]) -> None:
        self.iterations += 1
        for rank in group:
            self.ranks[rank].prefilling = False
        for request, rank, held in placed:
            self._prefilling -= request.total_tokens
            self.prefilled(request, self.clock.now)
            if request.phase is Phase.FINISHED:
                self.ranks[rank].free += held
            elif rank in self._stepping:
                self._joining.append((request, rank))
            else:
                self.ranks[rank].pool.join(request, 0)
        # Decodes that waited for this prefill go first, then prefill on what is idle.
        if not self._stepping:
            self._steps = 0
            self._step()
        self._prefill()

    # Decode

    def _step(self) -> None:
        """One decode step of all ranks that do not prefill, together."""
        for joining, where in self._joining:
            self.ranks[where].pool.join(joining, 0)
        self._joining.clear()
        seconds = 0.0
        for number, rank in enumerate(self.ranks):
            if rank.prefilling:
                continue
            while rank.pool.count and (need := rank.pool.growth(0)) > rank.free:
                request, held = rank.pool.preempt(0)
                rank.free += held
                self.waiting.add(request)
            if rank.pool.count:
                rank.free -= need
                self._stepping.append(number)
                estimator = self.model.given(rank.pool.tokens, rank.pool.context)
                seconds = max(seconds, estimator.seconds(rank.pool.count, 0, 0.0))
        if self._stepping:
            self.clock.after(seconds, self._end_step)

    def _end_step(self) -> None:
        self.iterations += 1
        for number in self._stepping:
            rank = self.ranks[number]
            for _, _, held in rank.pool.tick(self.clock.now):
                rank.free += held
        self._stepping = []
        self._steps += 1
        if self._steps >= DECODE_STEPS or not any(rank.pool.count for rank in self.ranks):
            self._steps = 0
            self._prefill()
        self._step()


def build(
    clock: Clock,
    deployment: Deployment,
    *,
    policy: str = "fcfs",
    base_tp: int = 1,
    max_sp: int = 4,
    batch: int = 16384,
) -> list[Instance]:
    """One group of elastic instances on all GPUs.

    Args:
        clock: of the simulation.
        deployment: its GPUs.
        policy: "fcfs" or "srpt"; the latter serves the shortest prompts first.
        base_tp: GPUs of one rank.
        max_sp: most ranks of one prefill.
        batch: most tokens of a prefill macro-iteration.
    """
    if deployment.gpus % base_tp:
        raise ValueError(f"base_tp={base_tp} does not divide {deployment.gpus} GPUs")
    return [LoongServeInstance(clock, deployment, base_tp, max_sp, batch, policy)]
