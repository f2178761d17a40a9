"""Conflux with one of its ideas taken away (sections 8.3, Figs. 13 and 15)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from conflux_ray.planning.dispatch import ensure_token, tokens_per_pair
from conflux_ray.planning.interface import Decision, DecodeState, KVState, PendingPrefill, PrefillChunk
from conflux_ray.planning.latency_model import IterationEstimator, LatencyModel, chunk_work
from conflux_ray.planning.ordering import ORDERS, Queue
from conflux_ray.planning.placement import choose_rank, feasible_ranks
from conflux_ray.planning.plain import even_split
from conflux_ray.planning.scheduler import SchedulerParams


def _values(model: LatencyModel) -> dict[str, object]:
    return {field.name: getattr(model, field.name) for field in fields(LatencyModel)}


@dataclass(frozen=True, slots=True)
class UniformModel(LatencyModel):
    """Without phase-specific parallelism: decode tokens take the same all-to-alls as prefill tokens, and decode
    attention runs on head shards of all requests. Its caller gives the decodes evenly over the ranks."""

    @classmethod
    def of(cls, model: LatencyModel) -> UniformModel:
        return cls(**_values(model))  # type: ignore[arg-type]

    def given(self, decode_tokens: Sequence[int], decode_context: Sequence[int]) -> IterationEstimator:
        return _UniformEstimator(self, decode_tokens, decode_context)


class _UniformEstimator(IterationEstimator):
    def seconds(self, load: float, shard: float, work: float, incoming: float = 0) -> float:
        if not load:
            return self.host
        model = self.model
        attention = self.decode_path + (model.prefill(work / model.num_ranks) if shard else 0.0)
        return model.num_layers * (model.linear(load) + model.comm(load) + attention) + self.host


@dataclass(frozen=True, slots=True)
class SeparatedModel(LatencyModel):
    """As `UniformModel`, and without co-batching: prefill and decode of an iteration run one after the other, each
    reading the weights."""

    @classmethod
    def of(cls, model: LatencyModel) -> SeparatedModel:
        return cls(**_values(model))  # type: ignore[arg-type]

    def given(self, decode_tokens: Sequence[int], decode_context: Sequence[int]) -> IterationEstimator:
        return _SeparatedEstimator(self, decode_tokens, decode_context)


class _SeparatedEstimator(IterationEstimator):
    def __init__(self, model: LatencyModel, decode_tokens: Sequence[int], decode_context: Sequence[int]) -> None:
        super().__init__(model, decode_tokens, decode_context)
        most = max(decode_tokens)
        self._decode_layer = model.linear(most) + model.comm(most) + self.decode_path if most else 0.0

    def seconds(self, load: float, shard: float, work: float, incoming: float = 0) -> float:
        model = self.model
        layers = self._decode_layer
        if shard:
            layers += model.linear(shard) + model.comm(shard) + model.prefill(work / model.num_ranks)
        runs = bool(shard) + bool(self._decode_layer)
        return model.num_layers * layers + max(1, runs) * self.host


class EvenDispatch:
    """Conflux with every chunk split evenly over the ranks instead of waterfilled (Fig. 15a).

    Order, placement and the TBT limit are those of `Scheduler`; only `starvation_*` has no counterpart.

    Args:
        model: predicts iterations.
        policy: a key of `ORDERS`.
        params: limits and thresholds.
    """

    def __init__(self, model: LatencyModel, policy: str, params: SchedulerParams) -> None:
        self.model = model
        self.params = params
        self._order = ORDERS[policy]

    def observe(self, decision: Decision, measured: float) -> None:
        """Learns nothing."""

    def schedule(self, pending: Sequence[PendingPrefill], decodes: DecodeState, kv: KVState, now: float) -> Decision:
        params, n = self.params, decodes.num_ranks
        idle = not any(decodes.tokens)
        tau = params.idle_tau if idle else decodes.tightest_tbt
        estimator = self.model.given(decodes.tokens, decodes.context)
        prefill = [0] * n
        context, residents = list(decodes.context), list(decodes.tokens)
        incoming = [0.0] * n
        work = 0.0
        room = params.max_prefill_tokens

        def seconds(shard: Sequence[int], more: float, arriving: Sequence[float]) -> float:
            taken = [p + s for p, s in zip(prefill, shard, strict=True)]
            load = max(t + d for t, d in zip(taken, decodes.tokens, strict=True))
            return estimator.seconds(load, max(taken), work + more, max(arriving))

        def most(request: PendingPrefill, limit: int) -> int:
            low, high = 0, limit
            while low < high:
                middle = (low + high + 1) // 2
                more = chunk_work(middle, request.computed_tokens)
                if seconds(even_split(middle, n), more, incoming) <= tau:
                    low = middle
                else:
                    high = middle - 1
            return low

        reference = PendingPrefill("", 0.0, 0.0, total_tokens=room)
        budget = most(reference, room)
        pair = tokens_per_pair(estimator, budget, tau, seconds(prefill, 0.0, incoming))
        order = self._order(Queue(pending, pair), budget, now + params.deadline_margin, tau)
        chunks: list[PrefillChunk] = []
        placements: dict[str, int] = {}
        closed = False
        for index in order.indices:
            request = pending[index]
            if request.prefill_blocks and (closed or not kv.can_start(request)):
                closed = True
                continue
            length = most(request, min(request.remaining, room))
            if not length and idle and not chunks:
                length = min(request.remaining, params.quantum * n)
            if not length:
                break
            shard = even_split(length, n)
            if length == request.remaining and request.needs_placement:
                ranks = feasible_ranks(request, kv, residents, params.max_decodes, params.headroom)
                rank = choose_rank(ranks, kv, context, params.eta)
                if rank is None:
                    break
                shard = ensure_token(shard, rank)
                arriving = incoming.copy()
                arriving[rank] += request.total_tokens * (n - 1) / n
                late = seconds(shard, chunk_work(length, request.computed_tokens), arriving) > tau
                if late and not idle and chunks:
                    break
                incoming = arriving
                kv.start(request)
                kv.place(request, rank)
                context[rank] += request.total_tokens + 1
                residents[rank] += 1
                placements[request.request_id] = rank
            else:
                kv.start(request)
            prefill = [p + s for p, s in zip(prefill, shard, strict=True)]
            work += chunk_work(length, request.computed_tokens)
            room -= length
            chunks.append(
                PrefillChunk(
                    request.request_id, request.computed_tokens, length, tuple(shard), length == request.remaining
                )
            )
        predicted = seconds([0] * n, 0.0, incoming)
        return Decision(tuple(chunks), placements, budget, predicted, order.rejected, not idle and predicted > tau)
