"""`conflux bench replay`: one trace through a live server and through the simulator, and how far the two are apart.

The server is the deployment's own, started on this machine, on CPUs or GPUs. The simulator gets the same requests, the
same planner with the same configuration (`cluster.policy.make_policy`), the KV pool of the running server, the latency
profile that the planner plans with, the same moments of planning, and what HTTP adds to an idle server. What it lacks
is in docs/simulator.md: whatever else runs on the machine, first of all.
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
import yaml

from conflux_ray.bench.live.client import Target
from conflux_ray.bench.live.machine import gpus as find_gpus
from conflux_ray.bench.live.point import Load, Point, run_point
from conflux_ray.bench.live.predict import EGRESS, INGRESS
from conflux_ray.bench.live.servers import Servers
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
from conflux_ray.profiling.registry import gpu_slug
from conflux_ray.serving.environment import serve_environment
from conflux_ray.simulator.ahead import Ahead
from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.commands.arguments import write_json
from conflux_ray.simulator.deployment import Deployment
from conflux_ray.simulator.goodput import WARM_UP
from conflux_ray.simulator.hardware import Device, ModelShape
from conflux_ray.simulator.metrics import Summary
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.router import QueuedWork
from conflux_ray.simulator.run import serve
from conflux_ray.simulator.systems.conflux import ENGINE, ConfluxInstance
from conflux_ray.simulator.trace import Trace
from conflux_ray.simulator.workload import Workload

PERCENTILES = ("p50", "p95")
DEFAULT_KV_GIB = 0.5
"""Of a CPU worker (`cluster.instance`)."""
PATIENCE = Slo(600.0, 600.0)
"""Promises that the client is told, so that it cuts no request that is merely late."""
CPU_SLO = Slo(10.0, 1.0)
"""What a small model on CPUs is asked to keep, unless the command line says otherwise."""
CPU_SHORTEN = (1 / 40, 1 / 20)
"""Of the trace's prompts and outputs there."""
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


def check(config: ConfluxConfig) -> None:
    """Raise ValueError if the deployment cannot be simulated; the message names the field."""
    if config.scheduler.policy == "plain":
        raise ValueError("scheduler.policy='plain' has no latency model to simulate with; choose slo, fcfs or srpt")
    if config.instance.num_replicas != 1:
        raise ValueError(f"instance.num_replicas={config.instance.num_replicas}: it must be 1, one instance")


def kv_tokens_of(config: ConfluxConfig) -> int:
    """KV tokens of a logical rank on CPUs, where memory is what the configuration says."""
    instance = config.instance
    geometry = check_model(config, read_model_config(resolve_model(config.model.path)))
    pool = size_pool(geometry, instance, (instance.kv_memory_gib or DEFAULT_KV_GIB) * GIB)
    return pool.num_blocks * pool.block_size


def simulated(config: ConfluxConfig, trace: Trace, kv_tokens: int, machine: str = "cpu") -> Summary:
    """`trace` in simulated time on one instance of the deployment.

    Args:
        config: of the deployment.
        trace: the requests.
        kv_tokens: of one logical rank. The simulator keeps them in blocks of 16 tokens, whatever the server's.
        machine: `cpu`, or `gpu_slug` of the GPUs: whose profile it is.
    """
    instance = config.instance
    geometry = check_model(config, read_model_config(resolve_model(config.model.path)))
    policy = make_policy(config, geometry, machine)
    assert isinstance(policy, Scheduler)
    hardware = ServedHardware(geometry, policy.model, kv_tokens)
    clock = Clock()
    served = ConfluxInstance(
        clock,
        Deployment(hardware, instance.num_workers),
        instance.tensor_parallel,
        policy.model,
        policy,
        ahead=ENGINE if instance.late_planning else Ahead(),
    )
    slo = Slo(config.slo.ttft_s, config.slo.tbt_s)
    router = QueuedWork([served])
    return serve(trace, slo, clock, router, WARM_UP, ingress=INGRESS, egress=EGRESS).summary


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


def _slowness(server: Servers) -> float:
    timings = [t for t in instance_stats(server, 1)[0]["timings"] if t["predicted"] > 0]
    return statistics.median(t["measured"] / t["predicted"] for t in timings)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="conflux bench replay",
        description="Replay a shortened trace through a live server and through the simulator, and compare.",
    )
    parser.add_argument("--trace", type=Path, required=True, help="Mooncake JSONL")
    parser.add_argument(
        "--shorten",
        type=float,
        nargs=2,
        metavar=("PROMPT", "OUTPUT"),
        help="lengths of the trace times these; default: a fortieth and a twentieth on CPUs, 1 and 1 on GPUs",
    )
    parser.add_argument("--deployment", type=Path, default=Path("deployments/conflux.yaml"), help="of one instance")
    parser.add_argument("--profile", help="latency profile in place of the deployment's: a shipped name or a file")
    parser.add_argument("--rate", type=float, nargs="+", default=[0.3], help="requests per second")
    parser.add_argument("--requests", type=int, default=40, help="of one replay")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--repeats", type=int, default=3, help="live replays of the same requests")
    parser.add_argument(
        "--ttft",
        type=float,
        help="promise that the planner plans for, seconds; default: 10 on CPUs, the deployment's on GPUs",
    )
    parser.add_argument("--tbt", type=float, help="the same; default: 1 on CPUs, the deployment's on GPUs")
    parser.add_argument("--port", type=int, default=18700, help="of HTTP")
    parser.add_argument("--json", type=Path, help="write the result there")
    return parser.parse_args(argv)


