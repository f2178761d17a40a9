"""The scheduler of one instance: which prefills run in the next iteration, how they are cut, where they will decode
(section 6.4, Algorithm 1).

What the paper leaves open, and what is done here:

* tau is the smallest TBT of the resident decodes. With none resident nobody waits for a token; tau is then `idle_tau`,
  which bounds how long an arrival waits for the next decision, and if not even one quantum fits, one runs all the same.
* A completing chunk needs a token on its decode rank, and its KV arrives there. Both count against tau. Where they
  break it on every feasible rank, the chunk stops one water level short, and the rest, hardly more than the arrival,
  completes in a later iteration. A rest that breaks tau although it goes first is let through, and flagged: beside
  these decodes no iteration could do better, and waiting for fewer of them would leave the budget unused meanwhile.
  One that does not go first is passed over, and the requests behind it use the budget.
* A request whose prefill blocks cannot be reserved closes the door for other *new* requests in that step, while
  requests that already hold blocks go on. So nothing smaller takes the memory that a larger request waits for: among
  admitted ones the order is a promise, and behind it, least work first, later new ones need no less memory anyway.
* Starvation. A request is *overdue* `starvation_after` seconds past its deadline. In every step the longest overdue
  request goes first, with at least min(m_i, `starvation_quantum`) tokens, even beyond tau (flagged), and at most
  `starvation_share` of B_0 where that is more, so that a queue full of lost requests does not take on-time ones with
  it. Bound: while its KV can be had, a request that is overdue completes its prefill within the sum of
  ceil(m_j / starvation_quantum) steps over itself and the requests j whose deadlines passed before its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, takewhile

from conflux_ray.planning.correction import Correction
from conflux_ray.planning.dispatch import Assignment, Dispatcher, ensure_token
from conflux_ray.planning.interface import Decision, DecodeState, KVState, PendingPrefill, PrefillChunk
from conflux_ray.planning.latency_model import LatencyModel
from conflux_ray.planning.ordering import ORDERS, Order, Queue
from conflux_ray.planning.placement import choose_rank, feasible_ranks


@dataclass(frozen=True, slots=True)
class SchedulerParams:
    """What the paper leaves to the deployment.

    Args:
        quantum: q of Algorithm 2, tokens: water levels are its multiples.
        eta: KV-utilization threshold of Algorithm 3, 0..1.
        headroom: h of Algorithm 3, blocks.
        max_decodes: most resident decodes of one rank.
        max_prefill_tokens: most prefill tokens of one iteration, over all ranks.
        idle_tau: tau while no decode is resident, seconds.
        deadline_margin: seconds before its deadline by which an admitted request is to have its token. Iterations that
            run over, prompts that complete and decode from then on, and the way to the client come out of it; without
            one, what is admitted last is late by milliseconds.
        starvation_after: seconds past its deadline after which a request is overdue.
        starvation_quantum: tokens that the longest overdue request gets in every step.
        starvation_share: share of B_0 that it may take where that is more, 0..1; it is what on-time requests pay.

    Raises:
        ValueError: a parameter is out of range.
    """

    quantum: int = 16
    eta: float = 0.8
    headroom: int = 4
    max_decodes: int = 256
    max_prefill_tokens: int = 16384
    idle_tau: float = 0.1
    deadline_margin: float = 0.05
    starvation_after: float = 30.0
    starvation_quantum: int = 128
    starvation_share: float = 0.03

    def __post_init__(self) -> None:
        for name in ("quantum", "max_decodes", "max_prefill_tokens", "starvation_quantum"):
            if getattr(self, name) < 1:
                raise ValueError(f"scheduler {name}={getattr(self, name)} must be at least 1")
        for name in ("headroom", "deadline_margin", "starvation_after"):
            if getattr(self, name) < 0:
                raise ValueError(f"scheduler {name}={getattr(self, name)} must not be negative")
        for name in ("eta", "starvation_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"scheduler {name}={getattr(self, name)} must be in [0, 1]")
        if not self.idle_tau > 0:
            raise ValueError(f"scheduler idle_tau={self.idle_tau} must be positive; give it the deployment's TBT")


class Scheduler:
    """The `Policy` of the paper, with the order of requests chosen by name.

    Args:
        model: predicts iterations; of the instance's number of ranks.
        policy: a key of `ORDERS`: "slo" is Algorithm 1, "fcfs" and "srpt" keep its dispatch and placement.
        params: limits and thresholds.
        correction: learns from iterations with prefill; its `factor` is worth exporting. Those of decodes alone, which
            are far more, have one of their own: their errors are others, and would hide those that break TBT.

    Raises:
        ValueError: there is no such policy.
    """

    def __init__(
        self,
        model: LatencyModel,
        policy: str = "slo",
        params: SchedulerParams | None = None,
        correction: Correction | None = None,
    ) -> None:
        if policy not in ORDERS:
            raise ValueError(f"policy={policy!r} is unknown; choose one of {', '.join(sorted(ORDERS))}")
        self.model = model
        self.params = params or SchedulerParams()
        self.correction = correction or Correction()
        self.decode_correction = Correction()
        self._order = ORDERS[policy]

    def use_model(self, model: LatencyModel) -> None:
        """Predict with another profile from now on; what was learnt about the old one is forgotten."""
        self.model = model
        self.correction.reset()
        self.decode_correction.reset()

    def observe(self, decision: Decision, measured: float) -> None:
        """Learn from an iteration that took `measured` seconds."""
        correction = self.correction if decision.chunks else self.decode_correction
        correction.observe(decision.predicted, measured)

    def prefill_rate(self, decodes: DecodeState) -> float:
        """Prompt tokens per second that it plans beside these decodes: B_0 every tau, attention left out (Alg. 2).

        Iterations are shorter than tau where `max_prefill_tokens` ends the budget. Where decodes leave nothing it is
        the starvation quantum: a waiting request gets that much in the end.

        Raises:
            ValueError: `decodes` has another number of ranks than the latency model.
        """
        step = self._step(decodes, KVState(1, [0] * decodes.num_ranks))
        return self._rate(step, step.dispatcher.budget())

    def decode_seconds(self, decodes: DecodeState) -> float:
        """Predicted time of an iteration that holds these decodes alone, seconds; 0 without any."""
        if not any(decodes.tokens):
            return 0.0
        alone = self.model.given(decodes.tokens, decodes.context).seconds(max(decodes.tokens), 0, 0.0)
        return alone * self.decode_correction.factor

    def wait_of(
        self, request: PendingPrefill, pending: Sequence[PendingPrefill], decodes: DecodeState, now: float
    ) -> float:
        """Expected seconds from `now` until `request`, which is not among `pending`, has its next token.

        Its own work and that of all which goes before it in this policy's order, attention counted, at `prefill_rate`,
        and an iteration of the decodes. KV memory and overdue requests are left out.

        Raises:
            ValueError: `decodes` has another number of ranks than the latency model.
        """
        step = self._step(decodes, KVState(1, [0] * decodes.num_ranks))
        budget = step.dispatcher.budget()
        queue = Queue([*pending, request], step.dispatcher.tokens_per_pair(budget))
        newcomer = len(pending)
        order = self._order(queue, budget, now + self.params.deadline_margin, step.tau)
        before = takewhile(lambda index: index != newcomer, order.indices)
        work = sum(queue.cost[index] for index in before) + queue.cost[newcomer]
        return work / self._rate(step, budget) + self.decode_seconds(decodes)

    def schedule(self, pending: Sequence[PendingPrefill], decodes: DecodeState, kv: KVState, now: float) -> Decision:
        """Plan one iteration (Algorithm 1).

        Raises:
            ValueError: `decodes` has another number of ranks than the latency model.
        """
        step = self._step(decodes, kv)
        budget = step.dispatcher.budget()
        if not pending:
            return step.decision(budget, 0)
        queue = Queue(pending, step.dispatcher.tokens_per_pair(budget))
        order = self._order(queue, budget, now + self.params.deadline_margin, step.tau)
        lead = queue.longest_overdue(now, self.params.starvation_after) if order.overtakes else None
        for index in _leading(lead, order):
            request = pending[index]
            if not step.may_start(request):
                continue
            limit, guaranteed = None, 0
            if index == lead:
                limit = max(self.params.starvation_quantum, int(self.params.starvation_share * budget))
            if not step.chunks and now - queue.due[index] > self.params.starvation_after:
                guaranteed = self.params.starvation_quantum
            if not step.add(request, limit, guaranteed):
                break
        return step.decision(budget, order.rejected)

    def _rate(self, step: _Step, budget: int) -> float:
        if budget < self.params.starvation_quantum:
            return self.params.starvation_quantum / step.tau
        return budget / (step.factor * step.dispatcher.seconds_of(budget))

    def _step(self, decodes: DecodeState, kv: KVState) -> _Step:
        return _Step(self.model, self.params, decodes, kv, self.correction.factor, self.decode_correction.factor)


def _leading(lead: int | None, order: Order) -> Iterator[int]:
    """The order with `lead` in front."""
    if lead is None:
        return order.indices
    return chain((lead,), (index for index in order.indices if index != lead))


class _Step:
    """The state of one scheduling step: A_p (in the dispatcher), A_d, the tentative decode state and KV."""

    def __init__(
        self,
        model: LatencyModel,
        params: SchedulerParams,
        decodes: DecodeState,
        kv: KVState,
        factor: float,
        decode_factor: float,
    ) -> None:
        self.params = params
        self.kv = kv
        self.factor = factor
        self.decode_factor = decode_factor
        self.idle = not any(decodes.tokens)
        self.tau = params.idle_tau if self.idle else decodes.tightest_tbt
        self.dispatcher = Dispatcher(
            model.given(decodes.tokens, decodes.context),
            decodes.tokens,
            tau=self.tau / factor,
            quantum=params.quantum,
            max_tokens=params.max_prefill_tokens,
        )
        self.context = list(decodes.context)
        self.residents = list(decodes.tokens)
        self.chunks: list[PrefillChunk] = []
        self.placements: dict[str, int] = {}
        self._accepts_new = True

    def may_start(self, request: PendingPrefill) -> bool:
        """Whether the request holds its prefill blocks or may take them; once one may not, no new one may."""
        if not request.prefill_blocks:
            return True
        self._accepts_new = self._accepts_new and self.kv.can_start(request)
        return self._accepts_new

    def add(self, request: PendingPrefill, limit: int | None, guaranteed: int) -> bool:
        """Lines 6-13 for one request.

        Args:
            request: may start.
            limit: the most tokens its chunk may have.
            guaranteed: tokens that it gets whatever tau says.

        Returns:
            False if no further request can be served: the budget is used up or the placement infeasible.
        """
        dispatcher = self.dispatcher
        assignment = dispatcher.dispatch(request.remaining, request.computed_tokens, limit)
        length = assignment.length if assignment else 0
        if self.idle and not self.chunks and not length:
            guaranteed = self.params.quantum * len(self.residents)
        if length < guaranteed:
            guaranteed = min(guaranteed, request.remaining, dispatcher.room)
        forced = length < guaranteed
        if forced:
            length = guaranteed
            assignment = dispatcher.assign(length, request.computed_tokens)
        if assignment is None:
            return False
        completes = length == request.remaining
        if completes and request.needs_placement:
            ranks = feasible_ranks(request, self.kv, self.residents, self.params.max_decodes, self.params.headroom)
            if not ranks:
                return False
            rest = self.params.quantum * len(self.residents)
            unavoidable = not self.chunks and length <= max(rest, guaranteed)
            placed = self._place(request, assignment, ranks, must_keep_tau=not (self.idle or forced or unavoidable))
            if placed is None:
                if length <= rest:
                    return True
                completes, length = False, length - rest
                placed = dispatcher.assign(length, request.computed_tokens)
            assignment = placed
        if not completes or not request.needs_placement:
            self.kv.start(request)
        dispatcher.commit(assignment)
        self.chunks.append(
            PrefillChunk(request.request_id, request.computed_tokens, length, tuple(assignment.shard), completes)
        )
        return True

    def _place(
        self, request: PendingPrefill, chunk: Assignment, ranks: list[int], must_keep_tau: bool
    ) -> Assignment | None:
        """Lines 9-12: reserve a decode rank out of `ranks` and give it a token of the chunk.

        Returns:
            The chunk with the KV that arrives; None if that breaks tau on every rank though it must not.
        """
        dispatcher, kv = self.dispatcher, self.kv
        num_ranks = len(chunk.shard)
        # Every rank holds 1/N of the request's KV; the other ranks' parts travel.
        incoming = request.total_tokens * (num_ranks - 1) / num_ranks
        while (rank := choose_rank(ranks, kv, self.context, self.params.eta)) is not None:
            moved = chunk
            if not chunk.shard[rank]:
                cut = ensure_token(chunk.shard, rank, dispatcher.assigned.loads)
                moved = dispatcher.with_shard(cut, chunk.length, request.computed_tokens)
            assignment = dispatcher.with_arrival(moved, rank, incoming)
            if not must_keep_tau or assignment.seconds <= dispatcher.tau:
                kv.start(request)
                kv.place(request, rank)
                self.context[rank] += request.total_tokens + 1
                self.residents[rank] += 1
                self.placements[request.request_id] = rank
                return assignment
            ranks.remove(rank)
        return None

    def decision(self, budget: int, rejected: int) -> Decision:
        """A_p and A_d (line 14)."""
        dispatcher, assigned = self.dispatcher, self.dispatcher.assigned
        seconds = 0.0 if self.idle and not self.chunks else assigned.seconds
        factor = self.factor if self.chunks else self.decode_factor
        overlap, decode_sms = dispatcher.estimator.setting(assigned.max_shard, assigned.work)
        return Decision(
            chunks=tuple(self.chunks),
            placements=self.placements,
            budget=budget,
            predicted=seconds * factor,
            rejected=rejected,
            tbt_violation=not self.idle and seconds > self.tau / factor,
            overlap=overlap,
            decode_sms=decode_sms,
        )
