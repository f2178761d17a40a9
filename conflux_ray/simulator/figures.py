"""The paper's figures and tables that a model can give: numbers (this file), plots (`plots.py`), page (`page.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from conflux_ray.simulator import analysis
from conflux_ray.simulator.analysis import Row
from conflux_ray.simulator.deployment import Deployment
from conflux_ray.simulator.goodput import WARM_UP, Goodput, Search, goodputs
from conflux_ray.simulator.hardware import DEVICES, MODELS, Hardware, StatedHardware, narrowest_tp
from conflux_ray.simulator.parallel import run_all
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.run import Setup, simulate
from conflux_ray.simulator.systems.registry import SYSTEMS
from conflux_ray.simulator.workload import Workload

FCFS = ("chunked", "muxwise", "distserve", "loongserve", "conflux-fcfs")
ENHANCED = ("chunked++", "muxwise++", "distserve++", "loongserve++", "conflux")
DATA_PARALLEL = ("data-parallel", "data-parallel++")
MAIN = {"llama-8b": (4, Slo(1.0, 0.05)), "qwen-14b": (4, Slo(2.0, 0.1)), "qwen-32b": (8, Slo(2.0, 0.1))}
"""Section 8.1: GPUs and promises of each model."""
CURVE = (0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.4)
"""Rates of an attainment curve, relative to the goodput of its system."""
AT_THE_END = {"run_ahead": 1}
"""Of every system that could run ahead: the paper's systems are compared by what they schedule, so each of them plans
when the iteration before has ended. Not all of them are engines of today that run ahead."""
TRACE_FILES = {
    "toolagent": "toolagent_surrogate.jsonl",
    "synthetic": "synthetic_trace.jsonl",
    "conversation": "conversation_trace.jsonl",
}


@dataclass(frozen=True, slots=True)
class Case:
    """One goodput to find.

    Args:
        group: the figure it belongs to.
        model: a key of `MODELS`.
        device: a key of `DEVICES`.
        gpus: of the instance.
        workload: a key of `TRACE_FILES` or of Table 3.
        slo: the promises.
        system: a key of `SYSTEMS`.
        options: beside the sweep.
        prefix_cache: share of KV memory.
        label: what to call it, if not by its system.
    """

    group: str
    model: str
    device: str
    gpus: int
    workload: str
    slo: Slo
    system: str
    options: tuple[tuple[str, Any], ...] = ()
    prefix_cache: float = 0.0
    label: str = ""

    @property
    def title(self) -> str:
        return self.label or SYSTEMS[self.system].title


@dataclass(slots=True)
class Results:
    """Everything that the page shows.

    Args:
        tables: rows by name.
        goodputs: of each case.
        workloads: what each workload was drawn from.
        search: how goodput was searched.
        seconds: of wall time.
    """

    tables: dict[str, list[Row]] = field(default_factory=dict)
    goodputs: list[tuple[Case, Goodput]] = field(default_factory=list)
    workloads: dict[str, str] = field(default_factory=dict)
    search: Search = field(default_factory=Search)
    seconds: float = 0.0

    def goodput(self, group: str, model: str, system: str, **more: Any) -> float | None:
        """The mean of the case with these fields; None if there is none."""
        for case, result in self.goodputs:
            fits = (case.group, case.model, case.system) == (group, model, system)
            if fits and all(getattr(case, name) == value for name, value in more.items()):
                return result.mean
        return None

    def best(self, group: str, model: str, systems: Sequence[str], **more: Any) -> tuple[str, float]:
        """The system with the highest goodput, and that; ("", 0) if none was run."""
        found = [(s, self.goodput(group, model, s, **more)) for s in systems]
        known = [(s, value) for s, value in found if value is not None]
        return max(known, key=lambda entry: entry[1], default=("", 0.0))


class Workloads:
    """The workloads by name: a trace where its file is there, else the quantiles of Table 3.

    Args:
        folder: of the trace files.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._made: dict[tuple[str, int], Workload] = {}

    def get(self, name: str, max_model_len: int) -> Workload | None:
        """The workload; None if it needs a file that is not there."""
        key = (name, max_model_len)
        if key not in self._made:
            path = self._folder / TRACE_FILES[name] if self._folder and name in TRACE_FILES else None
            if path is not None and path.exists():
                self._made[key] = Workload.from_file(path, max_model_len)
            elif name == "conversation":
                return None
            else:
                self._made[key] = Workload.from_table(name, max_model_len)
        return self._made[key]


def cases_of_the_paper() -> list[Case]:
    """Figs. 12, 16 and 17."""
    cases = [
        Case("fig12", model, "h100", gpus, "toolagent", slo, system)
        for model, (gpus, slo) in MAIN.items()
        for system in (*FCFS, *ENHANCED, *DATA_PARALLEL)
    ]
    cases += [
        Case("fig16", "qwen-14b", "h100", 4, workload, Slo(2.0, 0.1), system)
        for workload in ("synthetic", "qwen-a")
        for system in ENHANCED
    ]
    cases += [
        Case("fig17", "qwen-14b", "h100", 4, "toolagent", Slo(2.0, tbt), system)
        for tbt in (0.15, 0.05)
        for system in ENHANCED
    ]
    return cases


