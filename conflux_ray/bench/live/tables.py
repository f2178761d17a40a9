"""Points as plain text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from conflux_ray.bench.live.point import Point
from conflux_ray.bench.live.score import by_length, wilson


def share(value: float) -> str:
    """A share in percent."""
    return f"{100 * value:.1f}"


def interval(ends: Sequence[float]) -> str:
    """An interval of shares in percent."""
    return f"[{share(ends[0])}, {share(ends[1])}]"


def seconds(figures: dict[str, float], *names: str, scale: float = 1.0, digits: int = 2) -> str:
    """Percentiles beside each other; a dash where there are none."""
    return " / ".join(f"{figures[n] * scale:.{digits}f}" if n in figures else "-" for n in names)


def state(point: Point) -> str:
    """What must be said of a point before its figures are read."""
    if point.invalid:
        return "INVALID"
    if point.stopped:
        return "stopped"
    faults = sum(r.fault is not None for r in point.counted)
    return f"{faults} cut or wrong" if faults else "ok"


def remarks(points: Sequence[Point]) -> list[str]:
    """A line for whatever `state` only hints at."""
    lines = []
    for point in points:
        at = f"{point.rate:g} requests/s, seed {point.seed}: "
        if point.invalid:
            lines.append(f"{at}INVALID, {point.invalid}")
        if point.stopped:
            lines.append(f"{at}stopped once it was certain to miss; its figures are of a part of its requests")
        else:
            lines += [f"{at}{count} x {fault}" for fault, count in point.score()["faults"].items()]
    return lines


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table, its columns padded so that it reads well as plain text; the first `left` columns flush left."""
    widths = [max(len(line[k]) for line in (header, *rows)) for k in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        padded = [c.ljust(w) if k < left else c.rjust(w) for k, (c, w) in enumerate(zip(cells, widths, strict=True))]
        return f"| {' | '.join(padded)} |"

    rule = "|".join("-" * (w + 2) if k < left else "-" * (w + 1) + ":" for k, w in enumerate(widths))
    return "\n".join([line(header), f"|{rule}|", *map(line, rows)])


HEADER = (
    "Rate",
    "Seed",
    "Counted",
    "Attained, %",
    "95 %",
    "TTFT P50/P95/P99, s",
    "TBT P50/P95/P99, ms",
    "Tokens/s",
    "Client P99/max, ms",
    "State",
)


def point_row(point: Point) -> list[str]:
    """A point under `HEADER`."""
    score: dict[str, Any] = point.score()
    late = point.lag
    return [
        f"{point.rate:g}",
        f"{point.seed}",
        f"{score['counted']}",
        share(score["attainment"]),
        interval(score["interval"]),
        seconds(score["ttft"], "p50", "p95", "p99"),
        seconds(score["tbt"], "p50", "p95", "p99", scale=1e3, digits=0),
        f"{score['output_tokens_per_s']:.0f}",
        f"{max(late.send_p99, late.wake_p99) * 1e3:.0f}/{max(late.send_max, late.wake_max) * 1e3:.0f}",
        state(point),
    ]


def points_table(points: Sequence[Point]) -> str:
    """All points."""
    return markdown(HEADER, [point_row(p) for p in points], left=0)


def lengths_table(points: Sequence[Point]) -> str:
    """Attainment by prompt length, the seeds of each rate together; invalid and stopped points are left out."""
    rows = []
    usable = [p for p in points if not p.invalid and not p.stopped]
    for rate in sorted({p.rate for p in usable}):
        mine = [p for p in usable if p.rate == rate]
        for group in by_length([r for p in mine for r in p.counted], mine[0].slo):
            above, up_to = group["above"], group["up_to"]
            rows.append(
                [
                    f"{rate:g}",
                    f"{above + 1} to {up_to}" if up_to else f"over {above}",
                    f"{group['counted']}",
                    share(group["attainment"]),
                    interval(wilson(group["compliant"], group["counted"])),
                    f"{group['late_first_token']}",
                    seconds(group["ttft"], "p50", "p95", "p99"),
                ]
            )
    header = ("Rate", "Prompt tokens", "Counted", "Attained, %", "95 %", "First token late", "TTFT P50/P95/P99, s")
    return markdown(header, rows, left=0) if rows else "no valid point"
