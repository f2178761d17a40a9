"""Conflux Parallelism: `conflux_ray.planning` decides, this file executes its decisions in simulated time.

When an iteration is planned, ahead of its start as in the engine (`ahead.py`), memory is grown for the decodes that
will be resident and the policy plans; its length is that of the latency model for what was planned (Eqs. 2-6), and what
it will have done is the state that the next plan sees. KV follows the two views of the engine's pool: a prefill holds
its share of blocks on every rank, a decode all of its blocks on one, and a completing request both until the iteration
that moves it has ended. The blocks of a request that has ended return when all iterations have that were issued before.
A decode that cannot grow is preempted, the newest of its rank first, and its tokens so far become its prompt. Its
blocks return at once, where the engine waits for a token that is in flight.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

from conflux_ray.kv.geometry import KVGeometry
from conflux_ray.planning.interface import Decision, DecodeState, KVState, PendingPrefill, Policy
from conflux_ray.planning.latency_model import LatencyModel, chunk_work
from conflux_ray.planning.scheduler import Scheduler, SchedulerParams
from conflux_ray.simulator.ahead import Ahead, Issuer, Planned
from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.decodes import DecodePool
from conflux_ray.simulator.deployment import BLOCK_SIZE, Deployment, Instance, prefill_rate
from conflux_ray.simulator.request import Phase, Request
from conflux_ray.simulator.systems.ablations import EvenDispatch, SeparatedModel, UniformModel

ENGINE = Ahead(iterations=2, lead=0.005, lead_share=0.1)
"""What the engine does: `RUN_AHEAD`, `LEAD_SECONDS` and `LEAD_SHARE` of `execution/loop.py`."""


@dataclass(slots=True)
class _Blocks:
    """Blocks that return with the end of an iteration: pages on every rank, and (rank, blocks)."""

    pages: int = 0
    freed: list[tuple[int, int]] = field(default_factory=list)
    finished: list[tuple[int, int]] = field(default_factory=list)  # unless a later iteration may touch them


class ConfluxInstance(Instance):
    """One XP instance.

    Args:
        clock: of the simulation.
        deployment: memory and cache.
        base_tp: GPUs of one logical rank.
        model: how long iterations take.
        policy: the scheduler.
        localized: whether a decode lives on one rank; False keeps it sharded over all of them (an ablation).
        ahead: when it plans; None: as the engine does.
        overrun: iterations with prefill take so many times what `model` says; the policy has to learn it.
    """

    def __init__(
        self,
        clock: Clock,
        deployment: Deployment,
        base_tp: int,
        model: LatencyModel,
        policy: Policy,
        localized: bool = True,
        ahead: Ahead | None = None,
        overrun: float = 1.0,
    ) -> None:
        num_ranks = model.num_ranks
        super().__init__(clock, deployment.new_cache(base_tp, num_ranks))
        self.model = model
        self.policy = policy
        self.localized = localized
        self.num_ranks = num_ranks
        self.geometry = KVGeometry(BLOCK_SIZE, num_ranks, deployment.kv_blocks(base_tp))
        self.free = [self.geometry.usable_blocks] * num_ranks
        # Sharded decodes are one group whose blocks are pages of every rank.
        self.pool = DecodePool(num_ranks if localized else 1, BLOCK_SIZE if localized else BLOCK_SIZE * num_ranks)
        self.pending: dict[str, Request] = {}
        self.capacity = prefill_rate(model)
        self._described: dict[str, PendingPrefill] = {}
        self._partial: dict[str, tuple[int, int]] = {}
        self._tbt: dict[float, int] = {}  # residents by TBT
        self._issuer = Issuer(clock, self._plan, ahead or ENGINE)
        self._overrun = overrun
        self._newest = _Blocks()  # of the iteration issued last
        self._running = 0  # prompt tokens of the iterations in flight

    def queued_tokens(self) -> int:
        return sum(p.remaining for p in self._described.values()) + self._running

    def kv_in_use(self) -> int:
        return self.geometry.usable_blocks * self.num_ranks - sum(self.free)

    def submit(self, request: Request) -> None:
        most = request.prompt_tokens + request.output_tokens
        if self._prefill_blocks(most) + self._decode_blocks(most) > self.geometry.usable_blocks:
            request.to(Phase.REJECTED)
            return
        self._enqueue(request)
        self._issuer.wake()

    def _prefill_blocks(self, tokens: int) -> int:
        return self.geometry.prefill_blocks(tokens)

    def _decode_blocks(self, tokens: int) -> int:
        """Blocks on one rank for `tokens` and the first decode."""
        return self.geometry.decode_blocks(tokens + 1) if self.localized else 0

    def _enqueue(self, request: Request) -> None:
        self.pending[request.name] = request
        self._describe(request)

    def _describe(self, request: Request) -> None:
        held = self._partial.get(request.name)
        placed = request.left > 1 and self.localized
        tokens = request.total_tokens
        waiting = request.phase is Phase.WAITING
        # A sharded decode keeps its pages: room for its next token is taken with the prompt's.
        blocks = self._prefill_blocks(tokens + (request.left > 1 and not self.localized))
        self._described[request.name] = PendingPrefill(
            request_id=request.name,
            arrival=request.arrival,
            deadline=request.next_deadline,
            total_tokens=tokens,
            computed_tokens=self.cached(request) if waiting else request.computed_tokens,
            tbt=request.slo.tbt,
            prefill_blocks=0 if held else blocks,
            decode_blocks=self._decode_blocks(tokens) if placed else 0,
            needs_placement=placed,
        )

    def _decode_state(self) -> DecodeState:
        tightest = min(self._tbt, default=float("inf"))
        if self.localized:
            return DecodeState.summed(self.pool.tokens, self.pool.context, tightest)
        n, tokens, context = self.num_ranks, self.pool.tokens[0], self.pool.context[0]
        return DecodeState.summed([tokens // n + (r < tokens % n) for r in range(n)], [context // n] * n, tightest)

    def _grow(self) -> None:
        """Take the blocks that the resident decodes need for the coming iteration."""
        for group in range(len(self.pool.tokens)):
            while (need := self.pool.growth(group)) > self._room(group):
                request, held = self.pool.preempt(group)
                self._give(group, held)
                self._leave(request)
                self._enqueue(request)
            if need:
                self._give(group, -need)

    def _room(self, group: int) -> int:
        return self.free[group] if self.localized else min(self.free)

    def _give(self, group: int, blocks: int) -> None:
        if self.localized:
            self.free[group] += blocks
        else:
            self.free = [f + blocks for f in self.free]

    def _leave(self, request: Request) -> None:
        self._tbt[request.slo.tbt] -= 1
        if not self._tbt[request.slo.tbt]:
            del self._tbt[request.slo.tbt]

    def _plan(self, start: float) -> Planned | None:
        """The iteration that starts at `start`, and all that it will have done."""
        self._grow()
        if not self.pending and not self.pool.count:
            return None
        decodes = self._decode_state()
        estimator = self.model.given(decodes.tokens, decodes.context)
        if not self.pending:  # nothing to decide
            decision = Decision(predicted=estimator.seconds(max(decodes.tokens), 0, 0.0))
            return self._issued(decision, decision.predicted, start)
        if self.cache is not None:  # what it holds may have changed
            for request in self.pending.values():
                if request.phase is Phase.WAITING:
                    self._describe(request)
        kv = KVState(self.geometry.usable_blocks, self.free.copy(), list(self._partial.values()))
        decision = self.policy.schedule(list(self._described.values()), decodes, kv, self.clock.now)
        if not decision.chunks and not self.pool.count:
            if self._issuer.in_flight:
                return None  # blocks return when it ends
            raise RuntimeError(
                f"{len(self.pending)} pending prefills, no decodes, and the policy schedules nothing at "
                f"{self.clock.now:.3f} s: the instance would wait for ever"
            )
        loads, prefill = list(decodes.tokens), [0] * self.num_ranks
        incoming = [0.0] * self.num_ranks
        work = 0.0
        for chunk in decision.chunks:
            request = self.pending[chunk.request_id]
            described = self._described[chunk.request_id]
            if request.phase is Phase.WAITING:
                self.begin(request)
                self.free = [f - described.prefill_blocks for f in self.free]
                self._partial[chunk.request_id] = (described.prefill_blocks, described.decode_blocks)
            for rank, tokens in enumerate(chunk.shard):
                loads[rank] += tokens
                prefill[rank] += tokens
            work += chunk_work(chunk.length, chunk.start)
            rank_or_none = decision.placements.get(chunk.request_id)
            if rank_or_none is not None:
                self.free[rank_or_none] -= described.decode_blocks
                incoming[rank_or_none] += request.total_tokens * (self.num_ranks - 1) / self.num_ranks
        measured = estimator.seconds(max(loads), max(prefill), work, max(incoming))
        if decision.chunks:
            measured *= self._overrun
        return self._issued(decision, measured, start)

    def _issued(self, decision: Decision, measured: float, start: float) -> Planned:
        end = start + measured
        blocks = self._newest = _Blocks()
        for request, rank, held in self.pool.tick(end) if self.pool.count else ():
            blocks.finished.append((rank, held))
            self._leave(request)
        for chunk in decision.chunks:
            request = self.pending[chunk.request_id]
            request.computed_tokens += chunk.length
            self._running += chunk.length
            if chunk.completes:
                blocks.pages += self._complete(request, decision.placements.get(chunk.request_id), end)
            else:
                self._describe(request)
        return Planned(measured, decision.predicted, partial(self._ended, decision, measured, blocks))

    def _ended(self, decision: Decision, measured: float, blocks: _Blocks) -> None:
        self.iterations += 1
        self._running -= sum(chunk.length for chunk in decision.chunks)
        self.policy.observe(decision, measured)
        self.free = [f + blocks.pages for f in self.free]
        for rank, held in blocks.freed:
            self._give(rank, held)
        if self._issuer.in_flight:
            self._newest.freed += blocks.finished
            return
        for rank, held in blocks.finished:
            self._give(rank, held)

    def _complete(self, request: Request, rank: int | None, end: float) -> int:
        """Its prefill ends at `end`; returns the blocks of its pages on every rank, if it needs them no more."""
        del self.pending[request.name], self._described[request.name]
        pages, _ = self._partial.pop(request.name)
        self.prefilled(request, end)
        if request.phase is not Phase.FINISHED:
            self.pool.join(request, rank if rank is not None else 0)
            self._tbt[request.slo.tbt] = self._tbt.get(request.slo.tbt, 0) + 1
            if not self.localized:
                return 0  # its pages stay where they are
            request.transferred_tokens += request.total_tokens - 1
        return pages


POLICIES = ("slo", "fcfs", "srpt")
ABLATIONS = ("none", "overlap", "phase", "cobatch", "even", "skewed")


def build(
    clock: Clock,
    deployment: Deployment,
    *,
    policy: str = "slo",
    base_tp: int = 1,
    without: str = "none",
    tbt: float = 0.1,
    run_ahead: int = ENGINE.iterations,
    lead: float = ENGINE.lead,
    lead_share: float = ENGINE.lead_share,
    planning: float = 0.0,
    gap: float = 0.0,
    overrun: float = 1.0,
) -> list[Instance]:
    """One XP instance.

    Args:
        clock: of the simulation.
        deployment: its GPUs.
        policy: one of `POLICIES`.
        base_tp: GPUs of one logical rank; the SP degree takes the rest.
        without: one of `ABLATIONS`. "overlap", "phase" and "cobatch" are cumulative, as in Fig. 13; "even" splits
            prefill tokens evenly over ranks, "skewed" always packs decodes onto the fullest rank.
        tbt: the deployment's TBT, for the time that an idle instance may plan ahead, seconds.
        run_ahead: iterations issued at once; 1 plans at the end of the iteration before (`Ahead` has this and the
            following).
        lead: seconds before the expected end of an iteration at which the next is planned; infinity: at its start, as
            with `instance.late_planning: false`.
        lead_share: the same as a share of the iteration.
        planning: seconds that planning takes.
        gap: seconds between two iterations.
        overrun: iterations with prefill take so many times what the hardware's figures say.
    """
    if deployment.gpus % base_tp:
        raise ValueError(f"base_tp={base_tp} does not divide {deployment.gpus} GPUs")
    model = deployment.hardware.latency(deployment.gpus // base_tp, base_tp)
    params = SchedulerParams(idle_tau=tbt, max_decodes=1024, max_prefill_tokens=65536)
    localized = True
    scheduler: Policy
    if without in ("overlap", "phase", "cobatch"):
        model = replace(model, contention=(), serial=True)
    if without == "phase":
        model, localized = UniformModel.of(model), False
    elif without == "cobatch":
        model, localized = SeparatedModel.of(model), False
    if without == "even":
        scheduler = EvenDispatch(model, policy, params)
    elif without == "skewed":
        scheduler = Scheduler(model, policy, replace(params, eta=0.0))
    elif without in ABLATIONS:
        scheduler = Scheduler(model, policy, params)
    else:
        raise ValueError(f"without={without!r} is no ablation; choose one of {', '.join(ABLATIONS)}")
    ahead = Ahead(run_ahead, lead, lead_share, planning, gap)
    return [ConfluxInstance(clock, deployment, base_tp, model, scheduler, localized, ahead, overrun)]
