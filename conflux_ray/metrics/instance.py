"""What one instance does, seen from its engine: iterations, ranks, planner, KV, transitions.

Two ways in. `MeteredWorkers` sees every iteration, issued and collected, and adds numbers up; `sample` reads the rest
of the engine's state about once a second. Both run in the iteration thread, which owns the engine.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from conflux_ray.execution.engine import Engine
from conflux_ray.execution.loop import Workers
from conflux_ray.execution.plan import IterationPlan, WorkerResult
from conflux_ray.metrics import definitions as m
from conflux_ray.metrics.store import Store
from conflux_ray.planning.scheduler import Scheduler
from conflux_ray.wire import LoadReport

SAMPLE_SECONDS = 1.0
HOLDER_SECONDS = 10.0
"""Between two counts of blocks by holder, which visit all allocations of all ranks; Ray reports no more often."""


class _Issued(NamedTuple):
    """What is remembered of an iteration until its results come."""

    kind: str
    predicted: float


class InstanceMetrics:
    """Counts what one instance does.

    Args:
        model: served model's name.
        replica: name of this process: the first characters of the instance's id, as ingresses name it.
        engine: whose iterations these are.
        kv_token_bytes: bytes of one token's KV, all layers and heads.
    """

    def __init__(self, model: str, replica: str, engine: Engine, kv_token_bytes: float) -> None:
        self.store = store = Store({"model": model, "replica": replica})
        self._engine = engine
        self._tensor_parallel = engine.tensor_parallel
        # Every rank holds 1/N of a prefilled token; the other ranks' parts travel.
        self._moved_bytes = kv_token_bytes * (engine.num_ranks - 1) / engine.num_ranks
        ranks = [str(rank) for rank in range(engine.num_ranks)]
        for metric in m.all_metrics():
            if metric.where == "instance" and metric.kind is not m.Kind.GAUGE:
                store.start(metric, rank=ranks)
        self._iterations = {kind: store.distribution(m.ITERATION_SECONDS, kind) for kind in m.ITERATIONS}
        self._prefill = [store.value(m.SCHEDULED_TOKENS, "prefill", rank) for rank in ranks]
        self._decode = [store.value(m.SCHEDULED_TOKENS, "decode", rank) for rank in ranks]
        self._busy = [store.value(m.RANK_BUSY, rank) for rank in ranks]
        self._overlapped = store.value(m.OVERLAPPED)
        self._predicted, self._measured = store.value(m.PREDICTED), store.value(m.MEASURED)
        self._ratio = store.distribution(m.PREDICTION_RATIO)
        self._budget, self._budget_used = store.value(m.BUDGET), store.value(m.BUDGET_USED)
        self._transition_tokens = store.value(m.TRANSITION_TOKENS)
        self._transition_bytes = store.value(m.TRANSITION_BYTES)
        self._transition_seconds = store.distribution(m.TRANSITION_SECONDS)
        self._in_flight: deque[_Issued] = deque()
        self._open: dict[int, list[float]] = {}  # transfer -> when it was issued, workers that have not acknowledged
        self._next_sample = self._next_count = -math.inf
        self._ranks = ranks

    def issued(self, plan: IterationPlan, now: float) -> None:
        """An iteration goes to the workers.

        Args:
            plan: as sent.
            now: monotonic seconds.
        """
        decision = self._engine.last_decision
        decodes = 0
        for rank, steps in enumerate(plan.decodes):
            if steps:
                self._decode[rank].value += len(steps)
                decodes += len(steps)
        if plan.chunks:
            kind = "mixed" if decodes else "prefill"
            for chunk in plan.chunks:
                for shard in chunk.shards:
                    self._prefill[shard.rank].value += shard.end - shard.start
                self._budget_used.value += chunk.end - chunk.start
            self._budget.value += decision.budget
            if decodes and plan.overlap:
                self._overlapped.value += 1
        else:
            kind = "decode" if decodes else "transfer"
        for transfer in plan.transfers:
            tokens = transfer.end - transfer.start
            self._transition_tokens.value += tokens
            self._transition_bytes.value += tokens * self._moved_bytes
            self._open[transfer.transfer_id] = [now, self._engine.num_workers]
        self._in_flight.append(_Issued(kind, decision.predicted))

    def collected(self, results: list[WorkerResult], now: float) -> None:
        """The results of the oldest iteration in flight have come.

        Args:
            results: one of each worker.
            now: monotonic seconds.
        """
        flight = self._in_flight.popleft()
        slowest = 0.0
        if self._tensor_parallel == 1:
            for result in results:
                self._busy[result.worker].value += result.elapsed
                slowest = max(slowest, result.elapsed)
        else:
            for rank, busy in enumerate(self._busy):
                first = rank * self._tensor_parallel
                longest = max([result.elapsed for result in results[first : first + self._tensor_parallel]])
                busy.value += longest
                slowest = max(slowest, longest)
        self._iterations[flight.kind].observe(slowest)
        if flight.predicted > 0 and flight.kind != "transfer":
            self._predicted.value += flight.predicted
            self._measured.value += slowest
            self._ratio.observe(slowest / flight.predicted)
        for result in results:
            for transfer_id in result.acknowledged:
                entry = self._open.get(transfer_id)
                if entry is None:
                    continue
                entry[1] -= 1
                if entry[1] <= 0:
                    del self._open[transfer_id]
                    self._transition_seconds.observe(now - entry[0])

    def sample(self, load: LoadReport, now: float) -> None:
        """Read the engine's state, if a second has passed since the last time.

        Args:
            load: the instance's present report.
            now: seconds on the instance's clock.
        """
        if now < self._next_sample:
            return
        self._next_sample = now + SAMPLE_SECONDS
        engine, store = self._engine, self.store
        store.value(m.INSTANCE_RUNNING).value = load.running
        store.value(m.INSTANCE_WAITING).value = load.waiting
        store.value(m.INSTANCE_QUEUED_WORK).value = load.queued_work_s
        store.value(m.INSTANCE_CAPACITY).value = load.capacity
        store.value(m.INSTANCE_DRAINING).value = load.draining or load.closing
        counters = engine.counters
        for metric, count in (
            (m.FINISHED, counters.finished),
            (m.ABORTED, counters.aborted),
            (m.PREEMPTIONS, counters.preemptions),
            (m.PAUSES, counters.pauses),
            (m.DISCARDED_TOKENS, counters.discarded_tokens),
            (m.TRANSITIONS, counters.transitions),
            (m.TBT_VIOLATIONS, counters.tbt_violations),
        ):
            store.value(metric).value = count
        residents, kv = engine.residents, engine.kv.snapshot()
        for rank, name in enumerate(self._ranks):
            store.value(m.KV_USED, name).value = 1.0 - kv.free[rank] / kv.capacity
            store.value(m.RANK_DECODES, name).value = residents.tokens[rank]
            store.value(m.RANK_CONTEXT, name).value = residents.context[rank]
        if now >= self._next_count:
            self._next_count = now + HOLDER_SECONDS
            self._count_blocks()
        store.value(m.KV_DRAINING).value = engine.kv.num_draining
        store.value(m.TRANSITIONS_OPEN).value = len(self._open)
        store.value(m.REJECTED).value = engine.last_decision.rejected if engine.has_work else 0
        store.value(m.STARVATION_AGE).value = max([0.0, *(now - request.deadline for request in engine.pending)])
        if isinstance(engine.policy, Scheduler):
            store.value(m.CORRECTION, "prefill").value = engine.policy.correction.factor
            store.value(m.CORRECTION, "decode").value = engine.policy.decode_correction.factor

    def _count_blocks(self) -> None:
        for rank, name in enumerate(self._ranks):
            usage = self._engine.kv.usage(rank)
            for holder in ("free", "prefilling", "transition", "decoding", "draining", "retained"):
                self.store.value(m.KV_BLOCKS, name, holder).value = getattr(usage, holder)


class MeteredWorkers:
    """A worker group whose results are counted on their way (implements `execution.loop.Workers`)."""

    def __init__(self, workers: Workers, metrics: InstanceMetrics, clock: Callable[[], float]) -> None:
        self._workers = workers
        self._metrics = metrics
        self._clock = clock

    def broadcast(self, plan: IterationPlan) -> None:
        """Count a plan and send it to every worker."""
        self._metrics.issued(plan, self._clock())
        self._workers.broadcast(plan)

    def ready(self) -> bool:
        """See `Workers.ready`."""
        return self._workers.ready()

    def collect(self, timeout: float) -> list[WorkerResult]:
        """See `Workers.collect`."""
        results = self._workers.collect(timeout)
        self._metrics.collected(results, self._clock())
        return results
