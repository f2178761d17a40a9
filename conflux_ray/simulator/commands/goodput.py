"""`conflux goodput`: the largest rate that keeps the promises, each system in its best configuration."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

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
from conflux_ray.simulator.goodput import ATTAINMENT, Search, goodputs
from conflux_ray.simulator.hardware import narrowest_tp
from conflux_ray.simulator.run import Setup
from conflux_ray.simulator.systems.registry import SYSTEMS


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line for each system.

    Args:
        argv: command line after `conflux goodput`.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="conflux goodput", description="Search the goodput of systems.")
    parser.add_argument("--system", choices=list(SYSTEMS), nargs="+", default=list(SYSTEMS))
    parser.add_argument("--option", nargs="*", metavar="NAME=VALUE", help="one configuration instead of the sweep")
    parser.add_argument("--instances", type=int, default=1, help="behind the global router")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--attainment", type=float, default=ATTAINMENT, help="share of compliant requests")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of the rate")
    parser.add_argument("--requests", type=int, default=1000, help="of one simulation, at least")
    parser.add_argument("--guess", type=float, default=3.0, help="requests per second to start from")
    add_machine(parser)
    add_workload(parser)
    add_output(parser)
    args = parser.parse_args(argv)
    try:
        hardware, workload, slo = hardware_of(args), workload_of(args), slo_of(args)
        deployment = Deployment(hardware, args.gpus, args.prefix_cache)
        base_tp = narrowest_tp(hardware, args.gpus)
        cases = []
        for name in args.system:
            sweep = SYSTEMS[name].sweep(args.gpus, base_tp) if args.option is None else [options_of(args.option)]
            cases.append((Setup(name, deployment, slo, {}, args.instances), sweep, workload))
        search = Search(args.seconds, args.seeds, args.attainment, args.tolerance, args.guess, requests=args.requests)
        results = goodputs(cases, search, args.jobs)
    except ValueError as error:
        parser.error(str(error))
    print(f"{hardware.shape.name} on {args.instances} x {args.gpus} {hardware.device.name}, {workload.name}")
    print(
        f"TTFT {slo.ttft:g} s, TBT {slo.tbt * 1e3:g} ms; {args.attainment:.0%} attained by {args.seeds} seeds of at "
        f"least {args.seconds:g} s of arrivals and {args.requests} requests"
    )
    for result in sorted(results, key=lambda r: -r.mean):
        width = f"{result.half_width:.2f}" if math.isfinite(result.half_width) else "?"
        options = " ".join(f"{k}={v}" for k, v in result.options.items())
        print(f"{SYSTEMS[result.system].title:20} {result.mean:>6.2f} +- {width} req/s   {options}")
    write_json(args.json, {"results": [result.to_json() for result in results]})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
