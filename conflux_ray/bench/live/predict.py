"""What the simulator says of a point before it is measured: the same requests on the same promises."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conflux_ray.bench.live.contenders import Contender, simulated
from conflux_ray.bench.live.point import Load
from conflux_ray.profiling.registry import gpu_slug, shipped_profile
from conflux_ray.simulator.deployment import Deployment
from conflux_ray.simulator.hardware import DEVICES, MODELS, Hardware, MeasuredHardware, StatedHardware
from conflux_ray.simulator.run import Setup, simulate

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
        profiles: measured ones that take the place of stated figures; none: those that are shipped for this machine.

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
        layouts = [(ranks, tp) for ranks in (1, 2, 4, 8) for tp in (1, 2, 4, 8) if ranks * tp == len(gpus)]
        found = [shipped_profile(model, gpu_slug(gpus[0]["name"]), ranks, tp) for ranks, tp in layouts]
        profiles = [path for path in found if path is not None]
    return MeasuredHardware.load(stated, profiles) if profiles else stated


def predict(contender: Contender, hardware: Hardware, gpus: int, load: Load, rate: float, seed: int) -> dict[str, Any]:
    """The simulator's summary of a point; empty if it has no such system, or cannot serve it."""
    named = simulated(contender, gpus)
    if named is None:
        return {}
    system, options, count = named
    try:
        setup = Setup(system, Deployment(hardware, count, 0.0), load.slo, options)
        return simulate(setup, load.draw(rate, seed), load.warm_up).summary.to_json() | {"system": system}
    except ValueError as error:
        return {"error": str(error)}
