"""Capacity planning: which system, in which layout, for a workload, its promises and a number of GPUs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from conflux_ray.simulator.deployment import Deployment
from conflux_ray.simulator.goodput import WARM_UP, Search, goodputs
from conflux_ray.simulator.hardware import Hardware
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.run import Setup, simulate
from conflux_ray.simulator.systems.registry import SYSTEMS
from conflux_ray.simulator.workload import Workload

NODE_GPUS = 8
"""GPUs that NVLink joins; an instance does not reach beyond a node."""
CANDIDATES = ("conflux", "conflux-fcfs", "chunked", "chunked++", "distserve++")
"""Systems that a user could deploy today; Chunked Prefill on instances of one GPU is data parallelism."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to use the GPUs.

    Args:
        system: a key of `SYSTEMS`.
        options: of the system, the best of its sweep.
        base_tp: GPUs that hold one copy of the weights.
        sp: ranks that share a prefill: 1 for systems without sequence parallelism.
        gpus: of one instance.
        instances: behind the router.
        per_instance: goodput of one, requests per second.
        half_width: of its 95 % confidence interval.
    """

    system: str
    options: dict[str, Any]
    base_tp: int
    sp: int
    gpus: int
    instances: int
    per_instance: float
    half_width: float

    @property
    def goodput(self) -> float:
        """Of all instances, requests per second: the router keeps them even."""
        return self.per_instance * self.instances

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; an infinite interval is null."""
        width = self.half_width if math.isfinite(self.half_width) else None
        return {**asdict(self), "half_width": width, "goodput": self.goodput}


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer.

    Args:
        options: best first.
        rate: that is to be served, requests per second.
        attainment: of the best option at that rate, all instances behind the router, simulated.
    """

    options: tuple[Option, ...]
    rate: float
    attainment: float

    @property
    def headroom(self) -> float:
        """Goodput of the best option beyond the rate, as a share of the rate; negative if it falls short."""
        return self.options[0].goodput / self.rate - 1


def layouts(hardware: Hardware, system: str, total: int) -> list[tuple[int, int, int]]:
    """(GPUs of an instance, base TP, instances) that fit the weights, one request of the longest kind and `total` GPUs.

    Layouts that leave a GPU unused are left out as long as there is another.
    """
    found = []
    for gpus in (1, 2, 4, 8):
        if gpus > min(total, NODE_GPUS):
            continue
        for base_tp in (1, 2, 4, 8):
            if gpus % base_tp or not _fits(hardware, base_tp):
                continue
            if not system.startswith("conflux") and base_tp != _narrowest(hardware):
                continue  # their sweeps choose the tensor parallelism within an instance
            if system.startswith("conflux") and hardware.shape.kv_heads % gpus:
                continue
            if system.startswith("distserve") and gpus < 2 * base_tp:
                continue
            if system.startswith("chunked") and gpus < base_tp:
                continue
            found.append((gpus, base_tp, total // gpus))
    whole = [layout for layout in found if layout[0] * layout[2] == total]
    return whole or found


def _fits(hardware: Hardware, base_tp: int) -> bool:
    try:
        return hardware.kv_tokens(base_tp) >= 1.1 * hardware.shape.max_model_len
    except ValueError:
        return False


def _narrowest(hardware: Hardware) -> int:
    return next((tp for tp in (1, 2, 4, 8) if _fits(hardware, tp)), 0)


def make_plan(
    hardware: Hardware,
    workload: Workload,
    slo: Slo,
    total: int,
    rate: float,
    search: Search,
    jobs: int,
    systems: Sequence[str] = CANDIDATES,
    prefix_cache: float = 0.0,
) -> Plan:
    """Find the best layout of `total` GPUs.

    Args:
        hardware: of every node.
        workload: to serve.
        slo: the promises.
        total: GPUs.
        rate: to be served, requests per second.
        search: for the goodput of one instance.
        jobs: processes.
        systems: to choose from.
        prefix_cache: share of KV memory.

    Raises:
        ValueError: no layout fits the model.
    """
    found = [(system, *layout) for system in systems for layout in layouts(hardware, system, total)]
    if not found:
        raise ValueError(f"{hardware.shape.name} fits on no layout of {total} {hardware.device.name}; use more GPUs")
    cases = []
    for system, gpus, base_tp, _ in found:
        sweep = SYSTEMS[system].sweep(gpus, base_tp)
        cases.append((Setup(system, Deployment(hardware, gpus, prefix_cache), slo), sweep, workload))
    results = goodputs(cases, search, jobs, "plan")
    options = [
        Option(
            system,
            result.options,
            base_tp if not system.startswith("chunked") else gpus,
            gpus // base_tp if system.startswith("conflux") else 1,
            gpus,
            instances,
            result.mean,
            result.half_width,
        )
        for (system, gpus, base_tp, instances), result in zip(found, results, strict=True)
    ]
    # Of equals the one with fewer, larger instances is simpler to run.
    options.sort(key=lambda option: (-option.goodput, -option.gpus))
    best = options[0]
    setup = Setup(best.system, Deployment(hardware, best.gpus, prefix_cache), slo, best.options, best.instances)
    trace = workload.draw(rate, search.seconds, search.seeds, search.requests)
    return Plan(tuple(options), rate, simulate(setup, trace, WARM_UP).summary.attainment)
