"""DistServe: static isolation. Some GPUs prefill, the others decode.

Prefill engines take whole prompts, batched in the queue's order up to a token limit; the first output token comes from
them. A request's KV stays on its prefill engine until a decode engine has room for it and the link is free; it then
moves at the links' bandwidth, before its second token. A decode that cannot grow is preempted, the newest first, and
goes back to prefill. `srpt` orders the prefill queue only.
"""

from __future__ import annotations

from collections import deque
from functools import partial

from conflux_ray.planning.latency_model import LatencyModel, chunk_work
from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.decodes import DecodePool
from conflux_ray.simulator.deployment import BLOCK_SIZE, Deployment, Instance, prefill_rate
from conflux_ray.simulator.request import Phase, Request
from conflux_ray.simulator.systems.chunked import MAX_SEQS, Ordered


class _Prefiller:
    """A prefill engine: its memory and what it runs."""

    def __init__(self, blocks: int) -> None:
        self.free = blocks
        self.busy = False


class _Decoder:
    """A decode engine: its residents and its memory."""

    def __init__(self, blocks: int) -> None:
        self.free = blocks
        self.pool = DecodePool(1, BLOCK_SIZE)
        self.coming = 0  # requests whose KV is on its way
        self.busy = False


class DistServeInstance(Instance):
    """Prefill and decode engines with one queue.

    Args:
        clock: of the simulation.
        deployment: memory and cache.
        prefill: (engines, their TP).
        decode: (engines, their TP).
        batch: most tokens of a prefill batch; a longer prompt runs alone.
        policy: "fcfs" or "srpt".
    """

    def __init__(
        self,
        clock: Clock,
        deployment: Deployment,
        prefill: tuple[int, int],
        decode: tuple[int, int],
        batch: int,
        policy: str,
    ) -> None:
        super().__init__(clock, deployment.new_cache(prefill[1], prefill[0]))
        if batch < 1:
            raise ValueError(f"batch={batch} must be at least 1 token")
        hardware = deployment.hardware
        self.batch = batch
        self.waiting = Ordered(policy)
        self.prefill_model: LatencyModel = hardware.latency(1, prefill[1])
        self.decode_model: LatencyModel = hardware.latency(1, decode[1])
        self.prefill_blocks = deployment.kv_blocks(prefill[1])
        self.decode_blocks = int(hardware.kv_tokens(decode[1])) // BLOCK_SIZE
        self.prefillers = [_Prefiller(self.prefill_blocks) for _ in range(prefill[0])]
        self.decoders = [_Decoder(self.decode_blocks) for _ in range(decode[0])]
        # As many links as the narrower side has GPUs.
        self.transfer_rate = hardware.device.copy_bandwidth.value * min(prefill[1], decode[1])
        self.token_bytes = hardware.shape.kv_bytes
        self.capacity = prefill_rate(self.prefill_model) * prefill[0]
        self._prefilling = 0  # tokens
        self._handover: deque[tuple[Request, _Prefiller, int]] = deque()  # with the blocks held by the prefill engine
        self._link_busy = False

    def queued_tokens(self) -> int:
        return self.waiting.tokens() + self._prefilling

    def kv_in_use(self) -> int:
        free = sum(p.free for p in self.prefillers) + sum(d.free for d in self.decoders)
        return self.prefill_blocks * len(self.prefillers) + self.decode_blocks * len(self.decoders) - free

    def submit(self, request: Request) -> None:
        blocks = -(-(request.prompt_tokens + request.output_tokens) // BLOCK_SIZE)
        if blocks > min(self.prefill_blocks, self.decode_blocks):
            request.to(Phase.REJECTED)
            return
        self.waiting.add(request)
        self._prefill()

    # Prefill

    def _prefill(self) -> None:
        for engine in self.prefillers:
            if not engine.busy and len(self.waiting):
                self._start_batch(engine)

    def _start_batch(self, engine: _Prefiller) -> None:
        batch: list[tuple[Request, int]] = []
        tokens, work = 0, 0.0
        while len(self.waiting):
            request = self.waiting.head()
            needed = -(-(request.total_tokens + 1) // BLOCK_SIZE)
            if needed > engine.free or (batch and tokens + request.remaining > self.batch):
                break
            self.waiting.pop()
            self.begin(request)
            engine.free -= needed
            batch.append((request, needed))
            tokens += request.remaining
            work += chunk_work(request.remaining, request.computed_tokens)
        if not batch:
            return
        engine.busy = True
        self._prefilling += tokens
        seconds = self.prefill_model.given((0,), (0,)).seconds(tokens, tokens, work)
        self.clock.after(seconds, partial(self._end_batch, engine, batch, tokens))

    def _end_batch(self, engine: _Prefiller, batch: list[tuple[Request, int]], tokens: int) -> None:
        self.iterations += 1
        self._prefilling -= tokens
        engine.busy = False
        for request, held in batch:
            self.prefilled(request, self.clock.now)
            if request.phase is Phase.FINISHED:
                engine.free += held
            else:
                request.to(Phase.TRANSFERRING)
                self._handover.append((request, engine, held))
        self._transfer()
        self._prefill()

    # Transfer

    def _transfer(self) -> None:
        """Start the next transfer if the link is free and a decode engine has room."""
        if self._link_busy or not self._handover:
            return
        request, source, held = self._handover[0]
        needed = -(-request.total_tokens // BLOCK_SIZE)
        target = max(self.decoders, key=lambda d: d.free)
        if needed > target.free or target.pool.count + target.coming >= MAX_SEQS:
            return
        self._handover.popleft()
        target.free -= needed
        target.coming += 1
        self._link_busy = True
        moved = request.total_tokens - 1  # the first output token has no KV yet
        request.transferred_tokens += moved
        seconds = moved * self.token_bytes / self.transfer_rate
        self.clock.after(seconds, partial(self._end_transfer, request, source, held, target))

    def _end_transfer(self, request: Request, source: _Prefiller, held: int, target: _Decoder) -> None:
        self._link_busy = False
        source.free += held
        target.coming -= 1
        target.pool.join(request, 0)
        if not target.busy:
            self._decode(target)
        self._transfer()
        self._prefill()

    # Decode

    def _decode(self, engine: _Decoder) -> None:
        pool = engine.pool
        while pool.count and (need := pool.growth(0)) > engine.free:
            request, held = pool.preempt(0)
            engine.free += held
            self.waiting.add(request)
        if not pool.count:
            engine.busy = False
            return
        engine.free -= need
        engine.busy = True
        seconds = self.decode_model.given(pool.tokens, pool.context).seconds(pool.count, 0, 0.0)
        self.clock.after(seconds, partial(self._end_decode, engine))

    def _end_decode(self, engine: _Decoder) -> None:
        self.iterations += 1
        for _, _, held in engine.pool.tick(self.clock.now):
            engine.free += held
        self._decode(engine)
        self._transfer()
        self._prefill()


def build(
    clock: Clock,
    deployment: Deployment,
    *,
    policy: str = "fcfs",
    split: str = "",
    batch: int = 8192,
) -> list[Instance]:
    """Prefill and decode engines.

    Args:
        clock: of the simulation.
        deployment: its GPUs.
        policy: "fcfs" or "srpt".
        split: "AxB:CxD" is A prefill engines of TP B and C decode engines of TP D; "" is one engine each, 1:1.
        batch: most tokens of a prefill batch.
    """
    if not split:
        half = max(deployment.gpus // 2, 1)
        split = f"1x{half}:1x{half}"
    try:
        sides = [tuple(int(x) for x in side.split("x")) for side in split.split(":")]
        (a, b), (c, d) = sides
    except ValueError:
        raise ValueError(f"split={split!r} must look like 1x2:1x2 (engines x TP of prefill : of decode)") from None
    if min(a, b, c, d) < 1 or a * b + c * d != deployment.gpus:
        raise ValueError(f"split={split!r} needs {a * b + c * d} GPUs; the deployment has {deployment.gpus}")
    return [DistServeInstance(clock, deployment, (a, b), (c, d), batch, policy)]
