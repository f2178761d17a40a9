"""Chunked Prefill under tensor parallelism, as vLLM schedules it, and data parallelism made of it.

Every iteration holds one token of every decode, then chunks of the running prefills, then of the waiting head if the
KV of its whole prompt can be had, within a token budget. The phases share one tensor parallelism; their attention times
add. A decode that cannot grow preempts the newest running request, whose tokens are computed again. `srpt` orders
running and waiting prefills by remaining tokens: the `++` of the paper.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from conflux_ray.planning.latency_model import LatencyModel, chunk_work
from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.decodes import DecodePool
from conflux_ray.simulator.deployment import BLOCK_SIZE, Deployment, Instance, prefill_rate
from conflux_ray.simulator.request import Phase, Request

MAX_SEQS = 1024
"""Most running requests of an instance; not meant to bind."""


class Ordered:
    """Waiting or running prefills in the order of a policy.

    Args:
        policy: "fcfs" or "srpt".

    Raises:
        ValueError: there is no such policy.
    """

    def __init__(self, policy: str) -> None:
        if policy not in ("fcfs", "srpt"):
            raise ValueError(f"policy={policy!r} is unknown; choose fcfs or srpt")
        self.policy = policy
        self._entries: list[tuple[float, float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in self._entries)

    def add(self, request: Request) -> None:
        key = request.arrival if self.policy == "fcfs" else float(request.remaining)
        insort(self._entries, (key, request.arrival, request.index, request))

    def head(self) -> Request:
        return self._entries[0][-1]

    def pop(self) -> Request:
        return self._entries.pop(0)[-1]

    def remove(self, request: Request) -> None:
        for k, entry in enumerate(self._entries):
            if entry[-1] is request:
                del self._entries[k]
                return
        raise KeyError(f"request {request.index} is not queued")

    def first_is_before(self, other: Ordered) -> bool:
        """Whether this queue's head comes before the other's; False if this one is empty."""
        if not self._entries:
            return False
        return not other._entries or self._entries[0][:3] < other._entries[0][:3]

    def tokens(self) -> int:
        """Prompt tokens still to compute."""
        return sum(entry[-1].remaining for entry in self._entries)


class ChunkedInstance(Instance):
    """One tensor-parallel engine.

    Args:
        clock: of the simulation.
        deployment: memory and cache.
        tp: its GPUs.
        model: iteration times, of one logical rank.
        budget: tokens of an iteration, decodes included.
        policy: "fcfs" or "srpt".
    """

    def __init__(
        self, clock: Clock, deployment: Deployment, tp: int, model: LatencyModel, budget: int, policy: str
    ) -> None:
        super().__init__(clock, deployment.new_cache(tp))
        if budget < 1:
            raise ValueError(f"budget={budget} must be at least 1 token")
        self.model = model
        self.budget = budget
        self.waiting = Ordered(policy)
        self.partial = Ordered(policy)
        self.blocks = deployment.kv_blocks(tp)
        self.free = self.blocks
        self.pool = DecodePool(1, BLOCK_SIZE)
        self.capacity = prefill_rate(model)
        self._held: dict[int, int] = {}  # blocks of running prefills, in order of admission
        self._busy = False

    def queued_tokens(self) -> int:
        return self.waiting.tokens() + self.partial.tokens()

    def kv_in_use(self) -> int:
        return self.blocks - self.free

    def submit(self, request: Request) -> None:
        if self.pool.blocks(request.prompt_tokens + request.output_tokens) > self.blocks:
            request.to(Phase.REJECTED)
            return
        self.waiting.add(request)
        if not self._busy:
            self._start()

    def _grow(self) -> None:
        while (need := self.pool.growth(0)) > self.free:
            self._preempt_newest()
        self.free -= need

    def _preempt_newest(self) -> None:
        if self._held:  # running prefills were admitted after the decodes
            newest = next(reversed(self._held))
            request = next(r for r in self.partial if r.index == newest)
            self.partial.remove(request)
            self.free += self._held.pop(newest)
            request.preempt()
        else:
            request, held = self.pool.preempt(0)
            self.free += held
        self.waiting.add(request)

    def _admit(self) -> bool:
        """Move the waiting head to the running prefills, if memory permits."""
        request = self.waiting.head()
        needed = self.pool.blocks(request.total_tokens + 1)
        if needed > self.free or self.pool.count + len(self.partial) >= MAX_SEQS:
            return False
        self.waiting.pop()
        self.free -= needed
        self._held[request.index] = needed
        self.begin(request)
        self.partial.add(request)
        return True

    def _chunks(self) -> list[tuple[Request, int]]:
        left = self.budget - self.pool.count
        chunks: list[tuple[Request, int]] = []
        served: list[Request] = []
        open_door = True
        while left > 0:
            if open_door and self.waiting.first_is_before(self.partial):
                open_door = self._admit()
                continue
            if not len(self.partial):
                break
            request = self.partial.pop()
            length = min(request.remaining, left)
            chunks.append((request, length))
            served.append(request)
            left -= length
        for request in served:
            self.partial.add(request)
        return chunks

    def _start(self) -> None:
        self._grow()
        chunks = self._chunks() if len(self.waiting) or len(self.partial) else []
        decodes = self.pool.count
        if not chunks and not decodes:
            self._busy = False
            return
        self._busy = True
        prefill = sum(length for _, length in chunks)
        work = sum(chunk_work(length, request.computed_tokens) for request, length in chunks)
        estimator = self.model.given(self.pool.tokens, self.pool.context)
        seconds = estimator.seconds(prefill + decodes, prefill, work)
        self.clock.after(seconds, lambda: self._end(chunks))

    def _end(self, chunks: list[tuple[Request, int]]) -> None:
        now = self.clock.now
        self.iterations += 1
        for _, _, held in self.pool.tick(now) if self.pool.count else ():
            self.free += held
        for request, length in chunks:
            self.partial.remove(request)
            request.computed_tokens += length
            if request.remaining:
                self.partial.add(request)
                continue
            held = self._held.pop(request.index)
            self.prefilled(request, now)
            if request.phase is Phase.FINISHED:
                self.free += held
            else:
                self.pool.join(request, 0)
        self._start()


def build(
    clock: Clock, deployment: Deployment, *, policy: str = "fcfs", tp: int = 0, budget: int = 2048
) -> list[Instance]:
    """Tensor-parallel engines on all GPUs; more than one is data parallelism.

    Args:
        clock: of the simulation.
        deployment: its GPUs.
        policy: "fcfs" or "srpt".
        tp: GPUs of an engine; 0 takes all.
        budget: tokens of an iteration.
    """
    tp = tp or deployment.gpus
    if deployment.gpus % tp:
        raise ValueError(f"tp={tp} does not divide {deployment.gpus} GPUs")
    model = deployment.hardware.latency(1, tp)
    return [ChunkedInstance(clock, deployment, tp, model, budget, policy) for _ in range(deployment.gpus // tp)]
