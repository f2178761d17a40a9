"""`conflux bench replay`: one trace through a live server and through the simulator, and how far the two are apart.

The server is the deployment's own, started on this machine. The simulator gets the same requests, the same planner with
the same configuration (`cluster.policy.make_policy`), the deployment's KV pool, and the latency profile that the
planner plans with. What it lacks is in docs/simulator.md: HTTP and tokenizing, the second iteration that is issued
ahead, and whatever else runs on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import yaml

from conflux_ray.bench.live.client import Target
from conflux_ray.bench.live.point import Load, Point, run_point
from conflux_ray.bench.server import instance_stats, ray_is_running, running_server
from conflux_ray.cluster.policy import make_policy
from conflux_ray.config import (
    GIB,
    ConfigError,
    ConfluxConfig,
    ModelGeometry,
    check_model,
    parse,
    read_model_config,
    resolve_model,
    size_pool,
)
from conflux_ray.planning.latency_model import LatencyModel
from conflux_ray.planning.scheduler import Scheduler
from conflux_ray.serving.environment import serve_environment
from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.commands.arguments import write_json
from conflux_ray.simulator.deployment import BLOCK_SIZE, Deployment
from conflux_ray.simulator.goodput import WARM_UP
from conflux_ray.simulator.hardware import Device, ModelShape
from conflux_ray.simulator.metrics import Summary
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.router import QueuedWork
from conflux_ray.simulator.run import serve
from conflux_ray.simulator.systems.conflux import ConfluxInstance
from conflux_ray.simulator.trace import Trace
from conflux_ray.simulator.workload import Workload

PERCENTILES = ("p50", "p95")
DEFAULT_KV_GIB = 0.5
"""Of a CPU worker (`cluster.instance`)."""
PATIENCE = Slo(600.0, 600.0)
"""Promises that the client is told, so that it cuts no request that is merely late."""
WARM_UP_SEED, WARM_UP_REQUESTS = 1000, 10
"""The requests before the first replay."""


@dataclass(frozen=True)
class ServedHardware:
    """What a deployment runs on, for one SP degree and base TP.

    Args:
        geometry: of the model.
        model: its iteration times.
        tokens: of KV on one logical rank.
    """

    geometry: ModelGeometry
    model: LatencyModel
    tokens: int

    @property
    def shape(self) -> ModelShape:
        g = self.geometry
        sizes = (g.num_layers, g.hidden_size, g.intermediate_size, g.num_heads, g.num_kv_heads, g.head_size)
        return ModelShape("served", *sizes, g.vocab_size, g.max_model_len)

    @property
    def device(self) -> Device:
        raise NotImplementedError("a served machine has a measured profile, no stated figures")

    def latency(self, num_ranks: int, base_tp: int) -> LatencyModel:
        return self.model

    def kv_tokens(self, base_tp: int) -> int:
        return self.tokens


def simulated(config: ConfluxConfig, trace: Trace) -> Summary:
    """`trace` in simulated time on one instance of the deployment.

    Raises:
        ValueError: the deployment cannot be simulated; the message names the field.
    """
    instance = config.instance
    if config.scheduler.policy == "plain":
        raise ValueError("scheduler.policy='plain' has no latency model to simulate with; choose slo, fcfs or srpt")
    if instance.block_tokens != BLOCK_SIZE:
        raise ValueError(
            f"instance.block_size={instance.block_tokens}: the simulator has blocks of {BLOCK_SIZE} tokens"
        )
    geometry = check_model(config, read_model_config(resolve_model(config.model.path)))
    pool = size_pool(geometry, instance, (instance.kv_memory_gib or DEFAULT_KV_GIB) * GIB)
    policy = make_policy(config, geometry, instance.device)
    assert isinstance(policy, Scheduler)
    hardware = ServedHardware(geometry, policy.model, pool.num_blocks * pool.block_size)
    clock = Clock()
    served = ConfluxInstance(
        clock, Deployment(hardware, instance.num_workers), instance.tensor_parallel, policy.model, policy
    )
    slo = Slo(config.slo.ttft_s, config.slo.tbt_s)
    return serve(trace, slo, clock, QueuedWork([served]), WARM_UP).summary


@dataclass(frozen=True, slots=True)
class Latencies:
    """P50 and P95 of the counted requests, seconds: time to first token, time between tokens."""

    ttft_p50: float
    ttft_p95: float
    tbt_p50: float
    tbt_p95: float

    @classmethod
    def of_point(cls, point: Point) -> Latencies:
        """What the client saw.

        Raises:
            ValueError: a request was not answered as asked.
        """
        for record in point.records:
            if record.fault is not None:
                raise ValueError(f"request {record.index} of seed {point.seed} failed: {record.fault}")
        ttft = [r.times[0] - r.arrival for r in point.counted]
        gaps = np.concatenate([np.diff(r.times) for r in point.counted])
        return cls(*(float(np.percentile(values, q)) for values in (ttft, gaps) for q in (50, 95)))

    @classmethod
    def of_summary(cls, summary: Summary) -> Latencies:
        """What the simulator says."""
        return cls(*(values[p] for values in (summary.ttft, summary.tbt) for p in PERCENTILES))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace, live and simulated.

    Args:
        rate: requests per second.
        seed: of the draw.
        live: of each repeat.
        simulated: the same whenever it is asked.
        slowness: of each repeat, median over its last iterations of measured / predicted time.
    """

    rate: float
    seed: int
    live: tuple[Latencies, ...]
    simulated: Latencies
    slowness: tuple[float, ...]

    def error(self, name: str) -> tuple[float, float, float]:
        """(simulated - live) / live of a field of `Latencies`: of the median repeat, and its ends over the repeats."""
        ours = getattr(self.simulated, name)
        theirs = [getattr(one, name) for one in self.live]
        return ours / statistics.median(theirs) - 1, ours / max(theirs) - 1, ours / min(theirs) - 1

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self) | {"error": {name: self.error(name) for name in Latencies.__slots__}}


