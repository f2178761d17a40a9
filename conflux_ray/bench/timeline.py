"""`conflux bench timeline`: how an instance spent its time, from its iteration log."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conflux_ray.bench.live.point import Point, write_json
from conflux_ray.bench.live.timeline import LogError, against, misses, of_points, read, summarize, text
from conflux_ray.profiling.registry import find_profile


def points_below(folder: Path) -> list[Point]:
    """All points in a folder of `bench serve` or `bench compare`, or in a folder of points.

    Raises:
        LogError: there is none.
    """
    points = [Point.from_json(json.loads(path.read_text())) for path in sorted(folder.rglob("rate-*-seed-*.json"))]
    if not points:
        raise LogError(f"{folder}: no points in it; name the folder of a run, or leave --points out")
    return points


def main(argv: Sequence[str] | None = None) -> int:
    """Write timeline.json, timeline.md and timeline.png, and print the Markdown.

    Args:
        argv: command line after `conflux bench timeline`.

    Returns:
        0; 2 if it cannot be done.
    """
    parser = argparse.ArgumentParser(
        prog="conflux bench timeline",
        description="How an instance spent its time, from its iteration log (`instance.iteration_log`).",
    )
    parser.add_argument("log", type=Path, help="the instance's iteration log")
    parser.add_argument(
        "--points", type=Path, help="folder of the points sent to it: which requests were late, and why"
    )
    parser.add_argument("--profile", help="a latency profile's file or name: how far iterations were from it alone")
    parser.add_argument("--tbt", type=float, help="seconds; default: that of the points, or 0.1")
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    args = parser.parse_args(argv)
    try:
        iterations = read(args.log)
        points = points_below(args.points) if args.points else []
        tbt = args.tbt or (points[0].slo.tbt if points else 0.1)
        document: dict[str, Any] = {"log": args.log.name, "whole": summarize(iterations, tbt), "points": []}
        parts = [text(document["whole"], f"# {args.log.name}")]
        if args.profile:
            model = find_profile(args.profile).latency
            document["against"] = {"profile": model.name, "kinds": against(iterations, model)}
            ratios = ", ".join(
                f"{kind} {q['p50']:.3f} [{q['p5']:.3f}, {q['p95']:.3f}]"
                for kind, q in document["against"]["kinds"].items()
            )
            parts.append(f"Measured over {model.name} without correction, P50 [P5, P95]: {ratios}.\n")
        for point, mine in of_points(iterations, points):
            missed = misses(mine, point)
            summary = summarize(mine, point.slo.tbt)
            document["points"].append({"rate": point.rate, "seed": point.seed, "summary": summary, "misses": missed})
            parts.append(text(summary, f"## {point.rate:g} requests/s, seed {point.seed}", missed))
        if points and not document["points"]:
            raise LogError(f"{args.points}: none of its points was sent while {args.log} was written")
    except (OSError, ValueError) as error:
        print(f"conflux bench timeline: {error}", file=sys.stderr)
        return 2
    write_json(args.out / "timeline.json", document)
    (args.out / "timeline.md").write_text("\n".join(parts) + "\n")
    try:
        from conflux_ray.bench.live import plots
    except ImportError as error:  # a machine of GPUs need not have Matplotlib
        print(f"no figure: {error}", file=sys.stderr)
    else:
        plots.iteration_log(iterations, tbt, args.out / "timeline.png")
    print("\n".join(parts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