def deployment_of(args: argparse.Namespace) -> dict[str, Any]:
    """The deployment on another port, with the promises and the profile of the command line."""
    config = yaml.safe_load(args.deployment.read_text())
    config["http_options"] = {"host": "127.0.0.1", "port": args.port}
    values = config["applications"][0]["args"]
    own = values.get("slo", {})
    if values.get("instance", {}).get("device", "cpu") == "cpu":
        own = {"ttft_s": CPU_SLO.ttft, "tbt_s": CPU_SLO.tbt}
    asked = {"ttft_s": args.ttft, "tbt_s": args.tbt}
    values["slo"] = {**own, **{name: value for name, value in asked.items() if value is not None}}
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
        check(config)
        gpus = find_gpus()
        on_cpu = config.instance.device == "cpu"
        if not on_cpu and not gpus:
            raise ConfigError(f"{args.deployment}: instance.device='cuda', and nvidia-smi shows no GPU here")
        geometry = check_model(config, read_model_config(resolve_model(config.model.path)))
        workload = Workload.from_file(args.trace, geometry.max_model_len)
        if args.shorten or on_cpu:
            workload = workload.shrunk(*(args.shorten or CPU_SHORTEN))
        load = Load(
            workload,
            PATIENCE,
            1.0,
            # Client and server share the cores of a CPU deployment.
            clients=1 if on_cpu else 4,
            max_lag=1.0 if on_cpu else config.slo.tbt_s / 10,
            least=args.requests,
            vocab_size=geometry.vocab_size,
        )
        live = _replay(args, values, config, load)
        kv_tokens = live.kv_tokens or (kv_tokens_of(config) if on_cpu else None)
        if kv_tokens is None:
            raise RuntimeError("the server's log does not say how many KV blocks it has")
        machine = "cpu" if on_cpu else gpu_slug(gpus[0]["name"])
        comparisons = [
            Comparison(
                rate,
                seed,
                tuple(live.latencies[rate, seed]),
                Latencies.of_summary(simulated(config, load.draw(rate, seed), kv_tokens, machine)),
                tuple(live.slowness[rate, seed]),
            )
            for rate, seed in live.latencies
        ]
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
        "kv_tokens": kv_tokens,
        "comparisons": [c.to_json() for c in comparisons],
    }
    write_json(args.json, document)
    return 0


@dataclass(frozen=True, slots=True)
class _Live:
    """What the replays showed, by (rate, seed), and the KV tokens of a rank as the server's log has them."""

    latencies: dict[tuple[float, int], list[Latencies]]
    slowness: dict[tuple[float, int], list[float]]
    kv_tokens: int | None


def _replay(args: argparse.Namespace, values: dict[str, Any], config: ConfluxConfig, load: Load) -> _Live:
    target = Target((f"http://127.0.0.1:{args.port}",), config.model.name)
    keys = [(rate, seed) for rate in args.rate for seed in args.seed]
    latencies: dict[tuple[float, int], list[Latencies]] = {key: [] for key in keys}
    slowness: dict[tuple[float, int], list[float]] = {key: [] for key in keys}
    with running_server(values, serve_environment(), config.instance.device) as server:
        kv_tokens = server.kv_tokens()
        first = replace(load, least=WARM_UP_REQUESTS)  # they set things up, and the planner's correction settles
        run_point(first, target, args.rate[0], WARM_UP_SEED, say=lambda _: None)
        # Repeats outermost: what drifts meets all rates and seeds alike.
        for repeat in range(args.repeats):
            for rate, seed in keys:
                point = run_point(load, target, rate, seed, say=lambda _: None)
                latencies[rate, seed].append(Latencies.of_point(point))
                slowness[rate, seed].append(_slowness(server))
                print(
                    f"{rate:g} requests/s, seed {seed}, repeat {repeat}: {latencies[rate, seed][-1]}",
                    file=sys.stderr,
                    flush=True,
                )
    return _Live(latencies, slowness, kv_tokens)


if __name__ == "__main__":
    raise SystemExit(main())