def cases_beyond_the_paper() -> list[Case]:
    """Degrees 2, 4 and 8 on both devices, what a user would choose instead, prefix caching, ablations end to end."""
    slo = Slo(2.0, 0.1)
    rivals = ("chunked", "chunked++", "data-parallel++", "conflux-fcfs", "conflux-srpt", "conflux")
    cases = [
        Case("degree", "qwen-14b", device, gpus, "toolagent", slo, system)
        for device, degrees in (("h100", (2, 8)), ("h200", (2, 4, 8)))
        for gpus in degrees
        for system in rivals
    ]
    cases += [
        Case("prefix", "qwen-14b", "h100", 4, "conversation", slo, system, prefix_cache=share)
        for share in (0.0, 0.3)
        for system in ("chunked++", "data-parallel++", "conflux")
    ]
    cases += [
        Case("ablation", "qwen-14b", "h100", 4, "toolagent", slo, "conflux", (("without", name),), label=label)
        for name, label in (
            ("none", "Conflux"),
            ("overlap", "w/o overlap"),
            ("phase", "w/o overlap, phase-specific"),
            ("cobatch", "w/o overlap, phase-specific, co-batching"),
            ("even", "even dispatch"),
            ("skewed", "packed decodes"),
        )
    ]
    return cases


def _sweep(case: Case, hardware: Hardware) -> list[dict[str, Any]]:
    sweep = SYSTEMS[case.system].sweep(case.gpus, narrowest_tp(hardware, case.gpus))
    return [{**options, **dict(case.options)} for options in sweep]


def _setup(case: Case, hardware: Hardware, options: dict[str, Any]) -> Setup:
    if AT_THE_END.keys() <= set(SYSTEMS[case.system].options()):
        options = {**AT_THE_END, **options}
    return Setup(case.system, Deployment(hardware, case.gpus, case.prefix_cache), case.slo, options)


def _attainment(task: tuple[Setup, Workload, float, Search]) -> float:
    """Of the first seed."""
    setup, workload, rate, search = task
    return simulate(setup, workload.draw(rate, search.seconds, 0, search.requests), WARM_UP).summary.attainment


def make(
    search: Search,
    jobs: int,
    traces: Path | None,
    cases: Sequence[Case],
    hardware_of: Callable[[str, str], Hardware] | None = None,
) -> Results:
    """All numbers.

    Args:
        search: for every goodput.
        jobs: processes.
        traces: folder of the trace files.
        cases: whose goodput to find.
        hardware_of: of (model, device); stated figures by default.
    """
    started = time.perf_counter()
    hardware_of = hardware_of or (lambda model, device: StatedHardware(MODELS[model], DEVICES[device]))
    workloads = Workloads(traces)
    results = Results(search=search)
    hardware = hardware_of("qwen-14b", "h100")
    for name, function in (
        ("fig3c", analysis.chunk_sizes),
        ("fig4", analysis.prefill_scaling),
        ("fig5", analysis.decode_scaling),
        ("fig13", analysis.ablation),
        ("fig14a", analysis.overlap),
        ("fig14b", analysis.sp_scaling),
        ("fig15a", analysis.dispatch),
        ("fig15b", analysis.placement),
    ):
        results.tables[name] = function(hardware)
    toolagent = workloads.get("toolagent", hardware.shape.max_model_len)
    assert toolagent is not None
    prompts = [r.prompt_tokens for r in toolagent.draw(5.0, 400.0, 0).requests]
    results.tables["table2"] = [
        row for tbt in (0.05, 0.1) for row in analysis.prefill_throughput(hardware, 4, 96, prompts, tbt)
    ]
    tasks, kept = [], []
    for case in cases:
        workload = workloads.get(case.workload, MODELS[case.model].max_model_len)
        if workload is None:
            continue
        results.workloads[case.workload] = workload.name
        machine = hardware_of(case.model, case.device)
        kept.append(case)
        tasks.append((_setup(case, machine, {}), _sweep(case, machine), workload))
    found = goodputs(tasks, search, jobs, "goodput")
    results.goodputs = list(zip(kept, found, strict=True))
    results.tables["goodput"] = [_row(case, result) for case, result in results.goodputs]
    results.tables["curves"] = _curves(results, tasks, search, jobs)
    results.seconds = time.perf_counter() - started
    return results


def _row(case: Case, result: Goodput) -> Row:
    row: Row = {
        "figure": case.group,
        "model": MODELS[case.model].name,
        "device": DEVICES[case.device].name,
        "gpus": case.gpus,
        "workload": case.workload,
        "tbt_ms": 1e3 * case.slo.tbt,
        "prefix_cache": case.prefix_cache,
        "system": case.title,
        "goodput": result.mean,
        "half_width": result.half_width,
        "options": " ".join(f"{name}={value}" for name, value in result.options.items() if name not in AT_THE_END),
    }
    return row


def _curves(
    results: Results, tasks: Sequence[tuple[Setup, list[dict[str, Any]], Workload]], search: Search, jobs: int
) -> list[Row]:
    """Attainment against rate for the systems of Figs. 12, 16 and 17, the first seed."""
    points, runs = [], []
    for (case, result), (setup, _, workload) in zip(results.goodputs, tasks, strict=True):
        if case.group not in ("fig12", "fig16", "fig17") or not result.mean:
            continue
        chosen = replace(setup, options=result.options)
        for factor in CURVE:
            points.append((case, factor * result.mean))
            runs.append((chosen, workload, factor * result.mean, search))
    attained = run_all(_attainment, runs, jobs, "curves")
    return [
        {
            "figure": case.group,
            "model": MODELS[case.model].name,
            "workload": case.workload,
            "tbt_ms": 1e3 * case.slo.tbt,
            "system": case.title,
            "rate": rate,
            "attainment": value,
        }
        for (case, rate), value in zip(points, attained, strict=True)
    ]
