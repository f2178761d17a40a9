"""MuxWise: spatial multiplexing. Prefill and decode share the SMs of the same tensor-parallel GPUs.

One whole-prompt prefill batch is in flight, layer by layer, beside decode iterations. While both are active, decode
gets the fewest SMs for which its iteration, slowed by the contention of the two, keeps TBT, and prefill the others;
alone, either has the whole GPU. Each side reads the weights for itself. Changing the split drains both: the decode
iteration has ended, and it waits for the prefill's present layer. Between events both sides progress at constant rates.

`fcfs` runs batches to their end. `srpt` orders the queue by remaining tokens and preempts, at an event, a batch that
has more of them left than the head of the queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from conflux_ray.planning.latency_model import chunk_work
from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.decodes import DecodePool
from conflux_ray.simulator.deployment import BLOCK_SIZE, Deployment, Instance, prefill_rate
from conflux_ray.simulator.hardware import sm_slowdown
from conflux_ray.simulator.request import Phase, Request
from conflux_ray.simulator.systems.chunked import MAX_SEQS, Ordered

SMS = (16, 32, 48, 64, 80, 96, 112)
"""SMs that decode may get beside prefill."""


@dataclass(slots=True)
class _Batch:
    """A prefill batch: its requests with their blocks, its time on the whole GPU, which share of that time does not
    depend on the SMs, and which share is done."""

    requests: list[tuple[Request, int]]
    tokens: int
    seconds: float
    fixed: float
    done: float = 0.0

    @property
    def remaining_tokens(self) -> float:
        return self.tokens * (1.0 - self.done)


class MuxWiseInstance(Instance):
    """One tensor-parallel engine with two phases side by side.

    Args:
        clock: of the simulation.
        deployment: memory and cache.
        tp: its GPUs.
        tbt: what decode iterations keep, seconds.
        batch: most tokens of a prefill batch; a longer prompt runs alone.
        policy: "fcfs" or "srpt".
    """

    def __init__(self, clock: Clock, deployment: Deployment, tp: int, tbt: float, batch: int, policy: str) -> None:
        super().__init__(clock, deployment.new_cache(tp))
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1 token")
        device = deployment.hardware.device
        self.model = deployment.hardware.latency(1, tp)
        self.tbt = tbt
        self.batch_tokens = batch
        self.policy = policy
        self.waiting = Ordered(policy)
        self.pool = DecodePool(1, BLOCK_SIZE)
        self.blocks = deployment.kv_blocks(tp)
        self.free = self.blocks
        self.capacity = prefill_rate(self.model)
        self.contention = device.multiplex.value
        self.sms: int | None = None  # of decode, in the present split
        self._decode_slowdown = {s: sm_slowdown(device.decode_sms, s) for s in SMS}
        self._prefill_slowdown = {s: sm_slowdown(device.prefill_sms, device.num_sms - s) for s in SMS}
        self._batch: _Batch | None = None
        self._paused: list[_Batch] = []  # preempted, the last one first to continue
        self._decode_seconds = 0.0  # of the present iteration on the whole GPU; 0 if none runs
        self._decode_fixed = 0.0  # share of it that does not depend on the SMs
        self._decode_done = 0.0
        self._joining: list[Request] = []  # prefilled during the present decode iteration
        self._waits_for_layer = 0.0  # share of the prefill at which the decode that drains may start; 0 if none waits
        self._updated = 0.0
        self._version = 0

    def queued_tokens(self) -> int:
        batches = [*self._paused, *([self._batch] if self._batch else [])]
        return self.waiting.tokens() + int(sum(batch.remaining_tokens for batch in batches))

    def kv_in_use(self) -> int:
        return self.blocks - self.free

    def submit(self, request: Request) -> None:
        if self.pool.blocks(request.prompt_tokens + request.output_tokens) > self.blocks:
            request.to(Phase.REJECTED)
            return
        self._advance()
        self.waiting.add(request)
        self._arrange()

    # Progress

    def _rates(self) -> tuple[float, float]:
        """Shares per second of the prefill batch and of the decode iteration."""
        prefill = 1 / self._batch.seconds if self._batch else 0.0
        decode = 1 / self._decode_seconds if self._decode_seconds else 0.0
        if decode and self.sms is not None:
            # The partition of a running iteration stays; contention needs both.
            factor = self._decode_slowdown[self.sms] * (self.contention if prefill else 1.0)
            decode /= self._decode_fixed + (1 - self._decode_fixed) * factor
            if self._batch:
                factor = self._prefill_slowdown[self.sms] * self.contention
                prefill /= self._batch.fixed + (1 - self._batch.fixed) * factor
        return prefill, decode

    def _advance(self) -> None:
        """Bring both progress variables to the present."""
        elapsed = self.clock.now - self._updated
        self._updated = self.clock.now
        if not elapsed:
            return
        prefill, decode = self._rates()
        if self._batch:
            self._batch.done += elapsed * prefill
        self._decode_done += elapsed * decode

    def _schedule(self) -> None:
        """Ask for the next event; one that was asked for before is void."""
        self._version += 1
        prefill, decode = self._rates()
        waits = []
        if self._batch:
            until = self._waits_for_layer or 1.0
            waits.append((until - self._batch.done) / prefill)
        if decode:
            waits.append((1.0 - self._decode_done) / decode)
        if waits:
            version = self._version
            self.clock.after(max(0.0, min(waits)), lambda: self._event(version))

    def _event(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        epsilon = 1e-9
        if self._decode_seconds and self._decode_done >= 1 - epsilon:
            self._end_decode()
        if self._batch and self._waits_for_layer and self._batch.done >= self._waits_for_layer - epsilon:
            self._waits_for_layer = 0.0
        if self._batch and self._batch.done >= 1 - epsilon:
            self._end_prefill()
        self._arrange()

    def _end_decode(self) -> None:
        self.iterations += 1
        self._decode_seconds = self._decode_done = 0.0
        for _, _, held in self.pool.tick(self.clock.now):
            self.free += held

    def _end_prefill(self) -> None:
        assert self._batch is not None
        self.iterations += 1
        for request, held in self._batch.requests:
            self.prefilled(request, self.clock.now)
            if request.phase is Phase.FINISHED:
                self.free += held
            else:
                self._joining.append(request)
        self._batch = None
        self._waits_for_layer = 0.0

    # Decisions

    def _arrange(self) -> None:
        self._choose_batch()
        self._start_decode()
        self._schedule()

    def _choose_batch(self) -> None:
        """Start, continue or preempt a prefill batch."""
        if self._decode_seconds and self.sms is None:
            return  # decode has the whole GPU until its iteration ends
        present = self._batch or (self._paused[-1] if self._paused else None)
        overtakes = False
        if len(self.waiting):
            shorter = present is None or (
                self.policy == "srpt" and self.waiting.head().remaining < present.remaining_tokens
            )
            overtakes = shorter and self._fits(self.waiting.head())
        if overtakes:
            if self._batch:
                self._paused.append(self._batch)
            self._batch = self._new_batch()
            self._waits_for_layer = 0.0
        elif self._batch is None and self._paused:
            self._batch = self._paused.pop()

    def _fits(self, request: Request) -> bool:
        running = self.pool.count + len(self._joining)
        return self.pool.blocks(request.total_tokens + 1) <= self.free and running < MAX_SEQS

    def _new_batch(self) -> _Batch:
        requests: list[tuple[Request, int]] = []
        tokens, work = 0, 0.0
        while len(self.waiting) and self._fits(self.waiting.head()):
            if requests and tokens + self.waiting.head().remaining > self.batch_tokens:
                break
            request = self.waiting.pop()
            held = self.pool.blocks(request.total_tokens + 1)
            self.begin(request)
            self.free -= held
            requests.append((request, held))
            tokens += request.remaining
            work += chunk_work(request.remaining, request.computed_tokens)
        seconds = self.model.given((0,), (0,)).seconds(tokens, tokens, work)
        return _Batch(requests, tokens, seconds, self._fixed(tokens, 0) / seconds)

    def _fixed(self, tokens: int, sampled: int) -> float:
        """Seconds of an iteration that do not depend on its SMs: all-reduces and the host."""
        return self.model.num_layers * self.model.all_reduce(tokens) + self.model.host(sampled)

    def _start_decode(self) -> None:
        if self._decode_seconds or self._waits_for_layer:
            return
        for request in self._joining:
            self.pool.join(request, 0)
        self._joining.clear()
        while self.pool.count and (need := self.pool.growth(0)) > self.free:
            request, held = self.pool.preempt(0)
            self.free += held
            self.waiting.add(request)
        if not self.pool.count:
            return
        seconds = self.model.given(self.pool.tokens, self.pool.context).seconds(self.pool.count, 0, 0.0)
        fixed = self._fixed(self.pool.count, self.pool.count)
        sms = self._split(seconds, fixed) if self._batch else None
        if self._batch and sms != self.sms and self._batch.done > 0:
            layers = self._batch.done * self.model.num_layers
            boundary = math.ceil(layers - 1e-6)
            if boundary - layers > 1e-6:
                self._waits_for_layer = boundary / self.model.num_layers
                return
        self.free -= need
        self.sms = sms
        self._decode_seconds, self._decode_fixed, self._decode_done = seconds, fixed / seconds, 0.0

    def _split(self, seconds: float, fixed: float) -> int:
        """The fewest SMs on which a decode iteration keeps TBT; the most there are if none does."""
        for sms in SMS:
            if fixed + (seconds - fixed) * self._decode_slowdown[sms] * self.contention <= self.tbt:
                return sms
        return SMS[-1]


def build(
    clock: Clock, deployment: Deployment, *, policy: str = "fcfs", batch: int = 8192, tbt: float = 0.1
) -> list[Instance]:
    """One engine on all GPUs.

    Args:
        clock: of the simulation.
        deployment: its GPUs.
        policy: "fcfs" or "srpt".
        batch: most tokens of a prefill batch.
        tbt: what the SM split keeps, seconds.
    """
    return [MuxWiseInstance(clock, deployment, deployment.gpus, tbt, batch, policy)]
