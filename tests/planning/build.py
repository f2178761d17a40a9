"""Small inputs of the planner, with numbers a reader can add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conflux_ray.planning.dispatch import Dispatcher
from conflux_ray.planning.interface import DecodeState, KVState, PendingPrefill, ResidentDecode
from conflux_ray.planning.latency_model import Affine, GemmCurve, LatencyModel

MS = 1e-3


def per_token_model(num_ranks: int = 2, **changes: Any) -> LatencyModel:
    """One layer; 1 ms per token of the busiest rank and nothing else, unless changed."""
    fields: dict[str, Any] = {
        "name": "test",
        "num_layers": 1,
        "num_ranks": num_ranks,
        "gemm": GemmCurve.affine(MS, 0.0),
        "decode": Affine(0.0),
        "prefill": Affine(0.0),
        "comm": Affine(0.0),
    }
    return LatencyModel(**{**fields, **changes})


def resident(*tokens: int, context: int = 10, tbt: float = 0.1) -> DecodeState:
    """`tokens[r]` decodes on rank r, each with the same context and TBT."""
    return DecodeState(
        tuple(tuple(ResidentDecode(f"d{r}.{i}", context, tbt) for i in range(count)) for r, count in enumerate(tokens))
    )


def request(name: str, tokens: int, deadline: float = 10.0, **fields: Any) -> PendingPrefill:
    return PendingPrefill(name, **{"arrival": 0.0, "deadline": deadline, "total_tokens": tokens, **fields})


def roomy_kv(num_ranks: int = 2) -> KVState:
    return KVState(capacity=1_000_000, free=[1_000_000] * num_ranks)


def dispatcher(model: LatencyModel, decode_tokens: Sequence[int], tau: float, **fields: Any) -> Dispatcher:
    estimator = model.given(decode_tokens, [10 * n for n in decode_tokens])
    return Dispatcher(estimator, decode_tokens, tau, **{"quantum": 1, "max_tokens": 10_000, **fields})
