"""`conflux bench routing --live`: the routers of a running server, two tiny CPU instances on this machine.

For every round and router a server of deployments/two-instances.yaml is started with `ingress.routing` set, and the
same requests are replayed against it. With `--slow` one instance's worker is stopped for two thirds of the time, so
that it is three times as slow; nothing tells the server so but its own measurements.

Client, ingress and both instances share the cores: the figures say which router is better here, and little else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from conflux_ray.bench.live.client import Target
from conflux_ray.bench.live.point import Load, Point, run_point
from conflux_ray.bench.live.servers import Servers
from conflux_ray.bench.routing import Run, format_table, report
from conflux_ray.bench.server import instance_stats, ray_is_running, running_server
from conflux_ray.serving.environment import serve_environment
from conflux_ray.simulator.commands.arguments import write_json
from conflux_ray.simulator.metrics import percentiles
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.router import ROUTERS
from conflux_ray.simulator.workload import Workload

INSTANCES = 2
MODEL = "tiny"
VOCAB_SIZE = 500
"""Prompt ids are below it: a part of tiny-llama's."""
PATIENCE = Slo(120.0, 120.0)
"""Promises that the client is told, so that it cuts no request that is merely late."""
WARM_UP_SEED = 1000
"""Of the requests before the first that count."""
SLICE_SECONDS = 0.03
"""Of a slowed worker: a third of it runs."""


@contextlib.contextmanager
def slowed(process: psutil.Process, share: float = 1 / 3) -> Iterator[None]:
    """Let a process run for `share` of the time only, in slices of `SLICE_SECONDS`."""
    over = threading.Event()

    def run() -> None:
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
            while not over.wait(SLICE_SECONDS * share):
                os.kill(process.pid, signal.SIGSTOP)
                over.wait(SLICE_SECONDS * (1 - share))
                os.kill(process.pid, signal.SIGCONT)

    thread = threading.Thread(target=run, name="slow a worker down", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)


def worker_of(server: Servers, instance: int) -> psutil.Process:
    """The worker of the instance in process `instance`: the two share memory.

    Raises:
        RuntimeError: there is none.
    """
    shared = _segments(instance)
    for process in server.process.children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if "WorkerActor" in " ".join(process.cmdline()) and shared & _segments(process.pid):
                return process
    raise RuntimeError(f"no worker of the instance in process {instance}: has it just died?")


def _segments(pid: int) -> set[str]:
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "/dev/shm/psm_" in line}


@dataclass(frozen=True, slots=True)
class Measured:
    """A run, and what may be wrong with it."""

    run: Run
    faults: int
    lag_s: float


