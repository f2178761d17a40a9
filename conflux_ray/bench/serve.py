"""`conflux bench serve`: how many requests per second a running server answers within its promises.

An open-loop client replays a trace against any OpenAI-compatible server: every request leaves at its arrival time, and
a request counts if each of its tokens met its own deadline (section 8.1). `conflux_ray.bench.live` has the parts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conflux_ray.bench.live import tables
from conflux_ray.bench.live.client import Endpoint, Target
from conflux_ray.bench.live.machine import machine, versions
from conflux_ray.bench.live.options import add_load, load_of, settings_of
from conflux_ray.bench.live.point import Load, Point, ended_by_sigterm, run_point, write_json
from conflux_ray.bench.live.search import Found, OutOfTimeError, search
from conflux_ray.bench.live.server_info import ServerError, model_of
from conflux_ray.bench.live.store import Store
from conflux_ray.simulator.goodput import interval

NAME = "server"
"""Of the one server in its store."""


class Bench:
    """Measures points of one server, each only once.

    Args:
        load: how points are sent.
        target: the server.
        store: keeps them.
        deadline: no point starts that could end after it, monotonic seconds; None: no limit.
        floor: points stop once they are certain to attain less; None: never.
    """

    def __init__(self, load: Load, target: Target, store: Store, deadline: float | None, floor: float | None) -> None:
        self._load = load
        self._target = target
        self._store = store
        self._deadline = deadline
        self._floor = floor

    def measure(self, rate: float, seed: int) -> Point:
        """A point, measured now or before.

        Raises:
            OutOfTimeError: there is no time for it.
        """
        found = self._store.get(NAME, rate, seed)
        if found is not None and not (found.stopped and self._floor is None):
            _say(f"{rate:g} requests/s, seed {seed}: measured before, {found.attainment:.1%} attained")
            return found
        needed = self._load.seconds_needed(rate, seed)
        if self._deadline is not None and time.monotonic() + needed > self._deadline:
            raise OutOfTimeError
        _say(f"{rate:g} requests/s, seed {seed}: {self._load.seconds:g} s of arrivals")
        point = run_point(self._load, self._target, rate, seed, self._floor)
        self._store.put(NAME, point)
        _say(f"  {point.attainment:.1%} attained in {point.seconds:.0f} s; {tables.state(point)}")
        return point


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="conflux bench serve",
        description="Replay a trace against a running OpenAI-compatible server, open loop, and count what was on time.",
    )
    parser.add_argument(
        "--url", nargs="+", default=["http://127.0.0.1:8000"], help="the server; several are replicas, shortest queue"
    )
    parser.add_argument("--model", help="name in the API; default: the first the server has")
    parser.add_argument("--api-key-env", default="OPENAI_API_KEY", help="variable with the API key, if one is needed")
    parser.add_argument("--prompt-priority", action="store_true", help="send priority = prompt length (vLLM's policy)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--rate", type=float, nargs="+", help="requests per second, one point each")
    what.add_argument("--search", action="store_true", help="bisect for the largest rate that passes")
    parser.add_argument("--guess", type=float, default=2.0, help="rate that the search starts from")
    parser.add_argument("--tolerance", type=float, default=0.05, help="of the rate that the search finds, as a share")
    parser.add_argument("--seeds", type=int, default=1, help="how many; each draws its own requests")
    parser.add_argument("--minutes", type=float, help="start no point that would end later")
    parser.add_argument("--whole", action="store_true", help="let the search finish points that are certain to miss")
    parser.add_argument("--out", type=Path, required=True, help="folder for points, report.json, report.png, report.md")
    add_load(parser)
    args = parser.parse_args(argv)
    if args.seeds < 1 or not 0 < args.attainment <= 1 or min(args.rate or [1.0]) <= 0 or args.guess <= 0:
        parser.error("--seeds, --rate and --guess must be positive, --attainment a share from 0 to 1")
    if not args.tolerance > 0:
        parser.error(f"--tolerance {args.tolerance} must be positive")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write the report, print its table last.

    Args:
        argv: command line after `conflux bench serve`.

    Returns:
        0; 1 if a point is invalid or there was no time for all of them; 2 if nothing could be measured.
    """
    args = _parse(argv)
    began = time.monotonic()
    try:
        key = os.environ.get(args.api_key_env)
        urls = tuple(url.rstrip("/") for url in args.url)
        for url in urls:
            Endpoint.of(url)
        model = model_of(urls[0], args.model, key)
        longest = args.max_model_len or model.max_model_len
        vocab_size = args.vocab_size or model.vocab_size
        if longest is None or vocab_size is None:
            missing = "--max-model-len" if longest is None else "--vocab-size"
            raise ServerError(f"{urls[0]} does not tell enough of {model.name!r}; give {missing}")
        load = load_of(args, longest, vocab_size)
        target = Target(urls, model.name, key, args.prompt_priority)
        settings = settings_of(args, load, model.name) | {"urls": urls, "prompt_priority": args.prompt_priority}
        store = Store(args.out, settings)
        deadline = began + 60 * args.minutes if args.minutes else None
        bench = Bench(load, target, store, deadline, args.attainment if args.search and not args.whole else None)
        with ended_by_sigterm():
            found, complete = _run(bench, args)
    except (ValueError, ServerError, RuntimeError) as error:
        _say(f"conflux bench serve: {error}")
        return 2
    points = store.points(NAME)
    text = _text(points, found, args, load)
    document = {
        "settings": settings,
        "machine": machine(),
        "versions": versions(),
        "goodput": [asdict(f) for f in found],
        "points": [{k: v for k, v in p.to_json().items() if k != "records"} for p in points],
    }
    write_json(args.out / "report.json", document)
    (args.out / "report.md").write_text(text + "\n")
    try:
        from conflux_ray.bench.live import plots
    except ImportError as error:  # the machine of a server need not have Matplotlib
        _say(f"no figure: {error}")
    else:
        plots.overview(points, args.out / "report.png", args.attainment, model.name)
    print(text)
    return 0 if complete and not any(p.invalid for p in points) else 1


