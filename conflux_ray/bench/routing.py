"""`conflux bench routing`: what spreading requests by queued work gains over doing it by count, or in turn.

In simulated time on stated GPUs by default: two instances that are alike, and two of which one is three times as fast.
`--live` does it with the router of a running server: deployments/two-instances.yaml on this machine, once for each way.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

from conflux_ray.simulator.commands.arguments import (
    add_machine,
    add_output,
    add_workload,
    hardware_of,
    slo_of,
    workload_of,
    write_json,
)
from conflux_ray.simulator.deployment import Deployment
from conflux_ray.simulator.goodput import WARM_UP
from conflux_ray.simulator.parallel import run_all
from conflux_ray.simulator.router import ROUTERS
from conflux_ray.simulator.run import Setup, simulate
from conflux_ray.simulator.workload import Workload

SPEEDS = ((1.0, 1.0), (1.0, 3.0))
"""Of the two instances, relative to the hardware."""


@dataclass(frozen=True, slots=True)
class Run:
    """One workload behind one router.

    Args:
        speeds: of the instances, in their order.
        rate: requests per second.
        router: a key of `ROUTERS`.
        seed: of the draw.
        ttft_p50: seconds, of the requests after the warm-up.
        ttft_p95: the same.
        attainment: share of the requests with every token on time, 0..1.
        work: share of the prompt tokens that each instance got, 0..1.
    """

    speeds: tuple[float, ...]
    rate: float
    router: str
    seed: int
    ttft_p50: float
    ttft_p95: float
    attainment: float
    work: tuple[float, ...]


_Task = tuple[Setup, Workload, float, float, int, int]


def _simulate(task: _Task) -> Run:
    setup, workload, rate, seconds, least, seed = task
    outcome = simulate(setup, workload.draw(rate, seconds, seed, least), WARM_UP)
    summary, total = outcome.summary, sum(outcome.routed_tokens)
    return Run(
        setup.speeds,
        rate,
        setup.router,
        seed,
        summary.ttft["p50"],
        summary.ttft["p95"],
        summary.attainment,
        tuple(tokens / total for tokens in outcome.routed_tokens),
    )


def format_table(runs: Sequence[Run]) -> str:
    """Means over the seeds as a Markdown table, with the range of the seeds for P95."""
    lines = [
        "| Speeds | req/s | Router | TTFT P50, s | TTFT P95, s | SLO attained | Work of each |",
        "|---|--:|---|--:|--:|--:|---|",
    ]
    groups: dict[tuple[tuple[float, ...], float, str], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.speeds, run.rate, run.router), []).append(run)
    for (speeds, rate, router), mine in groups.items():
        p95 = [run.ttft_p95 for run in mine]
        work = [mean(shares) for shares in zip(*(run.work for run in mine), strict=True)]
        lines.append(
            f"| {' : '.join(f'{s:g}' for s in speeds)} | {rate:g} | `{router}` | {mean(r.ttft_p50 for r in mine):.2f} "
            f"| {mean(p95):.2f} [{min(p95):.2f}, {max(p95):.2f}] | {mean(r.attainment for r in mine):.1%} "
            f"| {' : '.join(f'{share:.0%}' for share in work)} |"
        )
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="conflux bench routing",
        description="TTFT and SLO attainment of two instances behind each router, in simulated time or, live, here.",
    )
    parser.add_argument("--live", action="store_true", help="start servers on this machine (two tiny CPU instances)")
    parser.add_argument("--router", choices=list(ROUTERS), nargs="+", default=list(ROUTERS))
    parser.add_argument("--seed", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--load",
        type=float,
        nargs="+",
        default=[2.5, 3.25],
        help="requests per second for each unit of speed (simulated)",
    )
    parser.add_argument("--requests", type=int, default=1000, help="of one simulation, at least")
    add_machine(parser)
    parser.set_defaults(gpus=2)
    add_workload(parser)
    add_output(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table.

    Args:
        argv: command line after `conflux bench routing`.

    Returns:
        Exit status.
    """
    words = list(argv or ())
    if "--live" in words:
        from conflux_ray.bench.live.routing import main as live

        words.remove("--live")
        return live(words)
    parser = _parser()
    args = parser.parse_args(words)
    try:
        hardware, workload, slo = hardware_of(args), workload_of(args), slo_of(args)
        deployment = Deployment(hardware, args.gpus, args.prefix_cache)
        tasks: list[_Task] = [
            (
                Setup("conflux", deployment, slo, {}, len(speeds), router, speeds),
                workload,
                load * sum(speeds),
                args.seconds,
                args.requests,
                seed,
            )
            for speeds in SPEEDS
            for load in args.load
            for router in args.router
            for seed in args.seed
        ]
        runs = run_all(_simulate, tasks, args.jobs, "routing")
    except ValueError as error:
        parser.error(str(error))
    print(f"Conflux, {hardware.shape.name}, 2 instances of {args.gpus} {hardware.device.name}, {workload.name}")
    print(f"TTFT {slo.ttft:g} s, TBT {slo.tbt * 1e3:g} ms; {len(args.seed)} seeds")
    print(format_table(runs))
    write_json(args.json, report(runs, slo={"ttft": slo.ttft, "tbt": slo.tbt}, workload=workload.name))
    return 0


def report(runs: Sequence[Run], **facts: Any) -> dict[str, Any]:
    """As a JSON object."""
    return {**facts, "runs": [asdict(run) for run in runs]}


if __name__ == "__main__":
    raise SystemExit(main())
