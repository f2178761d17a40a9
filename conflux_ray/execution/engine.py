"""The instance's engine: requests in, one `IterationPlan` at a time out, worker results back in, tokens out.

Plain Python: it owns the requests and the KV bookkeeping, asks the policy what to run, and never sees a tensor. It
runs ahead: `plan` for iteration k + 1 may be called before the results of k are applied. What k will have done is then
known except for the values of its tokens, so a plan never depends on them: decode input tokens live on the ranks, and
a request that turns out to have ended costs one discarded token.
"""

from __future__ import annotations

import random
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from conflux_ray.execution.plan import (
    Chunk,
    Decode,
    Growth,
    IterationPlan,
    NewPrefill,
    NewResident,
    Transfer,
    WorkerResult,
    order_shards,
)
from conflux_ray.execution.request import Request, RequestState
from conflux_ray.kv import KVGeometry, KVManager
from conflux_ray.planning.interface import Decision, DecodeState, KVState, PendingPrefill, Policy
from conflux_ray.wire import FinishReason, Logprobs


@dataclass(slots=True)
class TokenOutput:
    """One new token of one request."""

    request: Request
    token: int
    index: int  # position in the request's output
    finished: bool
    logprobs: Logprobs | None = None
    logits: bytes | None = None  # float32 row, in tests that ask the workers for it


@dataclass(slots=True)
class Counters:
    """What happened, so that tests and metrics can tell that what was meant to happen did."""

    iterations: int = 0
    mixed_iterations: int = 0  # prefill and decode shared a forward pass
    uneven_chunks: int = 0
    empty_shards: int = 0
    several_prefills: int = 0  # iterations with more than one chunk
    transitions: int = 0
    cross_rank_transitions: int = 0  # some other rank sent KV to the target (always, with more than one rank)
    preemptions: int = 0
    pauses: int = 0
    discarded_tokens: int = 0
    aborted: int = 0
    finished: int = 0
    tbt_violations: int = 0


class Timing(NamedTuple):
    """One iteration as the policy predicted it and as the slowest worker measured it."""

    iteration: int
    prefill_tokens: int
    predicted: float  # seconds; 0 without a latency model
    measured: float  # seconds


@dataclass(slots=True)
class _InFlight:
    decision: Decision
    issued: float
    requests: list[Request] = field(default_factory=list)


class EngineError(RuntimeError):
    """The engine cannot go on; the instance must be restarted."""