def deployment_of(path: Path, port: int, routing: str) -> dict[str, Any]:
    """The configuration with another port, router and model name."""
    config = yaml.safe_load(path.read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": port}
    args = config["applications"][0]["args"]
    args.setdefault("ingress", {})["routing"] = routing
    args["model"]["served_model_name"] = MODEL
    return config


def run_of(point: Point, router: str, speeds: tuple[float, ...], slo: Slo, finished: Sequence[int]) -> Run:
    """The figures of a point; `finished` requests of each instance stand for its share of the work.

    Raises:
        ValueError: no counted request was answered.
    """
    ttft = percentiles([r.times[0] - r.arrival for r in point.counted if r.times])
    if not ttft:
        raise ValueError("no counted request was answered; see the server's log")
    attained = [r.compliant(slo) for r in point.counted]
    return Run(
        speeds,
        point.rate,
        router,
        point.seed,
        ttft["p50"],
        ttft["p95"],
        sum(attained) / len(attained),
        tuple(count / sum(finished) for count in finished),
    )


def measure(
    args: argparse.Namespace, load: Load, slo: Slo, router: str, port: int, speeds: tuple[float, ...]
) -> list[Measured]:
    """All seeds against one server."""
    measured = []
    config = deployment_of(args.deployment, port, router)
    with running_server(config, serve_environment()) as server, contextlib.ExitStack() as stack:
        target = Target((f"http://127.0.0.1:{port}",), MODEL)
        stats = instance_stats(server, INSTANCES)
        order = [s["instance_id"] for s in stats]
        if speeds[0] != speeds[1]:
            stack.enter_context(slowed(worker_of(server, stats[0]["pid"]), speeds[0] / speeds[1]))
        run_point(load, target, args.rate, WARM_UP_SEED, say=lambda _: None)  # sets things up, corrects predictions
        before = _finished(server)
        for seed in args.seed:
            point = run_point(load, target, args.rate, seed, say=lambda _: None)
            after = _finished(server)
            finished = [after[name] - before[name] for name in order]
            before = after
            faults = sum(r.fault is not None for r in point.records)
            run = run_of(point, router, speeds, slo, finished)
            measured.append(Measured(run, faults, point.lag.send_p99))
            print(
                f"{router}, speeds {speeds}, seed {seed}: TTFT P95 {run.ttft_p95:.2f} s, {run.attainment:.1%} "
                f"attained, {finished} requests, {faults} faults, client late {point.lag.send_p99 * 1e3:.0f} ms",
                file=sys.stderr,
                flush=True,
            )
    return measured


def _finished(server: Servers) -> dict[str, int]:
    return {s["instance_id"]: s["counters"]["finished"] for s in instance_stats(server, INSTANCES)}


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="conflux bench routing --live",
        description="Replay a shortened trace against two tiny CPU instances behind each router of the ingress.",
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL")
    parser.add_argument("--shorten", type=float, nargs=2, default=[1 / 27, 1 / 8], metavar=("PROMPT", "OUTPUT"))
    parser.add_argument("--deployment", type=Path, default=Path("deployments/two-instances.yaml"))
    parser.add_argument("--router", choices=list(ROUTERS), nargs="+", default=list(ROUTERS))
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="of arrivals")
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1], help="against each server")
    parser.add_argument("--rounds", type=int, default=2, help="servers of each router, in turn")
    parser.add_argument("--slow", action="store_true", help="stop one instance's worker for two thirds of the time")
    parser.add_argument("--ttft", type=float, default=0.5, help="promise, seconds")
    parser.add_argument("--tbt", type=float, default=0.2, help="promise, seconds")
    parser.add_argument("--port", type=int, default=18600, help="of HTTP")
    parser.add_argument("--json", type=Path, help="write the result there")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Print the table.

    Args:
        argv: command line after `conflux bench routing`, without `--live`.

    Returns:
        Exit status.
    """
    args = _parse(argv)
    if ray_is_running():
        print("Ray is running on this machine; stop it first: its load would be measured", file=sys.stderr)
        return 1
    speeds = (1.0, 3.0) if args.slow else (1.0, 1.0)
    load_before = os.getloadavg()[0]
    try:
        longest = yaml.safe_load(args.deployment.read_text())["applications"][0]["args"]["model"]["max_model_len"]
        workload = Workload.from_file(args.trace, longest).shrunk(*args.shorten)
        load = Load(workload, PATIENCE, args.seconds, vocab_size=VOCAB_SIZE, clients=1, max_lag=1.0)
        slo = Slo(args.ttft, args.tbt)
        measured: list[Measured] = []
        for _ in range(args.rounds):
            for router in args.router:
                measured += measure(args, load, slo, router, args.port, speeds)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        print(f"conflux bench routing --live: {error}", file=sys.stderr)
        return 2
    runs = [m.run for m in measured]
    print(f"{INSTANCES} instances of {args.deployment}, {workload.name}, {args.seconds:g} s of arrivals")
    print(f"TTFT {slo.ttft:g} s, TBT {slo.tbt * 1e3:g} ms; {args.rounds} servers a router, {len(args.seed)} seeds each")
    print(format_table(runs))
    faults, lag = sum(m.faults for m in measured), max(m.lag_s for m in measured)
    print(f"{faults} requests failed; the client was at most {lag * 1e3:.0f} ms late (P99)")
    facts = {
        "slo": {"ttft": slo.ttft, "tbt": slo.tbt},
        "workload": workload.name,
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "load_average_before": load_before,
        "faults": faults,
        "client_lag_p99_s": lag,
    }
    write_json(args.json, report(runs, **facts))
    return 0