def _run(bench: Bench, args: argparse.Namespace) -> tuple[list[Found], bool]:
    found: list[Found] = []
    if args.search:
        for seed in range(args.seeds):

            def of_rate(rate: float, seed: int = seed) -> Point:
                return bench.measure(rate, seed)

            found.append(search(of_rate, args.attainment, args.guess, args.tolerance))
        return found, all(f.complete for f in found)
    try:
        # Seeds outermost: what drifts during the run meets all rates alike.
        for seed in range(args.seeds):
            for rate in args.rate:
                bench.measure(rate, seed)
    except OutOfTimeError:
        _say("no time for the points that are left; the same command goes on from here")
        return found, False
    return found, True


def _text(points: Sequence[Point], found: Sequence[Found], args: argparse.Namespace, load: Load) -> str:
    parts = [
        f"{load.workload.name}, TTFT {load.slo.ttft:g} s, TBT {load.slo.tbt * 1e3:g} ms, {load.seconds:g} s of "
        f"arrivals a point, {load.arrivals} arrivals, first {load.warm_up:.0%} of the requests not counted"
    ]
    notes: dict[str, Any] = dict.fromkeys(note for p in points for note in p.notes[:1])
    parts += [f"trace: {note}" for note in notes]
    parts += tables.remarks(points)
    parts += ["", tables.lengths_table(points), "", tables.points_table(points)]
    for seed, one in enumerate(found):
        above = f"{one.failed:g} did not" if one.failed is not None else "no rate failed"
        state = "" if one.complete else "; there was no time to search further"
        parts.append(f"seed {seed}: {one.passed:g} requests/s attained {args.attainment:.0%}, {above}{state}")
    if len(found) > 1:
        rates = [f.passed for f in found]
        parts.append(f"goodput {sum(rates) / len(rates):.3g} +- {interval(rates):.2g} requests/s (95 %, Student's t)")
    return "\n".join(parts)


if __name__ == "__main__":
    raise SystemExit(main())
