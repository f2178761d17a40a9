"""Figures of live runs. Matplotlib is imported here only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
import numpy as np
from matplotlib import pyplot as plt

from conflux_ray.bench.live.forecast import Forecast
from conflux_ray.bench.live.point import Point, pooled
from conflux_ray.bench.live.score import wilson
from conflux_ray.bench.live.timeline import CAUSES, KINDS, LEAST_GAP, Iteration, gap_between


def attainment(axis: Any, points: Sequence[Point], label: str, color: Any = None) -> None:
    """Attainment against rate with its intervals."""
    rows = pooled(points)
    if not rows:
        return
    shares = [100 * good / count for _, good, count in rows]
    ends = [wilson(good, count) for _, good, count in rows]
    errors = [
        [s - 100 * low for s, (low, _) in zip(shares, ends, strict=True)],
        [100 * high - s for s, (_, high) in zip(shares, ends, strict=True)],
    ]
    # Rounding may put an end of the interval a hair's breadth inside the share itself.
    axis.errorbar(
        [r for r, _, _ in rows], shares, yerr=np.maximum(0, errors), marker="o", capsize=3, label=label, color=color
    )


def finish_attainment(axis: Any, goal: float) -> None:
    """The line to reach, and labels."""
    axis.axhline(100 * goal, color="gray", linewidth=0.8)
    axis.set(xlabel="requests/s", ylabel="attainment, %", ylim=(None, 101))
    axis.grid(alpha=0.3)
    axis.legend(fontsize=8)


def _distribution(axis: Any, groups: Mapping[str, np.ndarray], limit: float, unit: str, title: str) -> None:
    for label, values in groups.items():
        if len(values):
            ordered = np.sort(values)
            axis.plot(ordered, np.linspace(0, 1, len(ordered)), label=label)
    axis.axvline(limit, color="gray", linewidth=0.8)
    axis.set(title=title, xlabel=unit, ylabel="share", ylim=(0, 1.01))
    axis.set_xscale("symlog", linthresh=limit / 10)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    if groups:
        axis.legend(fontsize=7)


def first_tokens(points: Sequence[Point]) -> np.ndarray:
    """TTFT of all counted requests that got a token, seconds."""
    return np.array([r.times[0] - r.arrival for p in points for r in p.counted if r.times])


def gaps(points: Sequence[Point]) -> np.ndarray:
    """Between the tokens of all counted requests, milliseconds."""
    parts = [1e3 * np.diff(r.times) for p in points for r in p.counted if len(r.times) > 1]
    return np.concatenate(parts) if parts else np.array([])


def timeline(axis: Any, point: Point, title: str) -> None:
    """TTFT of every request by its arrival, and how many ran."""
    for compliant, color, label in ((True, "#2166ac", "on time"), (False, "#b2182b", "late")):
        mine = [r for r in point.records if r.times and r.compliant(point.slo) == compliant]
        axis.plot(
            [r.arrival for r in mine],
            [r.times[0] - r.arrival for r in mine],
            ".",
            markersize=4,
            color=color,
            label=label,
        )
    axis.axhline(point.slo.ttft, color="gray", linewidth=0.8)
    if point.warm_up:
        axis.axvspan(0, point.records[point.warm_up].arrival, color="gray", alpha=0.15)
    axis.set(title=title, xlabel="arrival, s", ylabel="TTFT, s")
    axis.legend(fontsize=7, loc="upper left")
    starts = np.sort([r.arrival for r in point.records])
    ends = np.sort([r.times[-1] for r in point.records if r.times])
    grid = np.linspace(0, max([*starts[-1:], *ends[-1:]]), 400)
    running = axis.twinx()
    counts = np.searchsorted(starts, grid, "right") - np.searchsorted(ends, grid, "right")
    running.plot(grid, counts, color="black", linewidth=0.7, alpha=0.6)
    running.set_ylabel("running")


def overview(points: Sequence[Point], path: Path, goal: float, label: str) -> None:
    """Attainment, both distributions and the timeline of the highest rate."""
    usable = [p for p in points if not p.invalid]
    if not usable:
        return
    figure, axes = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    attainment(axes[0, 0], points, label)
    finish_attainment(axes[0, 0], goal)
    by_rate = {f"{rate:g}/s": [p for p in usable if p.rate == rate] for rate in sorted({p.rate for p in usable})}
    slo = usable[0].slo
    _distribution(axes[0, 1], {k: first_tokens(v) for k, v in by_rate.items()}, slo.ttft, "s", "TTFT")
    _distribution(axes[1, 0], {k: gaps(v) for k, v in by_rate.items()}, 1e3 * slo.tbt, "ms", "between tokens")
    last = max(usable, key=lambda p: (p.rate, -p.seed))
    timeline(axes[1, 1], last, f"{last.rate:g} requests/s, seed {last.seed}")
    _save(figure, path)


def comparison(contenders: Mapping[str, Sequence[Point]], path: Path, goal: float) -> None:
    """Attainment of all contenders; their distributions and timelines at the highest rate that most of them have, or at
    their own highest where they do not have that one."""
    usable = {name: [p for p in points if not p.invalid] for name, points in contenders.items()}
    usable = {name: points for name, points in usable.items() if points}
    if not usable:
        return
    rates = [rate for points in usable.values() for rate in {p.rate for p in points}]
    common = max(set(rates), key=lambda rate: (rates.count(rate), rate))
    there = {}
    for name, points in usable.items():
        own = {p.rate for p in points}
        rate = common if common in own else max(own)
        there[f"{name}, {rate:g}/s"] = [p for p in points if p.rate == rate]
    lines = 1 + -(-len(there) // 3)
    figure, axes = plt.subplots(lines, 3, figsize=(15, 4 * lines), layout="constrained", squeeze=False)
    for name, points in usable.items():
        attainment(axes[0, 0], points, name)
    finish_attainment(axes[0, 0], goal)
    slo = next(iter(usable.values()))[0].slo
    _distribution(axes[0, 1], {k: first_tokens(v) for k, v in there.items()}, slo.ttft, "s", "TTFT")
    _distribution(axes[0, 2], {k: gaps(v) for k, v in there.items()}, 1e3 * slo.tbt, "ms", "between tokens")
    places = list(axes[1:].flat)
    for axis, (name, points) in zip(places, there.items(), strict=False):
        timeline(axis, points[0], f"{name}, seed {points[0].seed}")
    for axis in places[len(there) :]:
        axis.axis("off")
    _save(figure, path)


COLORS = 10
"""That Matplotlib has before it begins again."""
BELOW = 0.35
"""Attainment so far below the goal is of no interest."""


def forecasts(found: Sequence[Forecast], measured: Mapping[str, Sequence[Point]], path: Path, goal: float) -> None:
    """Attainment against rate as simulated, and the points of the same contenders that were measured.

    Args:
        found: a line each, pooled over the seeds.
        measured: by contender; points that are invalid are hollow, and what was cut counts as missed.
        path: of the picture.
        goal: attainment that passes.
    """
    figure, axis = plt.subplots(figsize=(9, 6), layout="constrained")
    for number, one in enumerate(o for o in found if o.attained):
        rates = sorted(one.attained)
        style = "-" if number < COLORS else "--"
        (line,) = axis.plot(rates, [100 * one.pooled(rate) for rate in rates], style, label=one.name)
        color = line.get_color()
        for point in measured.get(one.name, ()):
            good, count = sum(point.outcomes), len(point.outcomes)
            low, high = wilson(good, count)
            axis.errorbar(
                point.rate,
                100 * good / count,
                yerr=[[max(0.0, 100 * (good / count - low))], [max(0.0, 100 * (high - good / count))]],
                marker="o",
                capsize=3,
                color=color,
                markerfacecolor="white" if point.invalid else color,
            )
    axis.set_title(
        "simulated; measured points with their 95 % intervals, hollow if invalid" if measured else "simulated"
    )
    finish_attainment(axis, goal)
    axis.set_ylim(bottom=max(axis.get_ylim()[0], 100 * (goal - BELOW)))
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


BINS = 120
"""Of the time axis of an iteration log."""


def iteration_log(iterations: Sequence[Iteration], tbt: float, path: Path) -> None:
    """An iteration log: what ran when, measured against predicted, gaps, and prompt tokens of an iteration."""
    figure, axes = plt.subplots(2, 2, figsize=(12, 8))
    zero = iterations[0].began
    busy, kinds, gaps, tokens = axes.flat
    length = max((iterations[-1].end - zero) / BINS, 1e-6)
    edges = length * np.arange(BINS + 1)
    spent = []
    for kind in KINDS:
        mine = [i for i in iterations if i.kind == kind]
        spent.append(np.histogram([i.began - zero for i in mine], edges, weights=[i.elapsed for i in mine])[0])
        predicted = [i for i in mine if i.predicted]
        kinds.scatter(
            [1e3 * (i.predicted or 0.0) for i in predicted], [1e3 * i.elapsed for i in predicted], s=3, label=kind
        )
    busy.stackplot(edges[:-1], 100 * np.array(spent) / length, labels=KINDS, step="post", alpha=0.7)
    waiting = busy.twinx()
    places = np.clip(np.searchsorted(edges, [i.began - zero for i in iterations], "right") - 1, 0, BINS - 1)
    most_waiting = np.zeros(BINS)
    np.maximum.at(most_waiting, places, [i.pending for i in iterations])
    waiting.step(edges[:-1], most_waiting, where="post", color="black", linewidth=0.8)
    waiting.set(ylabel="most prompts waiting (line)", ylim=(0, 2 * max(most_waiting.max(), 1)))
    busy.set(title="Device time by iteration", xlabel="s", ylabel=f"% of each {length:.1f} s", ylim=(0, 150))
    busy.legend(fontsize=7, loc="upper left")
    most = 1e3 * max(i.elapsed for i in iterations)
    kinds.plot([0, most], [0, most], color="gray", linewidth=0.8)
    kinds.axhline(1e3 * tbt, color="gray", linewidth=0.8, linestyle=":")
    kinds.set(title="Measured against predicted", xlabel="predicted, ms", ylabel="measured, ms")
    kinds.legend(fontsize=7)
    between = [gap for a, b in pairwise(iterations) if (gap := gap_between(a, b)).seconds > LEAST_GAP]
    bins = np.concatenate([[0.0], np.geomspace(1e-4, 10.0, 40)])
    for cause in CAUSES:
        gaps.hist([g.seconds for g in between if g.cause == cause], bins, histtype="step", label=cause)
    gaps.set_xscale("symlog", linthresh=1e-4)
    gaps.set_yscale("symlog", linthresh=1)
    gaps.set(title="Gaps between iterations", xlabel="s", ylabel="iterations", xlim=(0, 10))
    gaps.legend(fontsize=7)
    tokens.hist([i.prefill for i in iterations if i.chunks], 50)
    tokens.set(title="Prompt tokens of an iteration with any", xlabel="tokens", ylabel="iterations")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
