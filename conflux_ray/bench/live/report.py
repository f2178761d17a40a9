"""Several servers side by side: attainment, paired differences, what the simulator says, and the largest rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from conflux_ray.bench.live import timeline
from conflux_ray.bench.live.point import Point, pooled
from conflux_ray.bench.live.predict import FIGURES, GOALS, mean_errors
from conflux_ray.bench.live.score import by_length, paired_difference, wilson
from conflux_ray.bench.live.tables import interval, lengths_table, markdown, remarks, seconds, share


@dataclass(slots=True)
class Entry:
    """A contender in a report.

    Args:
        name: of it.
        kind: "vllm" or "conflux".
        points: valid or not.
        predictions: the simulator's summary by (rate, seed): `predict.predict`.
        about: versions, machine, commands: as its file has them.
        timelines: of its iteration logs, by (rate, seed): the log, `timeline.summarize` and `timeline.misses`.
    """

    name: str
    kind: str
    points: list[Point]
    predictions: dict[tuple[float, int], dict[str, Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    timelines: dict[tuple[float, int], dict[str, Any]] = field(default_factory=dict)

    @property
    def usable(self) -> list[Point]:
        """Points whose attainment is what it says."""
        return [p for p in self.points if not p.invalid and not p.stopped]

    def at(self, rate: float) -> list[Point]:
        """Usable points of a rate."""
        return [p for p in self.usable if p.rate == rate]

    def attainment(self, rate: float) -> float | None:
        """Over all seeds of a rate; None without a usable point."""
        outcomes = [ok for p in self.at(rate) for ok in p.outcomes]
        return sum(outcomes) / len(outcomes) if outcomes else None

    def predicted(self, rate: float) -> float | None:
        """Mean of the simulator's attainments of the seeds that were measured; None without any."""
        values = [predicted["attainment"] for _, predicted in self.pairs(rate)]
        return sum(values) / len(values) if values else None

    def pairs(self, rate: float) -> list[tuple[Point, dict[str, Any]]]:
        """Usable points of a rate with what was predicted for them."""
        points = self.at(rate)
        return [(p, self.predictions[rate, p.seed]) for p in points if (rate, p.seed) in self.predictions]


def largest_rate(points: Sequence[Point], goal: float) -> tuple[float, float | None]:
    """The largest measured rate that attains the goal with all smaller ones, and the knee between it and the next.

    Returns:
        0 if the smallest rate misses; None for the knee if no measured rate lies on its other side.
    """
    rows = [(rate, good / count) for rate, good, count in pooled(points)]
    reached = 0.0
    before: tuple[float, float] | None = None
    for rate, attained in rows:
        if attained < goal:
            if before is None:
                return 0.0, None
            low, high = before
            return reached, low + (rate - low) * (high - goal) / (high - attained)
        reached, before = rate, (rate, attained)
    return reached, None


def pairs(ours: Entry, theirs: Entry, rate: float) -> tuple[float, float, float, int] | None:
    """Paired difference of two contenders at a rate over the seeds that both have; None if there is none.

    Returns:
        ours - theirs, the ends of its 95 % interval, and the number of requests.
    """
    mine = {p.seed: p for p in ours.at(rate)}
    other = {p.seed: p for p in theirs.at(rate)}
    seeds = sorted(mine.keys() & other.keys())
    if not seeds:
        return None
    first = [ok for seed in seeds for ok in mine[seed].outcomes]
    second = [ok for seed in seeds for ok in other[seed].outcomes]
    return (*paired_difference(first, second), len(first))


def rates_of(entries: Sequence[Entry]) -> list[float]:
    """All rates with a usable point."""
    return sorted({p.rate for e in entries for p in e.usable})


