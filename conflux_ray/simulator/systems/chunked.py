"""Chunked Prefill under tensor parallelism, as vLLM schedules it, and data parallelism made of it.

Every iteration holds one token of every decode, then chunks of the running prefills, then of the waiting head if the
KV of its whole prompt can be had, within a token budget. The phases share one tensor parallelism; their attention times
add. A decode that cannot grow preempts the newest running request, whose tokens are computed again. `srpt` orders
running and waiting prefills by remaining tokens: the `++` of the paper. `priority` is what vLLM itself can do with a
request's prompt length as its priority (`--scheduling-policy priority`): it orders those that wait, but a prefill that
has begun runs to its end before another gets tokens. An iteration is planned while the one before runs, as vLLM's
asynchronous scheduling does (`ahead.py`).
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from functools import partial
from math import inf

from conflux_ray.planning.latency_model import LatencyModel, chunk_work
from conflux_ray.simulator.ahead import Ahead, Issuer, Planned
from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.decodes import DecodePool
from conflux_ray.simulator.deployment import BLOCK_SIZE, Deployment, Instance, prefill_rate
from conflux_ray.simulator.request import Phase, Request

MAX_SEQS = 1024
"""Most running requests of an instance; not meant to bind."""


_KEYS: dict[str, Callable[[Request], float]] = {
    "fcfs": lambda request: request.arrival,
    "srpt": lambda request: request.remaining,
    "priority": lambda request: request.prompt_tokens,
}


class Ordered:
    """Waiting or running prefills in the order of a policy.

    Args:
        policy: "fcfs" by arrival, "srpt" by remaining tokens, "priority" by the prompt's.

    Raises:
        ValueError: there is no such policy.
    """

    def __init__(self, policy: str) -> None:
        if policy not in _KEYS:
            raise ValueError(f"policy={policy!r} is unknown; choose one of {', '.join(_KEYS)}")
        self.policy = policy
        self._key = _KEYS[policy]
        self._entries: list[tuple[float, float, int, Request]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        return (entry[-1] for entry in self._entries)

    def add(self, request: Request) -> None:
        insort(self._entries, (self._key(request), request.arrival, request.index, request))

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
        policy: "fcfs", "srpt" or "priority".
        ahead: when it plans.
        overrun: iterations with prefill take so many times what `model` says.
    """

    def __init__(
        self,
        clock: Clock,
        deployment: Deployment,
        tp: int,
        model: LatencyModel,
        budget: int,
        policy: str,
        ahead: Ahead,
        overrun: float = 1.0,
    ) -> None:
        super().__init__(clock, deployment.new_cache(tp))
        if budget < 1:
            raise ValueError(f"budget={budget} must be at least 1 token")
        self.model = model
        self.overrun = overrun
        self.budget = budget
        self.waiting = Ordered(policy)
        # Under `priority` at most one prefill is cut short at a time: the order among them does not matter.
        self.partial = Ordered(policy)
        self.blocks = deployment.kv_blocks(tp)
        self.free = self.blocks
        self.pool = DecodePool(1, BLOCK_SIZE)
        self.capacity = prefill_rate(model)
        self._held: dict[int, int] = {}  # blocks of running prefills, in order of admission
        self._issuer = Issuer(clock, self._plan, ahead)
        self._running = 0  # prompt tokens of the iterations in flight

    def queued_tokens(self) -> int:
        return self.waiting.tokens() + self.partial.tokens() + self._running

    def kv_in_use(self) -> int:
        return self.blocks - self.free

    def submit(self, request: Request) -> None:
        if self.pool.blocks(request.prompt_tokens + request.output_tokens) > self.blocks:
            request.to(Phase.REJECTED)
            return
        self.waiting.add(request)
        self._issuer.wake()

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

    def _admits_next(self) -> bool:
        """Whether the waiting head comes before the running prefills that have no tokens yet."""
        if self.waiting.policy == "priority":
            return bool(len(self.waiting)) and not len(self.partial)
        return self.waiting.first_is_before(self.partial)

    def _chunks(self) -> list[tuple[Request, int]]:
        left = self.budget - self.pool.count
        chunks: list[tuple[Request, int]] = []
        served: list[Request] = []
        open_door = True
        while left > 0:
            if open_door and self._admits_next():
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

    def _plan(self, start: float) -> Planned | None:
        """The iteration that starts at `start`, and all that it will have done."""
        self._grow()
        chunks = self._chunks() if len(self.waiting) or len(self.partial) else []
        decodes = self.pool.count
        if not chunks and not decodes:
            return None
        prefill, work = 0, 0.0
        for request, length in chunks:
            prefill += length
            work += chunk_work(length, request.computed_tokens)
        estimator = self.model.given(self.pool.tokens, self.pool.context)
        seconds = estimator.seconds(prefill + decodes, prefill, work) * (self.overrun if prefill else 1.0)
        end = start + seconds
        freed = sum(held for _, _, held in self.pool.tick(end)) if self.pool.count else 0
        for request, length in chunks:
            self.partial.remove(request)
            request.computed_tokens += length
            if request.remaining:
                self.partial.add(request)
                continue
            held = self._held.pop(request.index)
            self.prefilled(request, end)
            if request.phase is Phase.FINISHED:
                freed += held
            else:
                self.pool.join(request, 0)
        self._running += prefill
        return Planned(seconds, seconds, partial(self._ended, prefill, freed))

    def _ended(self, prefill: int, freed: int) -> None:
        self.iterations += 1
        self._running -= prefill
        self.free += freed


def build(
    clock: Clock,
    deployment: Deployment,
    *,
    policy: str = "fcfs",
    tp: int = 0,
    budget: int = 2048,
    run_ahead: int = 2,
    lead: float = inf,
    planning: float = 0.0,
    gap: float = 0.0,
    overrun: float = 1.0,
) -> list[Instance]:
    """Tensor-parallel engines on all GPUs; more than one is data parallelism.

    Args:
        clock: of the simulation.
        deployment: its GPUs.
        policy: "fcfs", "srpt" or "priority".
        tp: GPUs of an engine; 0 takes all.
        budget: tokens of an iteration.
        run_ahead: iterations issued at once; 1 is vLLM's `--no-async-scheduling`.
        lead: seconds before the expected end of an iteration at which the next is planned; vLLM plans at its start.
        planning: seconds that planning takes.
        gap: seconds between two iterations.
        overrun: iterations with prefill take so many times what the hardware's figures say.
    """
    tp = tp or deployment.gpus
    if deployment.gpus % tp:
        raise ValueError(f"tp={tp} does not divide {deployment.gpus} GPUs")
    model = deployment.hardware.latency(1, tp)
    ahead = Ahead(run_ahead, lead, planning=planning, gap=gap)
    return [
        ChunkedInstance(clock, deployment, tp, model, budget, policy, ahead, overrun)
        for _ in range(deployment.gpus // tp)
    ]
