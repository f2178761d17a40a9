"""`conflux bench metrics`: what metrics cost an iteration, a token and a second.

The iteration thread of an instance counts every iteration and reads the engine's state once a second; an ingress counts
every token; a thread of each process hands the values to Ray once a second. The last is not on the path of an iteration
but shares the interpreter with it. The goal: all of it at most 1 % of an iteration.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from conflux_ray.execution.engine import Engine
from conflux_ray.execution.plan import Chunk, Decode, IterationPlan, Shard, Transfer, WorkerResult
from conflux_ray.execution.request import Request
from conflux_ray.kv import KVGeometry
from conflux_ray.metrics.ingress import IngressMetrics
from conflux_ray.metrics.instance import InstanceMetrics
from conflux_ray.planning.interface import Decision
from conflux_ray.planning.plain import PlainPolicy
from conflux_ray.wire import LoadReport, Sampling, Slo

ITERATION_SECONDS = 0.017
"""A decode-only iteration of Qwen3-14B on two H200 (docs/benchmarks.md): the shortest there is to slow down."""

_REPEATS = 5


def per_call(call: Callable[[], None], calls: int) -> float:
    """Processor seconds of one call, this thread's alone: the median of some rounds."""
    rounds = []
    for _ in range(_REPEATS):
        started = time.thread_time()
        for _ in range(calls):
            call()
        rounds.append((time.thread_time() - started) / calls)
    return statistics.median(rounds)


def busy_engine(ranks: int, decodes: int) -> Engine:
    """An engine with `decodes` resident decodes on each rank, as `sample` finds it."""
    geometry = KVGeometry(16, ranks, 64 * decodes * ranks)
    engine = Engine(geometry, ranks, 1, PlainPolicy(1 << 20, decodes), max_model_len=512)
    now = 0.0
    for number in range(ranks * decodes):
        engine.add(Request(f"r{number}", 0, [1] * 64, Sampling(max_tokens=400), Slo(2.0, 0.1), now))
    while engine.num_waiting:
        plan = engine.plan(now)
        assert plan is not None, "the pool holds all of them"
        residents = {r.alloc_id: r.rank for r in plan.new_residents}
        sampled = [[d.alloc_id for d in rank] for rank in plan.decodes]
        for alloc_id, rank in residents.items():
            sampled[rank].append(alloc_id)
        done = [t.transfer_id for t in plan.transfers]
        engine.apply(
            [WorkerResult(plan.iteration, w, sampled[w], [5] * len(sampled[w]), [], done, 0.01) for w in range(ranks)],
            now,
        )
    return engine


def measure(ranks: int, decodes: int, chunks: int) -> dict[str, float]:
    """Seconds of everything that metrics add.

    Args:
        ranks: N of the instance.
        decodes: resident decodes of a rank.
        chunks: prefill chunks of an iteration, each cut over all ranks; one of them moves to its decode rank.
    """
    engine = busy_engine(ranks, decodes)
    metrics = InstanceMetrics("model", "replica", engine, 160 * 1024)
    engine.last_decision = Decision(budget=4096, predicted=0.016)
    steps = tuple(tuple(Decode(i, 100) for i in range(decodes)) for _ in range(ranks))
    shards = tuple(Shard(rank, 64 * rank, 64 * rank + 64) for rank in range(ranks))
    plan = IterationPlan(
        0,
        steps,
        tuple(Chunk(i, b"", shards) for i in range(chunks)),
        transfers=(Transfer(1, 1, 0, 64 * ranks, 0),) if chunks else (),
    )
    results = [WorkerResult(0, worker, acknowledged=[1], elapsed=0.0161) for worker in range(ranks)]

    def iteration() -> None:
        metrics.issued(plan, 1.0)
        metrics.collected(results, 1.01)

    report = LoadReport(0.1, 1000.0, ranks * decodes, 0, 0.5)
    clock = iter(range(1 << 30))
    classes = {"default": Slo(2.0, 0.1), "chat": Slo(1.0, 0.05, "chat")}
    ingress = IngressMetrics("model", "ingress", classes)
    choice = ingress.submitted(ingress.arrived("/v1/completions"), classes["default"], 64)

    def request() -> None:
        record = ingress.arrived("/v1/completions")
        ingress.submitted(record, classes["chat"], 64)
        record.status = 200
        ingress.ended(record)

    return {
        "iteration": per_call(iteration, 2000),
        "sample": per_call(lambda: metrics.sample(report, 1.0 * next(clock)), 50),
        "token": per_call(lambda: choice.took(1, ingress.clock()), 20000),
        "request": per_call(request, 2000),
        **_flush(metrics, ingress),
    }


def _flush(metrics: InstanceMetrics, ingress: IngressMetrics) -> dict[str, float]:
    """Seconds of one export to Ray's agent by each process; needs Ray."""
    from conflux_ray.metrics.ray_export import RayExporter

    instance, front = RayExporter(metrics.store), RayExporter(ingress.store)
    return {"flush_instance": per_call(instance.flush, 20), "flush_ingress": per_call(front.flush, 20)}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: command line after `conflux bench metrics`.

    Returns:
        0 if metrics cost at most 1 % of an iteration, else 1.
    """
    parser = argparse.ArgumentParser(prog="conflux bench metrics", description="What metrics cost.")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--decodes", type=int, default=128, help="resident decodes of a rank")
    parser.add_argument("--chunks", type=int, default=4, help="prefill chunks of an iteration")
    parser.add_argument(
        "--iteration-ms", type=float, default=ITERATION_SECONDS * 1e3, help="length of the iteration to compare with"
    )
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args(argv)

    import ray

    # A cluster of its own: metrics of a benchmark have no place among a server's.
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR", address="local")
    try:
        seconds = measure(args.ranks, args.decodes, args.chunks)
    finally:
        ray.shutdown()
    length = args.iteration_ms / 1e3
    # What happens once a second falls on 1 / length iterations.
    share = (seconds["iteration"] + (seconds["sample"] + seconds["flush_instance"]) * length) / length
    print(
        f"N={args.ranks}, {args.decodes} decodes a rank, {args.chunks} chunks, iterations of {args.iteration_ms:g} ms"
    )
    print(f"counting an iteration          {seconds['iteration'] * 1e6:8.1f} us")
    print(f"reading the engine, each s     {seconds['sample'] * 1e6:8.1f} us")
    print(f"export of an instance, each s  {seconds['flush_instance'] * 1e6:8.1f} us")
    print(f"counting a token (ingress)     {seconds['token'] * 1e6:8.2f} us")
    print(f"counting a request (ingress)   {seconds['request'] * 1e6:8.1f} us")
    print(f"export of an ingress, each s   {seconds['flush_ingress'] * 1e6:8.1f} us")
    print(f"share of an iteration          {share:8.2%}  (goal: 1 %)")
    if args.out is not None:
        args.out.write_text(json.dumps({"arguments": vars(args) | {"out": None}, "seconds": seconds, "share": share}))
    return 0 if share <= 0.01 else 1
