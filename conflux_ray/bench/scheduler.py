"""`conflux bench scheduler`: what one scheduling step costs (paper, section 8.5, Table 5).

Each step gets a queue and a decode state of its own, all built before the first is timed: building them is the
instance's work. `--decodes-as listed` makes a step sum over the resident decodes, `summed` gives it the sums. Lengths
are log-normal with the median and 95th percentile that the paper's Table 3 states for Mooncake-Toolagent.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from conflux_ray.planning.fallback import fallback_profile
from conflux_ray.planning.interface import DecodeState, KVState, PendingPrefill, ResidentDecode
from conflux_ray.planning.latency_model import LatencyModel
from conflux_ray.planning.ordering import ORDERS
from conflux_ray.planning.scheduler import Scheduler

BLOCK = 16
TTFT = 2.0
TBT = 0.1
NOW = 1000.0
WARM_UP = 5


def _model(num_ranks: int) -> LatencyModel:
    """Qwen3-14B on H200, from stated figures: the step's cost depends on the model's form, not its accuracy."""
    return fallback_profile(
        num_layers=40,
        hidden_size=5120,
        intermediate_size=17408,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        num_ranks=num_ranks,
        machine="h200",
        model="Qwen3-14B",
    ).latency


@dataclass(frozen=True, slots=True)
class Setup:
    """One line of the table.

    Args:
        policy: a key of `ORDERS`.
        pending: prefills in the queue.
        num_ranks: N.
        decodes: resident decodes of each rank.
        decodes_as: "listed" or "summed".
        load: "light", every deadline can be met, or "heavy", most cannot.
        prompt_median: tokens.
        prompt_p95: tokens.
    """

    policy: str
    pending: int
    num_ranks: int
    decodes: int
    decodes_as: str
    load: str
    prompt_median: float
    prompt_p95: float


def _pending(rng: random.Random, setup: Setup) -> list[PendingPrefill]:
    sigma = math.log(setup.prompt_p95 / setup.prompt_median) / 1.645
    slack = 100 * TTFT if setup.load == "light" else TTFT
    requests = []
    # In order of arrival, as an instance holds them.
    for i, arrival in enumerate(sorted(NOW - rng.uniform(0, TTFT) for _ in range(setup.pending))):
        tokens = max(1, round(rng.lognormvariate(math.log(setup.prompt_median), sigma)))
        requests.append(
            PendingPrefill(
                request_id=f"request-{i}",
                arrival=arrival,
                deadline=arrival + slack,
                total_tokens=tokens,
                tbt=TBT,
                prefill_blocks=-(-tokens // (BLOCK * setup.num_ranks)),
                decode_blocks=-(-(tokens + 1) // BLOCK),
            )
        )
    return requests


def _decodes(rng: random.Random, setup: Setup) -> DecodeState:
    listed = DecodeState(
        tuple(
            tuple(ResidentDecode(f"decode-{r}-{i}", rng.randint(512, 4096), TBT) for i in range(setup.decodes))
            for r in range(setup.num_ranks)
        )
    )
    if setup.decodes_as == "listed":
        return listed
    return DecodeState.summed(listed.tokens, listed.context, listed.tightest_tbt)


def measure(setup: Setup, steps: int, seed: int) -> tuple[list[float], float]:
    """Time of `steps` steps, each on new input made from `seed`.

    Returns:
        Milliseconds of each step, and the mean number of chunks in one.
    """
    rng = random.Random(seed)
    scheduler = Scheduler(_model(setup.num_ranks), setup.policy)
    inputs = [
        (_pending(rng, setup), _decodes(rng, setup), KVState(100_000, [60_000] * setup.num_ranks))
        for _ in range(WARM_UP + steps)
    ]
    # An instance holds one queue, not one for every step: keep the collector from walking the others.
    gc.collect()
    gc.freeze()
    times, chunks = [], 0
    for step, (pending, decodes, kv) in enumerate(inputs):
        start = time.perf_counter()
        decision = scheduler.schedule(pending, decodes, kv, NOW)
        elapsed = time.perf_counter() - start
        if step >= WARM_UP:
            times.append(elapsed * 1e3)
            chunks += len(decision.chunks)
    gc.unfreeze()
    return times, chunks / steps


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table.

    Args:
        argv: command line after `conflux bench scheduler`.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="conflux bench scheduler", description="Cost of one scheduling step.")
    parser.add_argument("--policy", choices=sorted(ORDERS), default="slo")
    parser.add_argument("--pending", type=int, nargs="+", default=[10, 50, 100, 500, 2000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--decodes", type=int, default=128, help="resident decodes of each rank")
    parser.add_argument("--decodes-as", choices=["summed", "listed"], default="summed")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--load", choices=["light", "heavy"], default="heavy", help="light: every deadline can be met")
    parser.add_argument("--prompt-median", type=float, default=6346)
    parser.add_argument("--prompt-p95", type=float, default=26114)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    if args.steps < 2:
        parser.error("--steps must be at least 2, or there is no deviation")
    print(
        f"policy {args.policy}, {args.decodes} decodes a rank ({args.decodes_as}), {args.steps} steps, load {args.load}"
    )
    print(f"{'ranks':>5} {'pending':>8} {'mean ms':>8} {'std ms':>8} {'median':>8} {'chunks':>7}")
    for num_ranks in args.ranks:
        for pending in args.pending:
            setup = Setup(
                args.policy,
                pending,
                num_ranks,
                args.decodes,
                args.decodes_as,
                args.load,
                args.prompt_median,
                args.prompt_p95,
            )
            times, chunks = measure(setup, args.steps, args.seed)
            mean, std, median = statistics.mean(times), statistics.stdev(times), statistics.median(times)
            print(f"{num_ranks:>5} {pending:>8} {mean:>8.3f} {std:>8.3f} {median:>8.3f} {chunks:>7.1f}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
