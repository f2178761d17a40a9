"""What the simulator says of a point before it is measured: the same requests on the same promises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conflux_ray.bench.live.contenders import Contender, simulated
from conflux_ray.bench.live.point import Load
from conflux_ray.bench.live.score import Record, by_length
from conflux_ray.profiling.registry import gpu_slug, shipped_profile
from conflux_ray.simulator.deployment import Deployment
from conflux_ray.simulator.hardware import DEVICES, MODELS, Hardware, MeasuredHardware, SizedHardware, StatedHardware
from conflux_ray.simulator.run import Setup, simulate

INGRESS = 0.006
"""Seconds that HTTP adds to a first token: HAProxy mode at one stream, P50 (docs/benchmarks.md, *What the serving stack
adds*). vLLM's own server is given the same: its way in is the same application without HAProxy, and not measured."""
EGRESS = 0.0004
"""Seconds that HTTP adds to a later token, from the same table; the way out of every token."""
CACHED = 0.5
"""Share of the KV memory that a contender with a prefix cache is taken to remember prompts in.

vLLM's takes what running requests leave."""
FORMAT = 4
"""Of predictions; those of another are made again."""
_SHAPES = {
    "qwen3-14b": "qwen-14b",
    "qwen3-32b": "qwen-32b",
    "llama-3.1-8b": "llama-8b",
}


def hardware_of(model: str, gpus: Sequence[dict[str, str]], profiles: Sequence[Path] = ()) -> Hardware | None:
    """The simulator's figures for this machine; None if it has none for this model or these GPUs.

    Args:
        model: its name or folder.
        gpus: as `machine.gpus` lists them.
        profiles: measured ones that take the place of stated figures; none: those that are shipped for this
            machine, and for a part of it, a replica's.

    Raises:
        ValueError: a profile cannot be used.
    """
    shape = next(
        (MODELS[name] for prefix, name in _SHAPES.items() if Path(model).name.lower().startswith(prefix)), None
    )
    device = next((d for d in DEVICES.values() if gpus and d.name.lower() in gpus[0]["name"].lower()), None)
    if shape is None or device is None:
        return None
    stated = StatedHardware(shape, device)
    if not profiles:
        layouts = [(ranks, tp) for ranks in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if len(gpus) % (ranks * tp) == 0]
        found = [shipped_profile(model, gpu_slug(gpus[0]["name"]), ranks, tp) for ranks, tp in layouts]
        profiles = [path for path in found if path is not None]
    return MeasuredHardware.load(stated, profiles) if profiles else stated


def predict(
    contender: Contender,
    hardware: Hardware,
    gpus: int,
    load: Load,
    rate: float,
    seed: int,
    kv_tokens: int | None = None,
    overrun: float = 1.0,
) -> dict[str, Any]:
    """The simulator's summary of a point; empty if it has no such system, an "error" if that cannot serve it.

    Args:
        contender: whose point.
        hardware: of the machine.
        gpus: of the machine.
        load: how the point is drawn.
        rate: requests per second.
        seed: of the draw.
        kv_tokens: of a logical rank of the live server; None: what `hardware` says.
        overrun: iterations with prefill take so many times what `hardware` says.
    """
    named = simulated(contender, gpus)
    if named is None:
        return {}
    options = named.options | ({"overrun": overrun} if overrun != 1.0 else {})
    if kv_tokens is not None:
        hardware = SizedHardware(hardware, kv_tokens)
    try:
        deployment = Deployment(hardware, named.gpus, CACHED if contender.prefix_cache else 0.0)
        setup = Setup(named.system, deployment, load.slo, options, named.instances, ingress=INGRESS, egress=EGRESS)
        outcome = simulate(setup, load.draw(rate, seed), load.warm_up)
    except ValueError as error:
        return {"error": str(error)}
    records = [Record(r.index, r.arrival, r.prompt_tokens, r.output_tokens, tuple(r.times)) for r in outcome.requests]
    counted = records[len(records) - outcome.summary.counted :]
    return outcome.summary.to_json() | {
        "system": named.system,
        "format": FORMAT,
        "kv_tokens": kv_tokens,
        "overrun": overrun,
        "lengths": by_length(counted, load.slo),
    }


FIGURES = (("ttft", "p50"), ("ttft", "p95"), ("tbt", "p50"), ("tbt", "p95"))
"""What live and simulated are compared by, beside attainment."""


GOALS = {"ttft_p50": 0.05, "ttft_p95": 0.10}
"""The largest errors that a cross-check may have up to 90 % of the knee."""


def errors(live: dict[str, Any], predicted: dict[str, Any]) -> dict[str, float]:
    """(simulated - live) / live of each of `FIGURES`, as `ttft_p50`; of attainment the difference, as `attainment`.

    Args:
        live: a point's score.
        predicted: what `predict` says.
    """
    found = {
        f"{name}_{p}": predicted[name][p] / live[name][p] - 1
        for name, p in FIGURES
        if live[name].get(p) and p in predicted[name]
    }
    return {"attainment": predicted["attainment"] - live["attainment"], **found}


def mean_errors(pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> dict[str, float]:
    """`errors` over several (live, predicted) points, their means."""
    single = [errors(*pair) for pair in pairs]
    return {name: float(np.mean([one[name] for one in single])) for name in single[0] if all(name in o for o in single)}