def attainment_table(entries: Sequence[Entry]) -> str:
    """A row for each rate and contender."""
    rows = []
    for rate in rates_of(entries):
        for entry in entries:
            points = entry.at(rate)
            if not points:
                continue
            outcomes = [ok for p in points for ok in p.outcomes]
            predicted = entry.predicted(rate)
            scores = [p.score() for p in points]
            # Percentiles of several seeds are shown as the worst of them.
            ttft = {k: max(s["ttft"].get(k, math.nan) for s in scores) for k in ("p50", "p95", "p99")}
            tbt = {k: max(s["tbt"].get(k, math.nan) for s in scores) for k in ("p50", "p95", "p99")}
            rows.append(
                [
                    f"{rate:g}",
                    entry.name,
                    f"{len(points)}",
                    f"{len(outcomes)}",
                    share(sum(outcomes) / len(outcomes)),
                    interval(wilson(sum(outcomes), len(outcomes))),
                    "-" if predicted is None else share(predicted),
                    seconds(ttft, "p50", "p95", "p99"),
                    seconds(tbt, "p50", "p95", "p99", scale=1e3, digits=0),
                ]
            )
    header = (
        "Rate",
        "Contender",
        "Seeds",
        "Counted",
        "Attained, %",
        "95 %",
        "Simulated, %",
        "TTFT P50/P95/P99, s",
        "TBT P50/P95/P99, ms",
    )
    return markdown(header, rows, left=2) if rows else "no valid point"


def latency_table(entries: Sequence[Entry]) -> str:
    """Live beside simulated: attainment, TTFT and TBT, and the simulator's error; "" without predictions.

    Means over the seeds that have both; the error is the mean of the seeds' errors.
    """
    rows = []
    for rate in rates_of(entries):
        for entry in entries:
            pairs = [(p.score(), predicted) for p, predicted in entry.pairs(rate)]
            if not pairs:
                continue
            error = mean_errors(pairs)
            live, said = (fmean(s["attainment"] for s in side) for side in zip(*pairs, strict=True))
            row = [f"{rate:g}", entry.name, f"{len(pairs)}"]
            row.append(f"{share(live)} / {share(said)} ({100 * error['attainment']:+.1f})")
            for name, p in FIGURES:
                if f"{name}_{p}" not in error:
                    row.append("-")
                    continue
                figures = [1e3 * fmean(s[name][p] for s in side) for side in zip(*pairs, strict=True)]
                row.append(f"{figures[0]:.0f} / {figures[1]:.0f} ({100 * error[f'{name}_{p}']:+.0f} %)")
            met = all(abs(error.get(name, math.inf)) <= most for name, most in GOALS.items())
            rows.append([*row, "yes" if met else "no"])
    if not rows:
        return ""
    names = [f"{name.upper()} {p.upper()}, ms" for name, p in FIGURES]
    return "Live / simulated (error of the simulation):\n\n" + markdown(
        ("Rate", "Contender", "Seeds", "Attained, % (points)", *names, "TTFT within 5 % / 10 %"), rows, left=2
    )


def predicted_lengths_table(entry: Entry) -> str:
    """Live beside simulated by prompt length, the seeds of a rate together; "" without predictions."""
    rows = []
    for rate in rates_of([entry]):
        pairs = entry.pairs(rate)
        groups = {
            g["above"]: g
            for g in (by_length([r for p, _ in pairs for r in p.counted], pairs[0][0].slo) if pairs else [])
        }
        for above, group in groups.items():
            said = [g for _, predicted in pairs for g in predicted["lengths"] if g["above"] == above]
            counted, compliant = (sum(g[name] for g in said) for name in ("counted", "compliant"))
            # A percentile of several seeds is the mean of theirs.
            served = [g["ttft"] for g in said if g["ttft"]]
            ttft = {p: fmean(one[p] for one in served) for p in ("p50", "p95")} if served else {}
            rows.append(
                [
                    f"{rate:g}",
                    f"{above + 1} to {group['up_to']}" if group["up_to"] else f"over {above}",
                    f"{group['counted']}",
                    f"{share(group['attainment'])} / {share(compliant / counted)}",
                    f"{seconds(group['ttft'], 'p50')} / {seconds(ttft, 'p50')}",
                    f"{seconds(group['ttft'], 'p95')} / {seconds(ttft, 'p95')}",
                ]
            )
    header = ("Rate", "Prompt tokens", "Counted", "Attained, live / simulated, %", "TTFT P50, s", "TTFT P95, s")
    return markdown(header, rows, left=0) if rows else ""


