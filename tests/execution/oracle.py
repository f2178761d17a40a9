"""The oracle: whatever the schedule, every token is the reference model's (design, section 9).

A `Schedule` is everything random about a run, from one seed: requests, their arrival and abortion, and a policy that
cuts chunks and shards at random (empty ones included) and places decodes anywhere they fit. `run_schedule` runs it on
real workers with poisoned free blocks, then checks every request against Hugging Face transformers in float32: each
logits row against the reference's on the same tokens, and each token against the reference's greedy choice unless the
reference's two best are nearer than `NEAR_TIE`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from conflux_ray.execution.engine import Counters, Engine
from conflux_ray.execution.group import LocalWorkerGroup
from conflux_ray.execution.loop import IterationLoop
from conflux_ray.execution.plan import IterationPlan
from conflux_ray.execution.request import Request
from conflux_ray.kv import KVGeometry
from conflux_ray.models.reference import Reference
from conflux_ray.planning.interface import Decision, DecodeState, KVState, PendingPrefill, PrefillChunk
from conflux_ray.planning.plain import ensure_token
from conflux_ray.wire import Sampling, Slo

LOGITS_TOLERANCE = 1e-4
ROUNDING_FACTOR = 3  # of the reference's own float32 rounding, for prompts where that exceeds the tolerance
NEAR_TIE = 1e-3


class OracleMismatchError(AssertionError):
    """An output differs from the reference model's."""


class RandomPolicy:
    """Any decision that the policy interface allows: random order, chunks, shards and ranks."""

    def __init__(self, seed: int, max_chunk: int) -> None:
        self._random = random.Random(seed)
        self._splits = random.Random(f"{seed} splits")
        self._max_chunk = max_chunk

    def schedule(self, pending: Sequence[PendingPrefill], decodes: DecodeState, kv: KVState, now: float) -> Decision:
        rng, n = self._random, decodes.num_ranks
        order = list(pending)
        if rng.random() < 0.5:
            rng.shuffle(order)
        chunks, placements = [], {}
        for request in order[: rng.randint(1, 4)]:
            length = min(request.remaining, rng.randint(1, self._max_chunk))
            completes = length == request.remaining
            rank = None
            if not kv.can_start(request):
                continue
            if completes and request.needs_placement:
                ranks = [r for r in range(n) if fits_after_start(kv, request, r)]
                if not ranks:
                    continue
                rank = rng.choice(ranks)
            kv.start(request)
            shard = random_split(rng, length, n)
            if rank is not None:
                kv.place(request, rank)
                placements[request.request_id] = rank
                shard = ensure_token(shard, rank)
            chunks.append(PrefillChunk(request.request_id, request.computed_tokens, length, tuple(shard), completes))
        decode_sms = self._splits.choice((None, 32, 64))  # of GPUs; other devices have none to split
        return Decision(tuple(chunks), placements, overlap=rng.random() < 0.7, decode_sms=decode_sms)

    def observe(self, decision: Decision, measured: float) -> None:
        pass


def fits_after_start(kv: KVState, request: PendingPrefill, rank: int) -> bool:
    return kv.free[rank] - request.prefill_blocks >= request.decode_blocks


def random_split(rng: random.Random, length: int, n: int) -> list[int]:
    """Anything from even to all on one rank."""
    if rng.random() < 0.3:
        shard = [0] * n
        shard[rng.randrange(n)] = length
        return shard
    cuts = sorted(rng.randint(0, length) for _ in range(n - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, length], strict=True)]


@dataclass(frozen=True)
class Schedule:
    """One random run, reproducible from its seed."""

    seed: int
    num_requests: int = 10
    max_prompt: int = 66
    max_output: int = 60
    max_chunk: int = 48
    abort_share: float = 0.2


@dataclass
class Outcome:
    counters: Counters
    max_error: float  # largest logits difference
    completed: int
    near_ties: int


Check = Callable[[Schedule, Request, list[bytes], Reference], tuple[float, int]]
"""Compares a request's rows of logits and tokens; returns the largest error and the number of near-ties."""