def format_table(comparisons: Sequence[Comparison]) -> str:
    """The result as a Markdown table; milliseconds."""
    lines = ["| req/s | Seed | What | Live, ms | Simulated, ms | Error |", "|--:|--:|---|--:|--:|--:|"]
    for c in comparisons:
        for name in Latencies.__slots__:
            live = [1e3 * getattr(one, name) for one in c.live]
            error, low, high = c.error(name)
            what, percentile = name.upper().split("_")
            lines.append(
                f"| {c.rate:g} | {c.seed} | {what} {percentile} | {statistics.median(live):.0f} [{min(live):.0f}, "
                f"{max(live):.0f}] | {1e3 * getattr(c.simulated, name):.0f} | {error:+.0%} [{low:+.0%}, {high:+.0%}] |"
            )
    return "\n".join(lines)


def _slowness(server: psutil.Process) -> float:
    timings = [t for t in instance_stats(server, 1)[0]["timings"] if t["predicted"] > 0]
    return statistics.median(t["measured"] / t["predicted"] for t in timings)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="conflux bench replay",
        description="Replay a shortened trace through a live server and through the simulator, and compare.",
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL")
    parser.add_argument("--shorten", type=float, nargs=2, default=[1 / 40, 1 / 20], metavar=("PROMPT", "OUTPUT"))
    parser.add_argument("--deployment", type=Path, default=Path("deployments/conflux.yaml"), help="of one instance")
    parser.add_argument("--profile", help="latency profile in place of the deployment's: a shipped name or a file")
    parser.add_argument("--rate", type=float, nargs="+", default=[0.3], help="requests per second")
    parser.add_argument("--requests", type=int, default=40, help="of one replay")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--repeats", type=int, default=3, help="live replays of the same requests")
    parser.add_argument("--ttft", type=float, default=10.0, help="promise that the planner plans for, seconds")
    parser.add_argument("--tbt", type=float, default=1.0, help="the same")
    parser.add_argument("--port", type=int, default=18700, help="of HTTP")
    parser.add_argument("--json", type=Path, help="write the result there")
    return parser.parse_args(argv)


