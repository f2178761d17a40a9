"""`conflux figures`: every figure and table of the paper that a model can give, and a page that compares."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from conflux_ray.simulator.figures import cases_beyond_the_paper, cases_of_the_paper, make
from conflux_ray.simulator.goodput import Search
from conflux_ray.simulator.page import render


def main(argv: Sequence[str] | None = None) -> int:
    """Write reproduction.md, img/reproduction/*.png and data/reproduction/*.csv below a folder.

    Args:
        argv: command line after `conflux figures`.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(
        prog="conflux figures",
        description="Make the paper's figures and tables from the simulator.",
        epilog="Without the trace files, lengths are drawn from the quantiles of the paper's Table 3.",
    )
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of the page")
    parser.add_argument("--traces", type=Path, default=Path("../shared/data/traces"), help="folder of the trace files")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=180.0, help="of arrivals in one simulation, at least")
    parser.add_argument("--requests", type=int, default=600, help="of one simulation, at least")
    parser.add_argument("--tolerance", type=float, default=0.03, help="of a goodput")
    parser.add_argument("--only", nargs="*", metavar="FIGURE", help="of fig12 fig16 fig17 degree prefix ablation")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    args = parser.parse_args(argv)
    cases = [*cases_of_the_paper(), *cases_beyond_the_paper()]
    if args.only is not None:
        unknown = set(args.only) - {case.group for case in cases}
        if unknown:
            parser.error(f"--only {' '.join(sorted(unknown))}: no such figure")
        cases = [case for case in cases if case.group in args.only]
    from conflux_ray.simulator.plots import write_all  # Matplotlib takes seconds to import

    search = Search(args.seconds, args.seeds, tolerance=args.tolerance, requests=args.requests)
    results = make(search, args.jobs, args.traces if args.traces.is_dir() else None, cases)
    names = write_all(results, args.out / "img" / "reproduction", args.out / "data" / "reproduction")
    page = args.out / "reproduction.md"
    page.write_text(render(results, "img/reproduction", _command(parser, args)))
    print(f"{page}, {len(names)} images, {sum(map(bool, results.tables.values()))} tables in {results.seconds:.0f} s")
    return 0


def _command(parser: argparse.ArgumentParser, args: argparse.Namespace) -> str:
    """The command that makes the same numbers anywhere: what is not a default, folders and processes left out."""
    words = ["conflux", "figures"]
    for name in ("seeds", "seconds", "requests", "tolerance"):
        value = getattr(args, name)
        if value != parser.get_default(name):
            words += [f"--{name}", f"{value:g}"]
    if args.only is not None:
        words += ["--only", *args.only]
    return " ".join(words)


if __name__ == "__main__":
    raise SystemExit(main())
