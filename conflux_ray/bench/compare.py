"""`conflux bench compare`: several servers on one machine, one after the other, by the same requests.

Every contender gets the same weights, length, memory share and promises, and at each rate and seed the same requests at
the same times; none has a prefix cache, and `--prefix-cache` adds every vLLM with its own. Repeats go round the
contenders, every second one backwards, so that what drifts meets all alike. Points that the folder has are not measured
again: what one call has no time for the next goes on with.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import itertools
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from conflux_ray.bench.live import timeline
from conflux_ray.bench.live.client import Target
from conflux_ray.bench.live.contenders import (
    ITERATIONS,
    Contender,
    ContenderError,
    Site,
    launches,
    read,
    simulated,
    standard,
)
from conflux_ray.bench.live.forecast import forecast, forecast_table, overrun_of
from conflux_ray.bench.live.machine import gpus as find_gpus
from conflux_ray.bench.live.machine import machine, versions
from conflux_ray.bench.live.options import add_load, load_of, settings_of
from conflux_ray.bench.live.point import Load, Point, ended_by_sigterm, run_point, run_trace, write_json
from conflux_ray.bench.live.predict import FORMAT, errors, hardware_of, predict
from conflux_ray.bench.live.report import Entry, compare_text, rates_of
from conflux_ray.bench.live.server_info import ServerError, vocab_size_of
from conflux_ray.bench.live.servers import Servers, running
from conflux_ray.bench.live.store import Store, StoreError
from conflux_ray.bench.live.tables import state
from conflux_ray.config import ConfigError, read_model_config, resolve_model
from conflux_ray.simulator.hardware import Hardware
from conflux_ray.simulator.trace import Trace, TraceRequest

START_SECONDS = 90.0
"""That a server takes to start, where nothing is known of it yet."""
WARM_SEED = 1_000_003
"""Of the throw-away requests: no point draws them."""
WARM_TOKENS = 64
"""Most output tokens of a throw-away request."""
WARM_GAP = 0.5
"""Seconds between the throw-away requests of the longest kinds."""


class Comparison:
    """Measures what is missing in a folder.

    Args:
        load: how points are sent.
        site: what contenders have in common.
        store: keeps points.
        contenders: in the order of the report.
        rates: requests per second, of contenders without their own.
        args: of the command line.
    """

    def __init__(
        self, load: Load, site: Site, store: Store, contenders: Sequence[Contender], args: argparse.Namespace
    ) -> None:
        self._load = load
        self._site = site
        self._store = store
        self._contenders = contenders
        self._args = args
        self._deadline = time.monotonic() + 60 * args.minutes if args.minutes else None
        self.complete = True
        self._measured: set[tuple[str, float, int]] = set()

    def run(self) -> None:
        """Everything, or as much as there is time for."""
        for contender in self._contenders:
            self._check(contender)
        for contender, points in self.rounds():
            missing = [point for point in points if self._is_missing(contender.name, *point)]
            if not missing:
                continue
            before = self._about(contender).get("start_seconds", START_SECONDS) + 2 * self._args.warm_seconds
            if not self._time_for(before + self._load.seconds_needed(*missing[0])):
                return
            try:
                self._serve(contender, missing)
            except ServerError as error:
                self.complete = False
                _say(f"{contender.name}: {error}")
            finally:
                _keep_log(self._store.folder / "logs", contender.name, missing[0][1])

    def _is_missing(self, name: str, rate: float, seed: int) -> bool:
        """Whether it is to be measured; one that turned out invalid is left to the next call."""
        return (name, rate, seed) not in self._measured and self._store.get(name, rate, seed) is None

    def rounds(self) -> Iterator[tuple[Contender, list[tuple[float, int]]]]:
        """Contenders in the order of their starts, each with the (rate, seed) of its points.

        Repeats go round the contenders, every second time backwards; one that is alone keeps its server for all.
        """
        seeds = range(self._args.first_seed, self._args.first_seed + self._args.repeats)
        if len(self._contenders) == 1:
            alone = self._contenders[0]
            for first in seeds:  # what its server leaves when it fails, the next one goes on with
                yield alone, [(r, seed) for seed in seeds if seed >= first for r in self._rates(alone)]
            return
        for seed in seeds:
            for contender in self._contenders if seed % 2 == 0 else self._contenders[::-1]:
                yield contender, [(r, seed) for r in self._rates(contender)]

    def _rates(self, contender: Contender) -> Sequence[float]:
        return contender.rates or self._args.rates

    def _time_for(self, needed: float) -> bool:
        """Whether there are so many seconds left."""
        if self._deadline is None or time.monotonic() + needed <= self._deadline:
            return True
        self.complete = False
        _say(f"no time for another {needed:.0f} s; the same command goes on from here")
        return False

    def _path(self, contender: Contender) -> Path:
        return self._store.folder / "contenders" / f"{contender.name}.json"

    def _about(self, contender: Contender) -> dict[str, Any]:
        path = self._path(contender)
        return json.loads(path.read_text()) if path.exists() else {}

    def _check(self, contender: Contender) -> None:
        """Raises StoreError where the folder has points of another contender of this name."""
        found = self._about(contender).get("contender")
        wanted = json.loads(json.dumps(contender.to_json()))
        if found is not None and found != wanted:
            changed = ", ".join(f"{k}={found.get(k)!r} -> {wanted[k]!r}" for k in wanted if found.get(k) != wanted[k])
            raise StoreError(
                f"{self._store.folder}: has points of another {contender.name} ({changed}); give the new one another "
                f"name, or choose another --out"
            )

    def _serve(self, contender: Contender, points: Sequence[tuple[float, int]]) -> None:
        """Start it and measure `points`, (rate, seed) each."""
        folder = self._store.folder / "logs"
        started = launches(contender, self._site, folder)
        _say(f"{contender.name}: starting")
        name = f"{contender.name}-seed-{points[0][1]}"
        with running(Servers(started, folder, name, self._site.device)) as servers:
            took = servers.start(self._args.start_seconds)
            _say(f"{contender.name}: answers after {took:.0f} s")
            about = {
                "contender": contender.to_json(),
                "commands": [list(launch.command) for launch in started],
                "environment": [dict(launch.environment) for launch in started],
                "deployment": started[0].deployment,
                "versions": versions(),
                "machine": machine(),
                "start_seconds": round(took, 1),
                "kv_tokens": servers.kv_tokens(),
            }
            write_json(self._path(contender), about)
            target = Target(servers.urls, self._site.model, None, contender.prompt_priority)
            self._warm(target, max(rate for rate, _ in points))
            for rate, seed in points:
                if not self._time_for(self._load.seconds_needed(rate, seed)):
                    return
                _say(f"{contender.name}, {rate:g} requests/s, seed {seed}: {self._load.seconds:g} s of arrivals")
                point = run_point(self._load, target, rate, seed)
                if not servers.alive():
                    raise ServerError(f"ended while it was measured at {rate:g} requests/s; see {servers.logs[0]}")
                self._store.put(contender.name, point)
                self._measured.add((contender.name, rate, seed))
                if point.invalid:
                    self.complete = False
                _say(f"  {point.attainment:.1%} attained; {point.invalid or state(point)}")

    def _warm(self, target: Target, rate: float) -> None:
        """Throw-away requests: whatever a server does once only, it does now.

        Raises:
            ServerError: none of them was answered as asked.
        """
        seconds = self._args.warm_seconds
        if not seconds:
            return
        drawn = self._load.draw(rate, self._args.first_seed).requests
        longest = max(r.prompt_tokens for r in drawn)
        kinds = [TraceRequest(k * WARM_GAP, max(1, longest >> k), 4) for k in range(6)]
        rest = [
            TraceRequest(r.arrival + len(kinds) * WARM_GAP, r.prompt_tokens, min(r.output_tokens, WARM_TOKENS))
            for r in drawn
        ]
        trace = Trace("warm-up", (*kinds, *(r for r in rest if r.arrival < seconds)))
        load = replace(self._load, drain=60.0, warm_up=0.0, slo=replace(self._load.slo, ttft=60.0))
        point = run_trace(load, target, trace, rate, WARM_SEED, say=lambda line: None)
        faults = {r.fault for r in point.records}
        if None not in faults:
            raise ServerError(f"no request of the warm-up was answered as asked: {next(iter(faults))}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _keep_log(folder: Path, name: str, seed: int) -> None:
    """Give the iteration log of a server that has ended a name that the next one's does not have."""
    log = folder / f"{name}{ITERATIONS}"
    if log.exists():
        free = (folder / f"{name}-seed-{seed}-{k}{ITERATIONS}" for k in itertools.count())
        log.rename(next(path for path in free if not path.exists()))