def deployment_of(args: argparse.Namespace) -> dict[str, Any]:
    """The deployment on another port, with the promises and the profile of the command line."""
    config = yaml.safe_load(args.deployment.read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": args.port}
    values = config["applications"][0]["args"]
    values["slo"] = {"ttft_s": args.ttft, "tbt_s": args.tbt}
    if args.profile:
        values.setdefault("scheduler", {})["profile"] = args.profile
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table.

    Args:
        argv: command line after `conflux bench replay`.

    Returns:
        0; 1 if another Ray cluster runs here; 2 if it cannot be done.
    """
    args = _parse(argv)
    if ray_is_running():
        print("Ray is running on this machine; stop it first: its load would be measured", file=sys.stderr)
        return 1
    load_before = os.getloadavg()[0]
    try:
        values = deployment_of(args)
        config = parse(values["applications"][0]["args"])
        if config.instance.num_replicas != 1 or config.instance.device != "cpu":
            raise ConfigError(f"{args.deployment}: it must have one instance (num_replicas: 1) with device: cpu")
        geometry = check_model(config, read_model_config(resolve_model(config.model.path)))
        workload = Workload.from_file(args.trace, geometry.max_model_len).shrunk(*args.shorten)
        load = Load(
            workload, PATIENCE, 1.0, clients=1, max_lag=1.0, least=args.requests, vocab_size=geometry.vocab_size
        )
        wanted = {
            (r, s): Latencies.of_summary(simulated(config, load.draw(r, s))) for r in args.rate for s in args.seed
        }
        comparisons = _replay(args, values, config.model.name, load, wanted)
    except (ValueError, OSError, KeyError, RuntimeError) as error:
        print(f"conflux bench replay: {error}", file=sys.stderr)
        return 2
    print(f"{config.model.name}, {args.deployment}, {workload.name}, {args.requests} requests, {args.repeats} repeats")
    print(format_table(comparisons))
    slowness = [s for c in comparisons for s in c.slowness]
    print(
        f"Iterations took {min(slowness):.2f} to {max(slowness):.2f} times what the corrected profile says (medians)."
    )
    document = {
        "model": config.model.name,
        "workload": workload.name,
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "load_average_before": load_before,
        "comparisons": [c.to_json() for c in comparisons],
    }
    write_json(args.json, document)
    return 0


def _replay(
    args: argparse.Namespace,
    values: dict[str, Any],
    model: str,
    load: Load,
    wanted: dict[tuple[float, int], Latencies],
) -> list[Comparison]:
    target = Target((f"http://127.0.0.1:{args.port}",), model)
    live: dict[tuple[float, int], list[Latencies]] = {key: [] for key in wanted}
    slowness: dict[tuple[float, int], list[float]] = {key: [] for key in wanted}
    with running_server(values, serve_environment()) as server:
        first = replace(load, least=WARM_UP_REQUESTS)  # they set things up, and the planner's correction settles
        run_point(first, target, args.rate[0], WARM_UP_SEED, say=lambda _: None)
        # Repeats outermost: what drifts meets all rates and seeds alike.
        for repeat in range(args.repeats):
            for rate, seed in wanted:
                point = run_point(load, target, rate, seed, say=lambda _: None)
                live[rate, seed].append(Latencies.of_point(point))
                slowness[rate, seed].append(_slowness(server))
                print(
                    f"{rate:g} requests/s, seed {seed}, repeat {repeat}: {live[rate, seed][-1]}",
                    file=sys.stderr,
                    flush=True,
                )
    return [
        Comparison(rate, seed, tuple(live[rate, seed]), found, tuple(slowness[rate, seed]))
        for (rate, seed), found in wanted.items()
    ]


if __name__ == "__main__":
    raise SystemExit(main())
