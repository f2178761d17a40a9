"""The page that sets the paper's numbers beside ours. Every number on it comes from `Results`."""

from __future__ import annotations

import math

from conflux_ray.simulator.analysis import Row
from conflux_ray.simulator.claims import CLAIMS, TOLERANCE, Claim
from conflux_ray.simulator.figures import DATA_PARALLEL, ENHANCED, FCFS, MAIN, Results
from conflux_ray.simulator.hardware import MODELS


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.2f}"


def _compare(results: Results, absolute: bool) -> tuple[str, list[tuple[Claim, float]]]:
    rows, departures = [], []
    for claim in CLAIMS:
        if claim.absolute is not absolute:
            continue
        ours = claim.ours(results)
        if ours is None:
            rows.append([claim.where, claim.what, _number(claim.paper), "not run", ""])
            continue
        difference = ours / claim.paper - 1
        rows.append([claim.where, claim.what, _number(claim.paper), _number(ours), f"{difference:+.0%}"])
        if abs(difference) > TOLERANCE:
            departures.append((claim, ours))
    return _table(["Where", "What", "Paper", "Ours", "Difference"], rows), departures


def _departures(found: list[tuple[Claim, float]]) -> str:
    reasons: dict[tuple[str, str], list[str]] = {}
    for claim, ours in found:
        said = f"{claim.where}, {claim.what}: {_number(claim.paper)} in the paper, {_number(ours)} here"
        reasons.setdefault((claim.why, claim.decide), []).append(said)
    parts = []
    for (why, decide), claims in reasons.items():
        listed = "\n".join(f"* {claim}" for claim in claims)
        parts.append(f"{listed}\n\n  Most likely: {why}. What would decide it: {decide}.")
    return "\n\n".join(parts)


def _goodputs(results: Results, group: str) -> str:
    rows = [row for row in results.tables["goodput"] if row["figure"] == group]
    header = ["Model", "GPUs", "Workload", "TBT ms", "Prefix cache", "System", "Goodput, req/s", "Configuration"]
    return _table(header, [_goodput_row(row) for row in rows])


def _goodput_row(row: Row) -> list[str]:
    width = float(row["half_width"])
    interval = f" ± {width:.2f}" if math.isfinite(width) else ""
    return [
        str(row["model"]),
        f"{row['gpus']} {row['device']}",
        str(row["workload"]),
        f"{float(row['tbt_ms']):g}",
        f"{float(row['prefix_cache']):.0%}",
        str(row["system"]),
        f"{float(row['goodput']):.2f}{interval}",
        f"`{row['options']}`" if row["options"] else "",
    ]


def findings(results: Results) -> list[str]:
    """Sentences about what the numbers show beyond the paper's claims; each is computed."""
    said = []
    for model in MAIN:
        rival, best = results.best("fig12", model, DATA_PARALLEL)
        full, fcfs = results.goodput("fig12", model, "conflux"), results.goodput("fig12", model, "conflux-fcfs")
        if best and full is not None and fcfs is not None:
            said.append(
                f"{MODELS[model].name}: data parallelism ({rival}), which the paper does not compare, reaches "
                f"{best:.2f} req/s; Conflux {full:.2f} ({full / best:.2f}x), with FCFS {fcfs:.2f} ({fcfs / best:.2f}x)."
            )
        strongest_fcfs, strongest = results.best("fig12", model, FCFS[:-1]), results.best("fig12", model, ENHANCED[:-1])
        if strongest[1] and fcfs is not None:
            said.append(
                f"{MODELS[model].name}: the strongest FCFS baseline is {strongest_fcfs[0]} ({strongest_fcfs[1]:.2f}), "
                f"the strongest enhanced one {strongest[0]} ({strongest[1]:.2f})."
            )
    for device in ("h100", "h200"):
        for gpus in (2, 4, 8):
            group = "fig12" if (device, gpus) == ("h100", 4) else "degree"
            more = {"device": device, "gpus": gpus}
            conflux = results.goodput(group, "qwen-14b", "conflux", **more)
            fcfs = results.goodput(group, "qwen-14b", "conflux-fcfs", **more)
            rivals = ("chunked++", "data-parallel++")
            rival, best = results.best(group, "qwen-14b", rivals, **more)
            chunked = results.goodput(group, "qwen-14b", "chunked", **more)
            if conflux is not None and best and fcfs is not None and chunked:
                said.append(
                    f"Degree {gpus} on {device.upper()}, Qwen3-14B: Conflux {conflux:.2f} req/s, {conflux / best:.2f}x "
                    f"{rival}; with FCFS on both sides {fcfs / chunked:.2f}x Chunked Prefill."
                )
    for share in (0.0, 0.3):
        conflux = results.goodput("prefix", "qwen-14b", "conflux", prefix_cache=share)
        rival, best = results.best("prefix", "qwen-14b", ("chunked++", "data-parallel++"), prefix_cache=share)
        if conflux is not None and best:
            cache = f"{share:.0%} of KV memory as prefix cache" if share else "no prefix cache"
            said.append(
                f"Conversation trace, {cache}: Conflux {conflux:.2f} req/s, {conflux / best:.2f}x {rival} ({best:.2f})."
            )
    return said


