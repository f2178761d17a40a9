"""Options that `bench serve` and `bench compare` share: the workload, the promises, the client."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

from conflux_ray.bench.live.point import Load
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.trace import TABLE_3
from conflux_ray.simulator.workload import Workload


def add_load(parser: argparse.ArgumentParser) -> None:
    """Options of the workload and the client."""
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="Mooncake JSONL: a random subset of it, scaled to each rate")
    source.add_argument("--workload", choices=sorted(TABLE_3), help="log-normal lengths with quantiles of Table 3")
    parser.add_argument("--unit", choices=["auto", "s", "ms"], default="auto", help="of the trace's timestamps")
    parser.add_argument("--skip-bad-rows", action="store_true", help="leave rows out that cannot be used")
    parser.add_argument("--arrivals", choices=["trace", "poisson"], default="trace", help="gaps between requests")
    parser.add_argument("--seconds", type=float, default=180.0, help="of arrivals in one point")
    parser.add_argument("--requests", type=int, default=2, help="of one point, at least")
    parser.add_argument("--ttft", type=float, default=2.0, help="seconds to the first token")
    parser.add_argument("--tbt", type=float, default=0.1, help="seconds from token to token; deadlines are cumulative")
    parser.add_argument("--attainment", type=float, default=0.95, help="share of compliant requests that passes")
    parser.add_argument("--warm-up", type=float, default=0.1, help="share of the requests that is not counted")
    parser.add_argument("--max-model-len", type=int, help="lengths are cut to it; default: what the server says")
    parser.add_argument("--vocab-size", type=int, help="prompt ids are below it; default: the served folder's")
    parser.add_argument("--block-tokens", type=int, default=512, help="of one hash id of the trace")
    parser.add_argument(
        "--no-shared-prefixes", action="store_true", help="random prompts even where the trace has hash ids"
    )
    parser.add_argument(
        "--clients", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)), help="processes that send"
    )
    parser.add_argument(
        "--max-lag", type=float, help="of the client, seconds at P99; beyond, a point is invalid; default: TBT / 10"
    )
    parser.add_argument("--drain", type=float, default=120.0, help="longest wait after the last arrival, seconds")


def load_of(args: argparse.Namespace, max_model_len: int, vocab_size: int) -> Load:
    """What the options say.

    Raises:
        ValueError: they do not go together, or the trace cannot be used.
    """
    if args.trace:
        workload = Workload.from_file(args.trace, max_model_len, args.unit, args.skip_bad_rows)
    else:
        workload = Workload.from_table(args.workload, max_model_len)
    return Load(
        workload,
        Slo(args.ttft, args.tbt),
        args.seconds,
        args.arrivals,
        args.warm_up,
        args.max_lag if args.max_lag is not None else args.tbt / 10,
        args.drain,
        args.clients,
        args.requests,
        vocab_size,
        args.block_tokens,
        not args.no_shared_prefixes,
    )


def settings_of(args: argparse.Namespace, load: Load, model: str) -> dict[str, Any]:
    """What the points of one folder share."""
    digest = hashlib.sha256(args.trace.read_bytes()).hexdigest()[:16] if args.trace else None
    return {**load.describe(), "model": model, "trace_sha256": digest, "attainment": args.attainment}
