"""Conflux Parallelism, iteration by iteration: `python -m conflux_ray.execution.demo`.

Starts real workers on a tiny random model, feeds them a few requests, and prints for each iteration what every rank
computes (its decodes, its shards of the prefill chunks), which KV moves, and which tokens come out.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence

from conflux_ray.vllm_compat.plugin import use_cpu_platform

BLOCK_SIZE = 8
MAX_MODEL_LEN = 256


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m conflux_ray.execution.demo", description=__doc__)
    parser.add_argument("--model", default="tiny-llama", help="a model that conflux-ray builds, or a folder")
    parser.add_argument("--sp-degree", type=int, default=2, help="N, logical ranks")
    parser.add_argument("--iterations", type=int, default=12, help="how many to show")
    options = parser.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    use_cpu_platform()
    return _show(options.model, options.sp_degree, options.iterations)


def _show(model: str, n: int, iterations: int) -> int:
    from conflux_ray.config import resolve_model
    from conflux_ray.execution.engine import Engine
    from conflux_ray.execution.group import LocalWorkerGroup
    from conflux_ray.execution.loop import IterationLoop
    from conflux_ray.execution.plan import IterationPlan
    from conflux_ray.execution.request import Request
    from conflux_ray.execution.worker import WorkerSpec
    from conflux_ray.kv import KVGeometry
    from conflux_ray.planning.plain import PlainPolicy
    from conflux_ray.vllm_compat.loader import ModelArgs
    from conflux_ray.wire import Sampling, Slo

    geometry = KVGeometry(BLOCK_SIZE, n, 2 * KVGeometry(BLOCK_SIZE, n, 2).min_blocks(MAX_MODEL_LEN))
    args = ModelArgs(resolve_model(model), dtype="float32", max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
    print(f"starting {n} workers on {model} ...", flush=True)
    group = LocalWorkerGroup(WorkerSpec(args, 0, n, geometry.num_blocks, BLOCK_SIZE, ""))
    try:
        engine = Engine(geometry, n, 1, PlainPolicy(budget=40, max_decodes=8), MAX_MODEL_LEN, seed=0)
        issued: dict[int, IterationPlan] = {}
        loop = IterationLoop(engine, group, watch=lambda plan: issued.__setitem__(plan.iteration, plan))
        rng = random.Random(0)
        names: dict[int, str] = {}
        for i, length in enumerate((70, 25, 9)):
            prompt = [rng.randrange(group.shape.vocab_size) for _ in range(length)]
            sampling = Sampling(max_tokens=5 + i, temperature=0.0, ignore_eos=True)
            engine.add(Request("ABC"[i], 0, prompt, sampling, Slo(1.0, 0.1), arrival=float(i)))
            print(f"request {'ABC'[i]}: {length} prompt tokens, {sampling.max_tokens} to generate")
        shown = 0
        while engine.has_work and shown < iterations:
            oldest = shown
            alive = {r.alloc_id: r.request_id for r in engine.requests.values() if r.alloc_id >= 0}
            outputs = loop.step()
            alive |= {r.alloc_id: r.request_id for r in engine.requests.values() if r.alloc_id >= 0}
            names |= alive
            if oldest in issued:
                _print_iteration(issued[oldest], names, n, engine.timings[-1].measured)
                for output in outputs:
                    end = ", the last" if output.finished else ""
                    print(f"    {output.request.request_id} -> token {output.token} (output {output.index}{end})")
            shown += 1
    finally:
        group.close()
    c = engine.counters
    print(
        f"\n{c.iterations} iterations, {c.mixed_iterations} of them with prefill and decode in one forward pass; "
        f"{c.transitions} transitions moved KV from the head shards of {n} ranks to one."
    )
    return 0


def _print_iteration(plan, names: dict[int, str], n: int, seconds: float) -> None:
    print(f"\niteration {plan.iteration}  ({1000 * seconds:.1f} ms)")
    for rank in range(n):
        decodes = " ".join(f"{names.get(d.alloc_id, '?')}@{d.position}" for d in plan.decodes[rank])
        shards = [
            f"{names.get(chunk.alloc_id, '?')}[{shard.start}:{shard.end}]"
            for chunk in plan.chunks
            for shard in chunk.shards
            if shard.rank == rank
        ]
        tokens = sum(s.end - s.start for c in plan.chunks for s in c.shards if s.rank == rank)
        bar = "d" * len(plan.decodes[rank]) + "p" * tokens
        print(f"  rank {rank} |{bar:<26}| decode: {decodes or '-':<14} prefill: {' '.join(shards) or '-'}")
    for transfer in plan.transfers:
        print(
            f"  transition: KV of {names.get(transfer.alloc_id, '?')}[{transfer.start}:{transfer.end}] "
            f"from all ranks to rank {transfer.target}, layer by layer"
        )


if __name__ == "__main__":
    sys.exit(main())
