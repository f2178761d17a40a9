"""Small machines and workloads, with numbers a reader can add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from conflux_ray.planning.latency_model import Affine, GemmCurve, LatencyModel
from conflux_ray.simulator.deployment import BLOCK_SIZE, Deployment
from conflux_ray.simulator.hardware import DEVICES, MODELS, Device, ModelShape, StatedHardware
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.run import Outcome, Setup, simulate
from conflux_ray.simulator.trace import Trace, TraceRequest

MS = 1e-3


@dataclass
class PlainHardware:
    """One layer; a token of the busiest rank takes 1 ms, divided by the base TP, and an iteration 10 ms more.

    Every rank holds `blocks` KV blocks a GPU. Links move a token's KV in 1 ms.
    """

    blocks: int = 10_000
    per_token: float = MS
    fixed: float = 10 * MS
    changes: dict[str, Any] = field(default_factory=dict)
    shape: ModelShape = MODELS["qwen-14b"]
    device: Device = DEVICES["h100"]

    def latency(self, num_ranks: int, base_tp: int) -> LatencyModel:
        fields: dict[str, Any] = {
            "name": "plain",
            "num_layers": 1,
            "num_ranks": num_ranks,
            "gemm": GemmCurve.affine(self.per_token / base_tp, 0.0),
            "decode": Affine(0.0),
            "prefill": Affine(0.0),
            "comm": Affine(0.0),
            "host": Affine(0.0, self.fixed),
        }
        return LatencyModel(**{**fields, **self.changes})

    def kv_tokens(self, base_tp: int) -> int:
        return self.blocks * base_tp * BLOCK_SIZE


def workload(*rows: tuple[float, int, int], hash_ids: Sequence[tuple[int, ...]] = ()) -> Trace:
    """(arrival, prompt tokens, output tokens) of each request."""
    ids = hash_ids or [()] * len(rows)
    return Trace("test", tuple(TraceRequest(a, p, o, h) for (a, p, o), h in zip(rows, ids, strict=True)))


def served(
    system: str,
    trace: Trace,
    gpus: int = 1,
    hardware: Any = None,
    slo: Slo | None = None,
    prefix_cache: float = 0.0,
    instances: int = 1,
    **options: Any,
) -> Outcome:
    """`trace` on a plain machine, or on `hardware`."""
    deployment = Deployment(hardware or PlainHardware(), gpus, prefix_cache)
    setup = Setup(system, deployment, slo or Slo(10.0, 10.0), options, instances)
    return simulate(setup, trace, warm_up=0.0)


def times(outcome: Outcome) -> list[list[float]]:
    """Token times of each request, milliseconds, rounded to a microsecond."""
    return [[round(t * 1e3, 3) for t in request.times] for request in outcome.requests]


def h200(model: str = "qwen-14b") -> StatedHardware:
    return StatedHardware(MODELS[model], DEVICES["h200"])