def pairs_table(entries: Sequence[Entry]) -> str:
    """Each Conflux contender against each other server on the same requests; "" if there is nothing to pair."""
    rows = []
    ours = [e for e in entries if e.kind == "conflux"]
    for rate in rates_of(entries):
        for entry in ours:
            for other in entries:
                # Two of ours are compared once, in the order of the list.
                if other is entry or (other.kind == "conflux" and entries.index(other) < entries.index(entry)):
                    continue
                found = pairs(entry, other, rate)
                if found is not None:
                    difference, low, high, count = found
                    sign = "" if low <= 0 <= high else ("better" if low > 0 else "worse")
                    rows.append(
                        [
                            f"{rate:g}",
                            entry.name,
                            other.name,
                            f"{count}",
                            f"{100 * difference:+.1f}",
                            f"[{100 * low:+.1f}, {100 * high:+.1f}]",
                            sign,
                        ]
                    )
    header = ("Rate", "Contender", "against", "Pairs", "Difference, points", "95 %", "")
    return markdown(header, rows, left=3) if rows else ""


def rates_table(entries: Sequence[Entry], goal: float) -> str:
    """What each contender carries."""
    rows = []
    for entry in entries:
        reached, knee = largest_rate(entry.points, goal)
        tried = [p.rate for p in entry.usable]
        rows.append(
            [
                entry.name,
                f"{reached:g}" if reached else "none",
                "-" if knee is None else f"{knee:.2f}",
                ", ".join(f"{rate:g}" for rate in sorted(set(tried))) or "-",
                f"{sum(p.invalid is not None for p in entry.points)}",
            ]
        )
    header = (
        "Contender",
        f"Largest rate with {goal:.0%}",
        f"{goal:.0%} between rates, at",
        "Rates measured",
        "Invalid points",
    )
    return markdown(header, rows, left=1)


def compare_text(entries: Sequence[Entry], settings: Mapping[str, Any], title: str, short: bool) -> str:
    """The report.

    Args:
        entries: contenders.
        settings: of the folder.
        title: its first line.
        short: only the tables that belong on a terminal.
    """
    goal = settings["attainment"]
    slo = settings["slo"]
    parts = [
        title,
        "",
        f"{settings['workload']}, TTFT {slo['ttft']:g} s, TBT {1e3 * slo['tbt']:g} ms, {settings['seconds']:g} s of "
        f"arrivals a point ({settings['arrivals']}), first {settings['warm_up']:.0%} of the requests not counted. "
        f"Intervals of attainment are Wilson's; differences are paired by request, blocks of neighbours bootstrapped.",
        "",
    ]
    said = [f"* {entry.name}, {line}" for entry in entries for line in remarks(entry.points)]
    if said:
        parts += [*said, ""]
    if not short:
        for entry in entries:
            parts += [f"## {entry.name}", ""]
            parts += [f"    {' '.join(command)}" for command in entry.about.get("commands", [])]
            if entry.about.get("deployment"):
                parts += ["", f"    {entry.about['deployment']}"]
            versions = entry.about.get("versions", {})
            parts += ["", ", ".join(f"{name} {found}" for name, found in versions.items()), ""]
            if "start_seconds" in entry.about:
                parts += [f"Started in {entry.about['start_seconds']} s.", ""]
            parts += [lengths_table(entry.points), ""]
            predicted = predicted_lengths_table(entry)
            if predicted:
                known = entry.about.get("kv_tokens")
                memory = f"KV memory of the live server, {known:,} tokens" if known else "KV memory as stated"
                parts += [f"Simulated with {entry.about.get('iteration_times', 'stated figures')}; {memory}.", ""]
                parts += [predicted, ""]
            for (rate, seed), found in sorted(entry.timelines.items()):
                title = f"### Iterations at {rate:g} requests/s, seed {seed} (`logs/{found['log']}`)"
                parts.append(timeline.text(found["summary"], title, found["misses"]))
        parts += ["## All", ""]
    differences = pairs_table(entries)
    if differences:
        parts += [differences, ""]
    parts += [attainment_table(entries), ""]
    compared = latency_table(entries)
    if compared:
        parts += [compared, ""]
    parts += [rates_table(entries, goal)]
    return "\n".join(parts)