class Engine:
    """Requests, KV and policy of one instance.

    Args:
        geometry: of every rank's KV pool.
        num_ranks: N, logical ranks.
        tensor_parallel: workers of one logical rank (base TP).
        policy: decides what each iteration runs.
        max_model_len: most tokens of prompt and output together.
        seed: of the generator that gives seeds to requests that bring none.
        poison: tell the workers to overwrite freed blocks (tests).

    Raises:
        ValueError: the pool cannot hold a request of `max_model_len` through its transition.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        num_ranks: int,
        tensor_parallel: int,
        policy: Policy,
        max_model_len: int,
        seed: int | None = None,
        poison: bool = False,
    ) -> None:
        geometry.check_pool(max_model_len)
        self.num_ranks = num_ranks
        self.tensor_parallel = tensor_parallel
        self.num_workers = num_ranks * tensor_parallel
        self.policy = policy
        self.max_model_len = max_model_len
        self.kv = KVManager(geometry, num_ranks, self.num_workers)
        self.requests: dict[str, Request] = {}
        self.counters = Counters()
        self.last_decision = Decision()
        self.timings: deque[Timing] = deque(maxlen=1024)  # of the latest iterations
        self._poison = poison
        self._random = random.Random(seed)
        self._by_alloc: dict[int, Request] = {}
        self._pending: dict[str, Request] = {}  # WAITING and PREFILLING, in order of arrival here
        self._residents: tuple[dict[int, Request], ...] = tuple({} for _ in range(num_ranks))  # oldest first
        self._dropped: list[int] = []
        everything = [(rank, block) for rank in range(num_ranks) for block in range(geometry.num_blocks)]
        self._to_poison: list[tuple[int, int]] = everything if poison else []
        self._in_flight: dict[int, _InFlight] = {}
        self._unacknowledged: set[int] = set()  # transfers
        self._acks: dict[int, int] = {}
        self._next_alloc = 0
        self._iteration = 0

    # Requests

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use, or it leaves no room for an output token.
        """
        if request.request_id in self.requests:
            raise ValueError(f"request_id {request.request_id} is in use")
        if request.max_output(self.max_model_len) <= len(request.output):
            raise ValueError(
                f"{request.request_id}: {len(request.prompt)} prompt and {len(request.output)} output tokens leave no "
                f"room for another one within max_model_len={self.max_model_len} and "
                f"max_tokens={request.sampling.max_tokens}"
            )
        if request.sampling.seed is None:
            request.seed = self._random.getrandbits(63)
        else:
            request.seed = request.sampling.seed
        self.requests[request.request_id] = request
        self._pending[request.request_id] = request

    def abort(self, request_id: str) -> bool:
        """Drop a request, wherever it stands; False if it is unknown or has ended. No output follows."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        request.finish_reason = FinishReason.ABORT
        self.counters.aborted += 1
        self._end(request)
        return True

    @property
    def has_work(self) -> bool:
        """Whether a plan can be due, or results are outstanding."""
        return bool(self.requests or self._in_flight or self.kv.num_draining)

    @property
    def num_in_flight(self) -> int:
        """Iterations issued and not applied."""
        return len(self._in_flight)

    @property
    def predicted_in_flight(self) -> float | None:
        """Predicted seconds of the iterations issued and not applied; None where the policy predicts nothing."""
        predicted = [flight.decision.predicted for flight in self._in_flight.values()]
        return sum(predicted) if all(predicted) else None

    @property
    def predicted_oldest(self) -> float | None:
        """Predicted seconds of the oldest of them; None if there is none, or no prediction."""
        for flight in self._in_flight.values():
            return flight.decision.predicted or None
        return None

    @property
    def residents(self) -> DecodeState:
        """The resident decodes, by their sums."""
        ranks = [list(requests.values()) for requests in self._residents]
        return DecodeState.summed(
            [len(requests) for requests in ranks],
            [sum(r.scheduled_tokens for r in requests) for requests in ranks],
            min((r.slo.tbt_s for requests in ranks for r in requests), default=float("inf")),
        )

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks."""
        return sum(r.state is RequestState.WAITING for r in self._pending.values())

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.requests) - self.num_waiting

    @property
    def pending(self) -> Iterable[Request]:
        """Requests with prompt tokens left to schedule."""
        return self._pending.values()

    def described(self) -> list[PendingPrefill]:
        """`pending` as the policy sees it."""
        return [self.describe(r) for r in self._pending.values()]

    # Planning an iteration

    def plan(self, now: float) -> IterationPlan | None:
        """Plan and issue the next iteration; None if there is nothing to run now.

        Args:
            now: seconds on the instance's clock.
        """
        if self._poison:
            self._to_poison += self.kv.drain_freed()
        decodes, growths, resident, stepped = self._step_decodes()
        decision = self.policy.schedule(
            self.described(),
            resident,
            KVState(*self.kv.snapshot()),
            now,
        )
        if not any(decodes) and not decision.chunks:
            if not self._unacknowledged or self._in_flight:
                return None
            # Blocks drain until their transfers are acknowledged, and acknowledgements ride on results.
            return self._issue(
                IterationPlan(self._iteration, decodes, drop=self._take_dropped(), wait_transfers=True),
                decision,
                now,
                [],
            )
        chunks, new_prefills, new_residents, transfers = self._admit(decision, now, stepped)
        plan = IterationPlan(
            iteration=self._iteration,
            decodes=decodes,
            chunks=chunks,
            new_prefills=new_prefills,
            new_residents=new_residents,
            growths=growths,
            transfers=transfers,
            drop=self._take_dropped(),
            poison=self._take_poison(),
            overlap=decision.overlap,
            decode_sms=decision.decode_sms,
        )
        self._count(plan, decision)
        return self._issue(plan, decision, now, stepped)

    def _issue(self, plan: IterationPlan, decision: Decision, now: float, requests: list[Request]) -> IterationPlan:
        self.kv.issue(self._iteration)
        self._in_flight[self._iteration] = _InFlight(decision, now, requests)
        self._iteration += 1
        self.last_decision = decision
        return plan

    def describe(self, request: Request) -> PendingPrefill:
        """What the policy sees of a request; kept until the request has moved on."""
        if request.described is not None:
            return request.described
        needs_placement = self._needs_placement(request)
        geometry = self.kv.geometry
        waiting = request.state is RequestState.WAITING
        request.described = PendingPrefill(
            request_id=request.request_id,
            arrival=request.arrival,
            deadline=request.deadline,
            total_tokens=request.prefill_tokens,
            computed_tokens=request.computed_tokens,
            priority=request.priority,
            tbt=request.slo.tbt_s,
            prefill_blocks=geometry.prefill_blocks(request.prefill_tokens) if waiting else 0,
            decode_blocks=geometry.decode_blocks(request.prefill_tokens + 1) if needs_placement else 0,
            needs_placement=needs_placement,
        )
        return request.described

    def _needs_placement(self, request: Request) -> bool:
        return request.max_output(self.max_model_len) - len(request.output) > 1

    def _step_decodes(
        self,
    ) -> tuple[tuple[tuple[Decode, ...], ...], tuple[Growth, ...], DecodeState, list[Request]]:
        """Advance every resident decode that has room to grow, oldest first."""
        decodes: list[tuple[Decode, ...]] = []
        growths: list[Growth] = []
        context = [0] * self.num_ranks
        tightest_tbt = float("inf")
        stepped: list[Request] = []
        for rank, requests in enumerate(self._residents):
            steps = []
            for request in list(requests.values()):
                if request.state is not RequestState.DECODING:
                    continue
                if request.scheduled_output >= request.max_output(self.max_model_len):
                    continue
                blocks = self.kv.grow(request.alloc_id, request.scheduled_tokens)
                if blocks is None and self._make_room(rank, request):
                    blocks = self.kv.grow(request.alloc_id, request.scheduled_tokens)
                if blocks is None:
                    continue
                if blocks:
                    growths.append(Growth(request.alloc_id, blocks))
                steps.append(Decode(request.alloc_id, request.scheduled_tokens - 1))
                context[rank] += request.scheduled_tokens
                tightest_tbt = min(tightest_tbt, request.slo.tbt_s)
                request.scheduled_output += 1
                stepped.append(request)
            decodes.append(tuple(steps))
        state = DecodeState.summed([len(steps) for steps in decodes], context, tightest_tbt)
        return tuple(decodes), tuple(growths), state, stepped

    def _make_room(self, rank: int, growing: Request) -> bool:
        """A decode on `rank` cannot grow: preempt the newest one, unless blocks are about to return anyway.

        Returns:
            Whether blocks of another request may have become free at once.
        """
        if self._unacknowledged or self.kv.draining_blocks(rank):
            return False
        candidates = self._residents[rank].values()
        ending = any(r.scheduled_output >= r.max_output(self.max_model_len) for r in candidates)
        if ending or any(r.state is RequestState.PAUSED for r in candidates):
            return False
        newest = next(reversed(self._residents[rank].values()))
        if newest.in_flight:
            newest.to(RequestState.PAUSED)
            self.counters.pauses += 1
            return False
        self._preempt(newest)
        return newest is not growing

    def _preempt(self, request: Request) -> None:
        self._forget_allocation(request)
        request.preempt()
        self.counters.preemptions += 1
        self._pending[request.request_id] = request

    def _admit(
        self, decision: Decision, now: float, stepped: list[Request]
    ) -> tuple[tuple[Chunk, ...], tuple[NewPrefill, ...], tuple[NewResident, ...], tuple[Transfer, ...]]:
        """Turn the policy's decision into allocations, chunks and transitions."""
        chunks: list[Chunk] = []
        new_prefills: list[NewPrefill] = []
        new_residents: list[NewResident] = []
        transfers: list[Transfer] = []
        for scheduled in decision.chunks:
            request = self._pending[scheduled.request_id]
            needs_placement = self._needs_placement(request)
            if request.state is RequestState.WAITING:
                request.alloc_id = self._next_alloc
                self._next_alloc += 1
                tables = self.kv.start_prefill(request.alloc_id, request.prefill_tokens, needs_placement)
                new_prefills.append(NewPrefill(request.alloc_id, tables))
                self._by_alloc[request.alloc_id] = request
                request.to(RequestState.PREFILLING)
                if request.first_scheduled is None:
                    request.first_scheduled = now
            target = decision.placements[request.request_id] if scheduled.completes and needs_placement else None
            shards = order_shards(scheduled.start, scheduled.shard, target)
            tokens = request.token_ids
            end = scheduled.start + scheduled.length
            chunks.append(
                Chunk(request.alloc_id, pack_tokens(tokens[scheduled.start : end]), shards, scheduled.completes)
            )
            request.computed_tokens = end
            request.described = None
            if not scheduled.completes:
                continue
            table: list[int] = []
            if target is not None:
                table = self.kv.place(request.alloc_id, target)
                transfer_id = self.kv.begin_transfer(request.alloc_id, 0, request.prefill_tokens, final=True)
                transfers.append(Transfer(transfer_id, request.alloc_id, 0, request.prefill_tokens, target))
                self._unacknowledged.add(transfer_id)
                self._residents[target][request.alloc_id] = request
            request.rank = shards[-1].rank
            new_residents.append(
                NewResident(
                    request.alloc_id,
                    request.rank,
                    table,
                    request.sampling,
                    request.seed,
                    pack_tokens(tokens),
                    len(request.prompt),
                )
            )
            request.to(RequestState.DECODING)
            request.scheduled_output += 1
            stepped.append(request)
            del self._pending[request.request_id]
        return tuple(chunks), tuple(new_prefills), tuple(new_residents), tuple(transfers)

    def _take_dropped(self) -> tuple[int, ...]:
        dropped, self._dropped = tuple(self._dropped), []
        return dropped

    def _take_poison(self) -> tuple[tuple[int, int], ...]:
        poison, self._to_poison = tuple(self._to_poison), []
        return poison

    def _count(self, plan: IterationPlan, decision: Decision) -> None:
        c = self.counters
        c.iterations += 1
        c.mixed_iterations += any(plan.decodes) and bool(plan.chunks)
        c.several_prefills += len(plan.chunks) > 1
        for chunk in decision.chunks:
            c.uneven_chunks += max(chunk.shard) - min(chunk.shard) > 1
            c.empty_shards += sum(n == 0 for n in chunk.shard)
        c.transitions += len(plan.transfers)
        c.cross_rank_transitions += len(plan.transfers) if self.num_ranks > 1 else 0
        c.tbt_violations += decision.tbt_violation

    # Applying results

    def apply(self, results: Sequence[WorkerResult], now: float) -> list[TokenOutput]:
        """Apply the results of the oldest iteration in flight, one of each worker.

        Returns:
            The new tokens, in rank order; the last of a request that ended says so.

        Raises:
            EngineError: the results are not those of the oldest iteration in flight.
        """
        iteration = next(iter(self._in_flight), None)
        if iteration is None or {r.iteration for r in results} != {iteration} or len(results) != self.num_workers:
            raise EngineError(f"expected {self.num_workers} results of iteration {iteration}, got {results}")
        flight = self._in_flight.pop(iteration)
        for result in results:
            for transfer_id in result.acknowledged:
                self._acknowledge(transfer_id, result.worker)
        self.kv.retire(iteration)
        outputs: list[TokenOutput] = []
        for result in results:
            for i, (alloc_id, token) in enumerate(zip(result.alloc_ids, result.tokens, strict=True)):
                request = self._by_alloc.get(alloc_id)
                if request is None:
                    self.counters.discarded_tokens += 1
                    continue
                index = len(request.output)
                finished = request.accept(token, self.max_model_len)
                logprobs = result.logprobs[i] if result.logprobs else None
                logits = result.logits[i] if result.logits else None
                outputs.append(TokenOutput(request, token, index, finished, logprobs, logits))
                if finished:
                    self.counters.finished += 1
                    self._end(request)
                elif request.state is RequestState.PAUSED and request.in_flight == 0:
                    self._preempt(request)
        elapsed = max(r.elapsed for r in results)
        self.policy.observe(flight.decision, elapsed)
        self.timings.append(
            Timing(iteration, sum(c.length for c in flight.decision.chunks), flight.decision.predicted, elapsed)
        )
        return outputs

    def _acknowledge(self, transfer_id: int, worker: int) -> None:
        self.kv.acknowledge(transfer_id, worker)
        self._acks[transfer_id] = self._acks.get(transfer_id, 0) + 1
        if self._acks[transfer_id] == self.num_workers:
            del self._acks[transfer_id]
            self._unacknowledged.discard(transfer_id)

    def _end(self, request: Request) -> None:
        """Forget a request; its blocks return when nothing in flight touches them."""
        self._pending.pop(request.request_id, None)
        if request.alloc_id >= 0:
            self._forget_allocation(request)
        request.to(RequestState.FINISHED)
        del self.requests[request.request_id]

    def _forget_allocation(self, request: Request) -> None:
        self.kv.release(request.alloc_id)
        del self._by_alloc[request.alloc_id]
        self._dropped.append(request.alloc_id)
        if request.rank >= 0:
            self._residents[request.rank].pop(request.alloc_id, None)


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32."""
    return struct.pack(f"<{len(token_ids)}i", *token_ids)
