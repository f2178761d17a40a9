"""Conflux Parallelism, iteration by iteration: `python -m conflux_ray.execution.demo`.

Starts real workers on a small model, sends them a few requests, and prints for each iteration what every rank computes
(its decodes, and its shards of the prefill chunks), which KV moves, and which tokens come out.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from conflux_ray.vllm_compat.plugin import use_cpu_platform

if TYPE_CHECKING:
    from conflux_ray.config import ConfluxConfig
    from conflux_ray.execution.engine import Counters, TokenOutput
    from conflux_ray.execution.plan import IterationPlan
    from conflux_ray.planning.scheduler import Scheduler

BLOCK_SIZE = 8
MAX_MODEL_LEN = 256
MAX_PREFILL_TOKENS = 40  # of an iteration, so that prompts take several


class Arrival(NamedTuple):
    """A request of the demonstration."""

    name: str
    iteration: int  # it arrives when this many are done
    prompt: int  # tokens
    output: int


ARRIVALS = (
    # A settles on a rank of its own, since its context is the longest; the short ones share what is left.
    Arrival("A", 0, 70, 10),
    *(Arrival(name, 0, 9, 9) for name in "BCDEF"),
    # So the ranks are unequally busy when G comes, and waterfill gives them unequal shards of it.
    Arrival("G", 4, 100, 3),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demonstration; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m conflux_ray.execution.demo", description=__doc__)
    parser.add_argument("--model", default="tiny-llama", help="a model that conflux-ray builds, or a folder")
    parser.add_argument("--sp-degree", type=int, default=2, help="N, logical ranks")
    parser.add_argument("--iterations", type=int, default=12, help="how many to show")
    options = parser.parse_args(argv)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
    use_cpu_platform()
    from conflux_ray.config import ConfigError, check_model, parse, read_model_config, resolve_model

    try:
        config = parse(
            {
                "model": {"path": options.model, "dtype": "float32", "max_model_len": MAX_MODEL_LEN},
                "instance": {"sp_degree": options.sp_degree, "block_size": BLOCK_SIZE, "device": "cpu"},
            }
        )
        folder = resolve_model(options.model)
        check_model(config, read_model_config(folder))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    _show(config, folder, options.iterations)
    return 0


def _show(config: ConfluxConfig, folder: str, iterations: int) -> None:
    from conflux_ray.execution.engine import Engine
    from conflux_ray.execution.group import LocalWorkerGroup
    from conflux_ray.execution.loop import IterationLoop
    from conflux_ray.execution.request import Request
    from conflux_ray.execution.worker import WorkerSpec
    from conflux_ray.kv import KVGeometry
    from conflux_ray.vllm_compat.loader import ModelArgs
    from conflux_ray.wire import Sampling, Slo

    n = config.instance.sp_degree
    geometry = KVGeometry(BLOCK_SIZE, n, 2 * KVGeometry(BLOCK_SIZE, n, 2).min_blocks(MAX_MODEL_LEN))
    args = ModelArgs(folder, dtype="float32", max_model_len=MAX_MODEL_LEN, block_size=BLOCK_SIZE)
    print(f"starting {n} workers on {config.model.name} ...", flush=True)
    group = LocalWorkerGroup(WorkerSpec(args, 0, n, geometry.num_blocks, BLOCK_SIZE, ""))
    try:
        engine = Engine(geometry, n, 1, _make_policy(n), MAX_MODEL_LEN, seed=0)
        issued: dict[int, IterationPlan] = {}
        names: dict[int, str] = {}

        def watch(plan: IterationPlan) -> None:
            issued[plan.iteration] = plan
            names.update({r.alloc_id: r.request_id for r in engine.requests.values() if r.alloc_id >= 0})

        loop = IterationLoop(engine, group, watch=watch)
        rng = random.Random(0)
        waiting = list(ARRIVALS)
        for done in range(iterations):
            while waiting and waiting[0].iteration <= done:
                name, _, length, output = waiting.pop(0)
                prompt = [rng.randrange(group.shape.vocab_size) for _ in range(length)]
                sampling = Sampling(max_tokens=output, temperature=0.0, ignore_eos=True)
                engine.add(Request(name, 0, prompt, sampling, Slo(60.0, 10.0), arrival=float(len(names))))
                print(f"\nrequest {name} arrives: {length} prompt tokens, {output} to generate", end="")
            if not engine.has_work:
                break
            outputs = loop.step()
            _print_iteration(issued.pop(done), names, outputs, engine.timings[-1].measured)
    finally:
        group.close()
    _print_summary(engine.counters, n)


def _make_policy(num_ranks: int) -> Scheduler:
    """Algorithm 1 over a latency model by hand, in which the largest token load of a rank is what counts."""
    from conflux_ray.planning.latency_model import Affine, GemmCurve, LatencyModel
    from conflux_ray.planning.scheduler import Scheduler, SchedulerParams

    per_token, nothing = GemmCurve((0.0,), (0.0,), 1e-4), Affine(0.0, 0.0)
    model = LatencyModel("demo", 1, num_ranks, per_token, nothing, nothing, nothing)
    params = SchedulerParams(quantum=1, headroom=0, max_prefill_tokens=MAX_PREFILL_TOKENS)
    return Scheduler(model, "fcfs", params)


def _print_iteration(
    plan: IterationPlan, names: dict[int, str], outputs: Sequence[TokenOutput], seconds: float
) -> None:
    print(f"\n\niteration {plan.iteration}  ({1000 * seconds:.1f} ms)")
    for rank, steps in enumerate(plan.decodes):
        decodes = " ".join(f"{names[d.alloc_id]}@{d.position}" for d in steps)
        shards = [(names[c.alloc_id], s) for c in plan.chunks for s in c.shards if s.rank == rank]
        prefill = " ".join(f"{name}[{s.start}:{s.end}]" for name, s in shards)
        num_prefill = sum(s.end - s.start for _, s in shards)
        bar = "d" * len(steps) + "p" * num_prefill
        print(f"  rank {rank}  {len(steps)} decode + {num_prefill:2} prefill tokens |{bar}")
        print(f"          decode: {decodes or '-'};  prefill: {prefill or '-'}")
    for t in plan.transfers:
        name = names[t.alloc_id]
        print(f"  transition: KV of {name}[{t.start}:{t.end}] from all ranks to rank {t.target}, layer by layer")
    tokens = [f"{o.request.request_id}{o.index}={o.token}{' (last)' if o.finished else ''}" for o in outputs]
    print(f"  sampled: {' '.join(tokens) or '-'}", end="", flush=True)


def _print_summary(counters: Counters, num_ranks: int) -> None:
    print(
        f"\n\n{counters.iterations} iterations, {counters.mixed_iterations} of them with prefill and decode in one "
        f"forward pass; {counters.uneven_chunks} chunks in uneven shards; {counters.transitions} transitions moved KV "
        f"from the head shards of {num_ranks} ranks to one."
    )


if __name__ == "__main__":
    sys.exit(main())
