"""`conflux plan`: which system in which layout serves a workload best on so many GPUs, or for so much money."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from conflux_ray.simulator.capacity import CANDIDATES, make_plan
from conflux_ray.simulator.commands.arguments import (
    add_output,
    add_workload,
    hardware_of,
    slo_of,
    workload_of,
    write_json,
)
from conflux_ray.simulator.goodput import Search
from conflux_ray.simulator.hardware import DEVICES, MODELS
from conflux_ray.simulator.systems.registry import SYSTEMS


def main(argv: Sequence[str] | None = None) -> int:
    """Print the best layouts, what the first attains at the rate, and its headroom.

    Args:
        argv: command line after `conflux plan`.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="conflux plan", description="Choose a system and its layout.")
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen-14b")
    parser.add_argument("--device", choices=sorted(DEVICES), default="h200", help="stated figures of this GPU")
    parser.add_argument("--profile", type=Path, nargs="*", default=[], help="measured profiles")
    size = parser.add_mutually_exclusive_group(required=True)
    size.add_argument("--gpus", type=int, help="that there are")
    size.add_argument("--budget", type=float, help="money per hour, in the currency of --gpu-price")
    parser.add_argument("--gpu-price", type=float, help="of one GPU per hour")
    parser.add_argument("--rate", type=float, help="requests per second; default: the trace's own")
    parser.add_argument("--system", choices=list(SYSTEMS), nargs="+", default=list(CANDIDATES))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tolerance", type=float, default=0.05, help="of a goodput")
    parser.add_argument("--requests", type=int, default=600, help="of one simulation, at least")
    parser.add_argument("--show", type=int, default=5, help="layouts to print")
    add_workload(parser)
    add_output(parser)
    args = parser.parse_args(argv)
    total = args.gpus
    if args.budget is not None:
        if not args.gpu_price or args.gpu_price <= 0:
            parser.error("--budget needs --gpu-price, the price of one GPU per hour")
        total = math.floor(args.budget / args.gpu_price)
    if total < 1:
        parser.error(f"the budget pays for {total} GPUs; it takes at least one")
    try:
        hardware, workload, slo = hardware_of(args), workload_of(args), slo_of(args)
        rate = args.rate or (workload.trace.rate if workload.trace else 0.0)
        if not rate > 0:
            parser.error("--rate is needed: the workload has none of its own")
        search = Search(args.seconds, args.seeds, tolerance=args.tolerance, requests=args.requests)
        plan = make_plan(hardware, workload, slo, total, rate, search, args.jobs, args.system, args.prefix_cache)
    except ValueError as error:
        parser.error(str(error))
    print(f"{hardware.shape.name}, {total} {hardware.device.name}, {workload.name}, {rate:.2f} req/s wanted")
    print(f"TTFT {slo.ttft:g} s, TBT {slo.tbt * 1e3:g} ms. Stated hardware figures unless profiles are given.")
    print(f"{'system':18} {'base TP':>7} {'SP':>3} {'GPUs':>5} {'instances':>9} {'req/s':>7} {'headroom':>9}  options")
    for option in plan.options[: args.show]:
        words = " ".join(f"{name}={value}" for name, value in option.options.items())
        print(
            f"{SYSTEMS[option.system].title:18} {option.base_tp:>7} {option.sp:>3} {option.gpus:>5} "
            f"{option.instances:>9} {option.goodput:>7.2f} {option.goodput / rate - 1:>+9.0%}  {words}"
        )
    best = plan.options[0]
    print(
        f"Best: {SYSTEMS[best.system].title}, base TP {best.base_tp}, SP {best.sp}, {best.instances} instances; at "
        f"{rate:.2f} req/s {plan.attainment:.1%} of the requests are compliant, headroom {plan.headroom:+.0%}."
    )
    if plan.headroom < 0:
        print("It falls short: more GPUs, looser promises or admission control are needed.")
    write_json(
        args.json,
        {
            "rate": rate,
            "attainment": plan.attainment,
            "headroom": plan.headroom,
            "options": [option.to_json() for option in plan.options],
        },
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