def run_schedule(
    schedule: Schedule,
    group: LocalWorkerGroup,
    reference: Reference,
    num_ranks: int,
    tensor_parallel: int,
    num_blocks: int,
    block_size: int,
    max_model_len: int,
    check: Check | None = None,
) -> Outcome:
    """Run a schedule to its end and check every request, by `check_request` unless another check is given.

    Raises:
        OracleMismatchError: with the seed of the schedule.
    """
    rng = random.Random(schedule.seed)
    engine = Engine(
        KVGeometry(block_size, num_ranks, num_blocks),
        num_ranks,
        tensor_parallel,
        RandomPolicy(rng.getrandbits(32), schedule.max_chunk),
        max_model_len,
        seed=schedule.seed,
        poison=True,
    )
    plans: list[IterationPlan] = []
    loop = IterationLoop(engine, group, timeout=60.0, watch=plans.append)
    waiting = [make_request(schedule, rng, i, group.shape.vocab_size) for i in range(schedule.num_requests)]
    requests: list[Request] = []
    logits: dict[str, list[bytes]] = {}
    aborted: set[str] = set()
    steps = 0
    while waiting or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                requests.append(waiting.pop())
                engine.add(requests[-1])
        if engine.requests and rng.random() < schedule.abort_share / 4:
            victim = rng.choice(sorted(engine.requests))
            engine.abort(victim)
            aborted.add(victim)
        for output in loop.step():
            assert output.logits is not None
            logits.setdefault(output.request.request_id, []).append(output.logits)
        steps += 1
        if steps > 5000:
            raise OracleMismatchError(f"seed {schedule.seed}: no end after {steps} steps; {engine.counters}")
        engine.kv.check()
    assert engine.kv.is_idle
    max_error, near_ties = 0.0, 0
    for request in requests:
        if request.request_id in aborted:
            check_prefix(request)
        else:
            assert len(request.output) == request.max_output(max_model_len)
        error, ties = (check or check_request)(schedule, request, logits.get(request.request_id, []), reference)
        max_error, near_ties = max(max_error, error), near_ties + ties
    return Outcome(engine.counters, max_error, len(requests) - len(aborted), near_ties)


def make_request(schedule: Schedule, rng: random.Random, index: int, vocab_size: int) -> Request:
    length = rng.choice([1, rng.randint(1, 20), rng.randint(1, schedule.max_prompt), schedule.max_prompt])
    prompt = [rng.randrange(vocab_size) for _ in range(length)]
    max_tokens = rng.choice([1, rng.randint(1, schedule.max_output)])
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(f"s{schedule.seed}-r{index}", 0, prompt, sampling, Slo(1.0, 0.1), arrival=float(index))


def check_prefix(request: Request) -> None:
    assert len(request.output) <= request.sampling.max_tokens


def check_request(schedule: Schedule, request: Request, rows: list[bytes], reference: Reference) -> tuple[float, int]:
    """Compare a request's rows and tokens; returns the largest error and the number of near-ties."""
    if not request.output:
        return 0.0, 0
    want = reference.logits(request.prompt + request.output[:-1]).numpy()[len(request.prompt) - 1 :]
    got = np.stack([np.frombuffer(row, "<f4") for row in rows])
    error = float(np.abs(got - want).max())
    where = f"seed {schedule.seed}, request {request.request_id} ({len(request.prompt)} prompt tokens)"
    tolerance = LOGITS_TOLERANCE
    if not error <= tolerance:
        # Where the reference itself is that uncertain in float32, being as near to it is all that can be asked.
        tolerance = max(tolerance, ROUNDING_FACTOR * reference.rounding(request.prompt + request.output[:-1]))
    if not error <= tolerance:
        first = int(np.argmax(np.abs(got - want).max(axis=1) > tolerance))
        raise OracleMismatchError(f"{where}: logits of output {first} differ by up to {error:.3g}")
    top = np.sort(want, axis=1)
    near = top[:, -1] - top[:, -2] < max(NEAR_TIE, 2 * tolerance)
    wrong = (want.argmax(axis=1) != np.array(request.output)) & ~near
    if wrong.any():
        raise OracleMismatchError(f"{where}: output {int(wrong.argmax())} is not the reference's greedy token")
    return error, int(near.sum())
