"""`conflux simulate`: one system, one rate or several, in simulated time."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from conflux_ray.simulator.commands.arguments import (
    add_machine,
    add_output,
    add_workload,
    hardware_of,
    options_of,
    slo_of,
    workload_of,
    write_json,
)
from conflux_ray.simulator.deployment import Deployment
from conflux_ray.simulator.goodput import WARM_UP
from conflux_ray.simulator.parallel import run_all
from conflux_ray.simulator.router import ROUTERS
from conflux_ray.simulator.run import Setup, simulate
from conflux_ray.simulator.systems.registry import SYSTEMS
from conflux_ray.simulator.workload import Workload

_Task = tuple[Setup, Workload, float, float, int]


def _run(task: _Task) -> dict[str, Any]:
    setup, workload, rate, seconds, seed = task
    trace = workload.draw(rate, seconds, seed)
    outcome = simulate(setup, trace, WARM_UP)
    return {
        "system": setup.system,
        "asked_rate": rate,
        "seed": seed,
        **outcome.summary.to_json(),
        "router": setup.router,
        "routed": list(outcome.routed),
        "routed_tokens": list(outcome.routed_tokens),
        "wall_seconds": outcome.seconds,
        "trace_notes": list(outcome.notes),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each system, rate and seed.

    Args:
        argv: command line after `conflux simulate`.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(
        prog="conflux simulate",
        description="Serve a workload in simulated time.",
        epilog="Options of a system are NAME=VALUE; a wrong name lists those there are.",
    )
    parser.add_argument("--system", choices=list(SYSTEMS), nargs="+", default=["conflux"])
    parser.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE", help="of the system")
    parser.add_argument("--instances", type=int, default=1, help="behind the global router")
    parser.add_argument("--router", choices=list(ROUTERS), default="queued_work", help="what spreads the requests")
    parser.add_argument("--speed", type=float, nargs="+", default=[], help="of each instance, relative to the hardware")
    parser.add_argument("--rate", type=float, nargs="+", default=[2.0], help="requests per second, all instances")
    parser.add_argument("--seed", type=int, nargs="+", default=[0])
    parser.add_argument("--describe-hardware", action="store_true", help="print every stated figure with its source")
    add_machine(parser)
    add_workload(parser)
    add_output(parser)
    args = parser.parse_args(argv)
    try:
        hardware, workload, slo = hardware_of(args), workload_of(args), slo_of(args)
        deployment = Deployment(hardware, args.gpus, args.prefix_cache)
        options = options_of(args.option)
        behind = (args.instances, args.router, tuple(args.speed))
        setups = [Setup(system, deployment, slo, options, *behind) for system in args.system]
        if args.describe_hardware:
            for name, value, source in hardware.device.describe():
                print(f"{name:24} {value:<12.5g} {source}")
            return 0
        tasks: list[_Task] = [
            (setup, workload, rate, args.seconds, seed) for setup in setups for rate in args.rate for seed in args.seed
        ]
        results = run_all(_run, tasks, args.jobs, "simulate")
    except ValueError as error:
        parser.error(str(error))
    print(f"{hardware.shape.name} on {args.instances} x {args.gpus} {hardware.device.name}, {workload.name}")
    print(f"TTFT {slo.ttft:g} s, TBT {slo.tbt * 1e3:g} ms, cumulative deadlines; {args.seconds:g} s of arrivals")
    for note in dict.fromkeys(note for r in results for note in r["trace_notes"]):
        print(f"  {note}")
    columns = ("attained", "TTFT p50/p95 s", "TBT p50/p95 ms", "preempted")
    print(f"{'system':20} {'rate':>6} {'seed':>4} " + " ".join(f"{column:>15}" for column in columns))
    for r in results:
        ttft, tbt = r["ttft"], r["tbt"]
        cells = (
            f"{r['attainment']:.1%}",
            f"{ttft['p50']:.2f}/{ttft['p95']:.2f}" if ttft else "-",
            f"{tbt['p50'] * 1e3:.1f}/{tbt['p95'] * 1e3:.1f}" if tbt else "-",
            str(r["preemptions"]),
        )
        print(f"{r['system']:20} {r['asked_rate']:>6.2f} {r['seed']:>4} " + " ".join(f"{cell:>15}" for cell in cells))
    write_json(args.json, {"slo": {"ttft": slo.ttft, "tbt": slo.tbt}, "results": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