def timelines(store: Store, entries: Sequence[Entry]) -> None:
    """Summaries of the iteration logs that the folder has, into the entries they belong to."""
    for entry in entries:
        for path in sorted((store.folder / "logs").glob(f"{entry.name}-seed-*{ITERATIONS}")):
            try:
                iterations = timeline.read(path)
            except timeline.LogError as error:
                _say(str(error))
                continue
            for point, mine in timeline.of_points(iterations, entry.usable):
                entry.timelines[point.rate, point.seed] = {
                    "log": path.name,
                    "summary": timeline.summarize(mine, point.slo.tbt),
                    "misses": timeline.misses(mine, point),
                }


def entries_of(
    store: Store, load: Load | None, hardware: Hardware | None, gpus: int, overruns: Sequence[str] = ()
) -> list[Entry]:
    """What a folder has, with predictions where the simulator knows the machine; those are kept in the folder."""
    kept = store.folder / "predictions.json"
    predictions: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    entries = []
    for name in store.names():
        path = store.folder / "contenders" / f"{name}.json"
        about = json.loads(path.read_text()) if path.exists() else {}
        values = about.get("contender", {"name": name, "kind": "vllm"})
        entry = Entry(name, values["kind"], store.points(name), about=about)
        overrun = overrun_of(name, overruns)
        entries.append(entry)
        if "policy" not in values:
            continue
        contender = Contender(**{**values, "flags": tuple(values["flags"])})
        known = about.get("kv_tokens")
        named = simulated(contender, gpus)
        times = _times(hardware, contender, named.gpus) if named is not None and hardware is not None else None
        if times is not None:
            slower = f", with prefill {overrun:g} times as long" if overrun != 1.0 else ""
            about["iteration_times"] = times + slower
        for point in entry.usable:
            key = f"{name} {point.rate:g} {point.seed}"
            if not _is_of(predictions.get(key), known, overrun, times) and load is not None and hardware is not None:
                said = predict(contender, hardware, gpus, load, point.rate, point.seed, known, overrun)
                predictions[key] = said | {"iteration_times": times}
            if _is_of(predictions.get(key), known, overrun, times):
                entry.predictions[point.rate, point.seed] = predictions[key]
    if predictions:
        write_json(kept, predictions)
    return sorted(entries, key=lambda e: (e.kind != "conflux", not e.name.startswith("conflux-slo"), e.name))