def render(results: Results, images: str, command: str) -> str:
    """The page, Markdown.

    Args:
        results: what to show.
        images: folder of the images, relative to the page.
        command: that made it.
    """
    ratios, off_ratios = _compare(results, absolute=False)
    rates, off_rates = _compare(results, absolute=True)
    search = results.search
    workloads = "\n".join(f"* `{key}`: {name}" for key, name in results.workloads.items())
    said = "\n".join(f"* {sentence}" for sentence in findings(results))
    return f"""# The paper's evaluation, from a model

Made by `{command}`; do not edit. What is modelled and what is not: `simulator.md`.

Hardware figures are **stated, not measured as a whole**; `conflux simulate --describe-hardware` lists each with
its source.

Goodput is the largest rate at which {search.attainment:.0%} of the requests meet every cumulative deadline (section
8.1), by bisection to {search.tolerance:.0%}: the mean of {search.seeds} seeds, ± the half-width of the 95 % confidence
interval by Student's t. A seed has at least {search.seconds:g} s of arrivals and {search.requests} requests, the same
ones for every system and every rate, their gaps scaled to the rate. Every baseline runs in the best of its swept
configurations. Nothing is tuned towards the paper's numbers.

Every system plans an iteration when the one before has ended; what running ahead changes is in `simulator.md`.

Workloads:
{workloads}

The toolagent workload is a surrogate or a draw from Table 3's quantiles, never the published trace: lengths follow the
paper's quantiles, correlations and arrivals are invented.

## Ratios

{ratios}

## Where a ratio departs by more than {TOLERANCE:.0%}

{_departures(off_ratios) or "Nowhere."}

## Absolute values

{rates}

{_departures(off_rates)}

## Findings

{said or "None: the cases were not run."}

## Figures 4 and 5

![Prefill and decode under TP and SP]({images}/scaling.png)

## Table 2, Figures 13 to 15

![Prefill throughput, ablation, overlap, degree, dispatch and placement]({images}/components.png)

## Figure 12

![Attainment against rate, three models]({images}/fig12.png)

{_goodputs(results, "fig12")}

## Figure 16

![Attainment against rate, two more workloads]({images}/fig16.png)

{_goodputs(results, "fig16")}

## Figure 17

![Attainment against rate, two more TBTs]({images}/fig17.png)

{_goodputs(results, "fig17")}

## Degrees 2, 4 and 8, H100 and H200

{_goodputs(results, "degree")}

## Prefix caching

{_goodputs(results, "prefix")}

## Ablations end to end

{_goodputs(results, "ablation")}

## What a model cannot give

Table 4 (estimator accuracy) needs a GPU: `conflux profile` reports it for every profile. Table 5 (scheduler step) is
`conflux bench scheduler`. The variance in Fig. 14a is of hardware.
"""
