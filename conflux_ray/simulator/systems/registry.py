"""The systems by name: what builds them, and which configurations a fair comparison sweeps.

A system is one file with a `build` function, and one entry here. Its options are the keyword arguments of `build`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.deployment import Deployment, Instance
from conflux_ray.simulator.systems import chunked, conflux, distserve, loongserve, muxwise

Options = Mapping[str, Any]
Build = Callable[..., list[Instance]]


@dataclass(frozen=True, slots=True)
class System:
    """A serving system.

    Args:
        title: for tables and figures.
        module_build: makes the instances of one deployment.
        fixed: options that make this system out of `module_build`.
        sweep: configurations to choose the best of, for (GPUs, base TP that the weights need).
    """

    title: str
    module_build: Build
    fixed: Options = field(default_factory=dict)
    sweep: Callable[[int, int], list[dict[str, Any]]] = lambda gpus, base_tp: [{}]

    def options(self) -> list[str]:
        """Names of the options that may be set."""
        names = [p.name for p in inspect.signature(self.module_build).parameters.values() if p.kind is p.KEYWORD_ONLY]
        return [name for name in names if name not in self.fixed]

    def build(self, clock: Clock, deployment: Deployment, options: Options) -> list[Instance]:
        """The instances of one deployment.

        Raises:
            ValueError: an option is unknown or cannot be set for this system.
        """
        unknown = set(options) - set(self.options())
        if unknown:
            known = ", ".join(self.options()) or "none"
            raise ValueError(f"{self.title}: options {sorted(unknown)} are unknown; there are: {known}")
        return self.module_build(clock, deployment, **{**options, **self.fixed})


BUDGETS = (512, 1024, 2048, 4096, 8192)
"""Token budgets that are swept for Chunked Prefill."""


def _conflux(gpus: int, base_tp: int) -> list[dict[str, Any]]:
    return [{"base_tp": base_tp}]


def _chunked(gpus: int, base_tp: int) -> list[dict[str, Any]]:
    return [{"budget": budget} for budget in BUDGETS]


def _distserve(gpus: int, base_tp: int) -> list[dict[str, Any]]:
    """Splits whose engines are as wide as the weights need or as wide as their side, TP 1, 2, 4 or 8."""
    splits = {
        f"{prefill // p}x{p}:{(gpus - prefill) // d}x{d}"
        for prefill in range(base_tp, gpus, base_tp)
        for p in {base_tp, prefill} & {1, 2, 4, 8}
        for d in {base_tp, gpus - prefill} & {1, 2, 4, 8}
    }
    return [{"split": split} for split in sorted(splits)]


def _loongserve(gpus: int, base_tp: int) -> list[dict[str, Any]]:
    return [{"base_tp": base_tp, "batch": batch} for batch in (8192, 32768)]


def _muxwise(gpus: int, base_tp: int) -> list[dict[str, Any]]:
    return [{"batch": batch} for batch in (4096, 16384)]


def _data_parallel(gpus: int, base_tp: int) -> list[dict[str, Any]]:
    return [{"tp": base_tp, "budget": budget} for budget in BUDGETS]


SYSTEMS: dict[str, System] = {
    "conflux": System("ConfluxServe", conflux.build, {"policy": "slo"}, _conflux),
    "conflux-fcfs": System("ConfluxServe-FCFS", conflux.build, {"policy": "fcfs"}, _conflux),
    "conflux-srpt": System("ConfluxServe-SRPT", conflux.build, {"policy": "srpt"}, _conflux),
    "chunked": System("Chunked Prefill", chunked.build, {"policy": "fcfs"}, _chunked),
    "chunked++": System("Chunked++", chunked.build, {"policy": "srpt"}, _chunked),
    "chunked-priority": System("vLLM by priority", chunked.build, {"policy": "priority"}, _chunked),
    "distserve": System("DistServe", distserve.build, {"policy": "fcfs"}, _distserve),
    "distserve++": System("DistServe++", distserve.build, {"policy": "srpt"}, _distserve),
    "loongserve": System("LoongServe", loongserve.build, {"policy": "fcfs"}, _loongserve),
    "loongserve++": System("LoongServe++", loongserve.build, {"policy": "srpt"}, _loongserve),
    "muxwise": System("MuxWise-FCFS", muxwise.build, {"policy": "fcfs"}, _muxwise),
    "muxwise++": System("MuxWise++", muxwise.build, {"policy": "srpt"}, _muxwise),
    "data-parallel": System("Data parallel", chunked.build, {"policy": "fcfs"}, _data_parallel),
    "data-parallel++": System("Data parallel++", chunked.build, {"policy": "srpt"}, _data_parallel),
    "data-parallel-priority": System(
        "vLLM by priority, replicas", chunked.build, {"policy": "priority"}, _data_parallel
    ),
}
"""By name. `++` orders prefills by remaining tokens, as in section 8.1; `-priority` is the nearest that vLLM has."""