def _is_of(prediction: dict[str, Any] | None, kv_tokens: int | None, overrun: float, times: str | None) -> bool:
    """Whether a kept prediction is one, of today's simulator, this KV memory, this overrun and these iteration times.

    Args:
        prediction: kept or not.
        kv_tokens: of a logical rank.
        overrun: of iterations with prefill.
        times: where iteration times come from; None takes those that there are.
    """
    if prediction is None or prediction.get("format") != FORMAT:
        return False
    if times is not None and prediction["iteration_times"] != times:
        return False
    return (prediction["kv_tokens"], prediction["overrun"]) == (kv_tokens, overrun)


def _times(hardware: Hardware, contender: Contender, gpus: int) -> str:
    """Where the simulated iteration times of a contender come from."""
    ranks = gpus // contender.tensor_parallel if contender.kind == "conflux" else 1
    name = hardware.latency(ranks, contender.tensor_parallel).name
    return f"stated figures ({name})" if name.startswith("stated") else f"the measured profile {name}"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="conflux bench compare",
        description="Conflux and vLLM on this machine, one after the other, by the same requests.",
    )
    parser.add_argument("--model", required=True, help="a folder, or the name of a model that conflux-ray builds")
    parser.add_argument("--load-format", choices=["auto", "dummy"], default="auto", help="dummy: random weights")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--gpus", type=int, help="for one contender; default: all; on a CPU: worker processes, 2")
    parser.add_argument("--memory-share", type=float, default=0.9, help="of each GPU's memory")
    parser.add_argument("--contenders", type=Path, help="YAML list instead of the standard ones")
    parser.add_argument("--budgets", type=int, nargs="+", default=[2048, 4096], help="token budgets of vLLM")
    parser.add_argument("--conflux-budget", type=int, default=8192, help="most prefill tokens of a Conflux iteration")
    parser.add_argument(
        "--prefix-cache", action="store_true", help="vLLM also with its prefix cache, which Conflux has none of"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="SECTION.KEY=VALUE", help="more of Conflux's deployment args (YAML)"
    )
    parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders by name; * and ? match")
    parser.add_argument("--list", action="store_true", help="name the contenders and how they are started, and end")
    parser.add_argument("--rates", type=float, nargs="+", help="requests per second")
    parser.add_argument("--repeats", type=int, default=1, help="rounds; each has its own requests")
    parser.add_argument("--first-seed", type=int, default=0, help="of the first round")
    parser.add_argument("--minutes", type=float, help="start nothing that would end later")
    parser.add_argument("--start-seconds", type=float, default=400.0, help="longest start of a server")
    parser.add_argument("--warm-seconds", type=float, default=15.0, help="of throw-away requests after a start")
    parser.add_argument("--port", type=int, default=18400, help="of the first server")
    parser.add_argument("--profile", type=Path, nargs="*", default=[], help="measured profiles, for the simulator")
    parser.add_argument(
        "--overrun",
        nargs="+",
        default=[],
        metavar="[NAME=]FACTOR",
        help="simulate iterations with prefill so many times as long; * and ? match in names",
    )
    parser.add_argument(
        "--forecast",
        metavar="GPU",
        help="measure nothing; simulate the contenders on --gpus (1) of this name, say H200",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes of --forecast")
    parser.add_argument("--no-simulation", action="store_true", help="leave the simulator's column empty")
    parser.add_argument("--report", action="store_true", help="measure nothing; write the report of what is there")
    parser.add_argument("--out", type=Path, required=True, help="folder for points, logs and the report")
    add_load(parser)
    args = parser.parse_args(argv)
    if not (args.rates or args.contenders or args.report or args.list):
        parser.error("--rates is needed")
    try:
        overrun_of("", args.overrun)
    except ValueError as error:
        parser.error(str(error))
    if args.repeats < 1 or min(args.rates or [1.0]) <= 0:
        parser.error("--repeats and --rates must be positive")
    return args


def _set(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    import yaml

    sections: dict[str, dict[str, Any]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        section, dot, key = name.partition(".")
        if not (equals and dot and section and key):
            raise ContenderError(f"--set {word!r} must be like scheduler.policy=slo")
        sections.setdefault(section, {})[key] = yaml.safe_load(value)
    return sections


def _contenders(args: argparse.Namespace, site: Site) -> list[Contender]:
    if args.contenders:
        found = read(args.contenders)
    else:
        found = standard(site.gpus, site.device, args.budgets, args.conflux_budget, args.prefix_cache)
    more = _set(args.set)
    if more:
        found = [
            replace(c, args={k: {**c.args.get(k, {}), **more.get(k, {})} for k in c.args.keys() | more.keys()})
            if c.kind == "conflux"
            else c
            for c in found
        ]
    overruns = [pattern for word in args.overrun if (pattern := word.rpartition("=")[0])]
    for option, patterns in (("--only", args.only or []), ("--overrun", overruns)):
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(c.name, pattern) for c in found):
                raise ContenderError(f"{option} {pattern!r} names none of {', '.join(c.name for c in found)}")
    if not args.only:
        return found
    return [c for c in found if any(fnmatch.fnmatchcase(c.name, pattern) for pattern in args.only)]


def _measured_gpus(folder: Path) -> list[dict[str, str]]:
    """The GPUs of the machine that a folder's points come from; this machine's if there are none yet."""
    for path in sorted((folder / "contenders").glob("*.json")):
        return json.loads(path.read_text())["machine"]["gpus"]
    return find_gpus()


def _site(args: argparse.Namespace, found_gpus: Sequence[dict[str, str]]) -> Site:
    folder = resolve_model(args.model)
    longest = args.max_model_len or int(read_model_config(folder).get("max_position_embeddings") or 0)
    if not longest:
        raise ContenderError(f"model={args.model!r} does not state its length; give --max-model-len")
    gpus = args.gpus or len(found_gpus) or 2
    return Site(
        folder,
        Path(args.model).name,
        gpus,
        "cuda" if found_gpus else "cpu",
        longest,
        args.load_format,
        args.dtype,
        args.memory_share,
        ttft=args.ttft,
        tbt=args.tbt,
        port=args.port,
    )


def _plots() -> ModuleType | None:
    """What draws; None without Matplotlib, which a machine of GPUs need not have: another can draw its folder."""
    try:
        from conflux_ray.bench.live import plots
    except ImportError as error:
        _say(f"no figure: {error}")
        return None
    return plots


def _forecast(
    args: argparse.Namespace,
    contenders: Sequence[Contender],
    load: Load,
    settings: dict[str, Any],
    found_gpus: list[dict[str, str]],
) -> int:
    """Print, keep and draw what the simulator says of the contenders, with the points that the folder has of them."""
    hardware = hardware_of(args.model, found_gpus, args.profile)
    if hardware is None:
        raise ContenderError(f"the simulator knows no {args.model!r} on {args.forecast!r}")
    seeds = range(args.first_seed, args.first_seed + args.repeats)
    rates = sorted(args.rates or [])
    found = forecast(contenders, hardware, len(found_gpus), load, rates, seeds, args.overrun, args.jobs)
    times = {c.name: _times(hardware, c, named.gpus) for c in contenders if (named := simulated(c, len(found_gpus)))}
    measured: dict[str, list[Point]] = {}
    if (args.out / "points").exists():
        store = Store(args.out, settings)
        measured = {name: store.points(name) for name in store.names()}
    args.out.mkdir(parents=True, exist_ok=True)
    write_json(
        args.out / "forecast.json",
        {"settings": settings, "overrun": args.overrun, "seeds": list(seeds)}
        | {"contenders": [one.to_json() | {"iteration_times": times[one.name]} for one in found]},
    )
    if (plots := _plots()) is not None:
        plots.forecasts(found, measured, args.out / "forecast.png", args.attainment)
    print(forecast_table(found, args.attainment))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is missing, write the report, print its tables last.

    Args:
        argv: command line after `conflux bench compare`.

    Returns:
        0; 1 if something failed, was invalid or had no time; 2 if nothing could be begun.
    """
    args = _parse(argv)
    try:
        if args.forecast:
            found_gpus = [{"name": args.forecast}] * (args.gpus or 1)
        else:
            found_gpus = _measured_gpus(args.out) if args.report else find_gpus()
        site = _site(args, found_gpus)
        contenders = _contenders(args, site)
        if args.list:
            for contender in contenders:
                print(contender.name)
                for launch in launches(contender, site, args.out / "logs"):
                    print(f"    {' '.join(launch.command)}")
            return 0
        vocab_size = args.vocab_size or vocab_size_of(site.folder)
        if vocab_size is None:
            raise ContenderError(f"model={args.model!r}: its vocab_size is not known; give --vocab-size")
        load = load_of(args, site.max_model_len, vocab_size)
        settings = settings_of(args, load, site.model) | site.describe()
        if args.forecast:
            return _forecast(args, contenders, load, settings, found_gpus)
        store = Store(args.out, settings)
        comparison = Comparison(load, site, store, contenders, args)
        if not args.report:
            try:
                with ended_by_sigterm():
                    comparison.run()
            except KeyboardInterrupt:
                comparison.complete = False
                _say("interrupted; the same command goes on from here")
        hardware = None if args.no_simulation else hardware_of(args.model, found_gpus[: site.gpus], args.profile)
        entries = entries_of(store, load, hardware, site.gpus, args.overrun)
        timelines(store, entries)
    except (ConfigError, ValueError, RuntimeError) as error:
        _say(f"conflux bench compare: {error}")
        return 2
    devices = ", ".join(sorted({gpu["name"] for gpu in found_gpus})) or "CPU"
    title = f"# {site.model} on {site.gpus} x {devices}"
    write_json(
        args.out / "report.json",
        {
            "settings": settings,
            "contenders": [
                entry.about
                | {"points": [{k: v for k, v in p.to_json().items() if k != "records"} for p in entry.points]}
                | {
                    "simulated": [
                        {"rate": p.rate, "seed": p.seed, "error": errors(p.score(), said)} | said
                        for rate in rates_of([entry])
                        for p, said in entry.pairs(rate)
                    ]
                }
                | {"timelines": [{"rate": r, "seed": s} | found for (r, s), found in entry.timelines.items()]}
                for entry in entries
            ],
        },
    )
    (args.out / "report.md").write_text(compare_text(entries, settings, title, short=False) + "\n")
    if (plots := _plots()) is not None:
        for log in (args.out / "logs").glob(f"*-seed-*{ITERATIONS}"):
            with contextlib.suppress(timeline.LogError):
                plots.iteration_log(timeline.read(log), args.tbt, log.with_suffix(".png"))
        plots.comparison({e.name: e.points for e in entries}, args.out / "report.png", args.attainment)
    print(compare_text(entries, settings, title, short=True))
    return 0 if comparison.complete else 1


if __name__ == "__main__":
    raise SystemExit(main())
