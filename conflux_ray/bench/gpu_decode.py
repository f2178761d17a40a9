"""`conflux bench gpu decode`: an iteration of decodes alone, in the whole engine, beside vLLM's on the same GPU.

All requests decode side by side; measured is the time from one iteration's tokens to the next one's, once the last
prefill is some iterations back. Conflux runs its engine, its loop and real workers of one rank, without HTTP; vLLM runs
`LLMEngine.step` as its own offline interface does. Iterations one at a time show what the host adds when nothing hides
it: planning, sending, receiving, applying.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from conflux_ray.config import ModelGeometry, check_model, parse, read_model_config, resolve_model, size_pool
from conflux_ray.profiling.machine import describe_machine, software_versions
from conflux_ray.vllm_compat.plugin import use_cpu_platform

SETTLE = 16
"""Iterations of decodes alone before the first that counts."""
LEAST_CHUNK = 1024
"""Prompt tokens that every iteration prefills at least, as long as there are any."""
CPU_KV_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class Decodes:
    """What is measured.

    Args:
        model: name or folder.
        device: "cuda" or "cpu".
        load_format: of the weights.
        decodes: side by side.
        context: prompt tokens of each.
        iterations: measured, of each kind.
    """

    model: str
    device: str
    load_format: str
    decodes: int
    context: int
    iterations: int

    @property
    def output(self) -> int:
        """Tokens that each request generates: the first ones decode while the last ones are still prefilled."""
        return 2 * (self.iterations + SETTLE) + self.decodes * -(-self.context // LEAST_CHUNK) + 16

    @property
    def max_model_len(self) -> int:
        """Of the engine: all that is generated fits."""
        return self.context + self.output + 1

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random token ids, the same for every engine."""
        rng = random.Random(0)
        return [[rng.randrange(10, vocab_size) for _ in range(self.context)] for _ in range(self.decodes)]


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds of an iteration: median, 5th and 95th percentile."""

    median: float
    p5: float
    p95: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timings:
        """Of a list of seconds."""
        median, low, high = 1e3 * np.percentile(seconds, (50, 5, 95))
        return cls(float(median), float(low), float(high))

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.p5:.2f}, {self.p95:.2f}]"


def run_conflux(what: Decodes) -> dict[str, Timings]:
    """Iterations of Conflux's engine.

    Raises:
        RuntimeError: not all requests decoded all the time.

    Returns:
        `iteration`: from results to results; `device`: of it on the device; `exposed`: what an iteration takes beyond
        its time on the device where the next one is planned after its results; `planning`: of that, `Engine.plan`.
    """
    if what.device == "cpu":
        use_cpu_platform()
    # Imported here: it brings torch and vLLM.
    from conflux_ray.execution.engine import Engine
    from conflux_ray.execution.group import LocalWorkerGroup
    from conflux_ray.execution.loop import IterationLoop
    from conflux_ray.execution.request import Request
    from conflux_ray.execution.worker import worker_spec
    from conflux_ray.kv import KVGeometry
    from conflux_ray.wire import Sampling, Slo

    config = parse(
        {
            "model": {"path": what.model, "max_model_len": what.max_model_len, "load_format": what.load_format},
            "instance": {"device": what.device, "max_num_seqs": max(what.decodes, 2)},
        }
    )
    folder = resolve_model(config.model.path)
    geometry = check_model(config, read_model_config(folder))
    # On a GPU the workers size the pool.
    blocks = 0 if what.device == "cuda" else size_pool(geometry, config.instance, CPU_KV_BYTES).num_blocks
    group = LocalWorkerGroup(worker_spec(config, folder, geometry, blocks))
    try:
        block = config.instance.block_tokens
        engine = Engine(
            KVGeometry(block, 1, group.num_blocks), 1, 1, _policy(what, config, geometry), what.max_model_len
        )
        loop = IterationLoop(engine, group)
        sampling = Sampling(max_tokens=what.output, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(what.prompts(geometry.vocab_size)):
            engine.add(Request(str(number), 0, prompt, sampling, Slo(600.0, 600.0), arrival=0.0))
        while any(True for _ in engine.pending):
            loop.step()
        for _ in range(SETTLE):
            loop.step()
        times, device = [time.perf_counter()], []
        for _ in range(what.iterations):
            loop.step()
            times.append(time.perf_counter())
            device.append(engine.timings[-1].measured)
        while engine.num_in_flight:  # from here on one at a time
            engine.apply(group.collect(60.0), loop.clock())
        exposed, planning = [], []
        for _ in range(what.iterations):
            start = time.perf_counter()
            plan = engine.plan(loop.clock())
            planned = time.perf_counter()
            assert plan is not None
            group.broadcast(plan)
            engine.apply(group.collect(60.0), loop.clock())
            planning.append(planned - start)
            exposed.append(time.perf_counter() - start - engine.timings[-1].measured)
        if engine.counters.finished:
            raise RuntimeError("requests ended while they were measured: there were fewer decodes than asked for")
    finally:
        group.close()
    gaps = [b - a for a, b in itertools.pairwise(times)]
    return {
        "iteration": Timings.of(gaps),
        "device": Timings.of(device),
        "exposed": Timings.of(exposed),
        "planning": Timings.of(planning),
    }


def _policy(what: Decodes, config: Any, geometry: ModelGeometry) -> Any:
    from conflux_ray.cluster.policy import make_policy
    from conflux_ray.profiling.machine import machine_slug

    return make_policy(config, geometry, machine_slug(what.device))


def run_vllm(what: Decodes) -> Timings:
    """Iterations of vLLM's engine, in this process.

    Raises:
        RuntimeError: it generated less than was asked for.
    """
    from conflux_ray.vllm_compat.offline import decode_steps

    times = decode_steps(
        resolve_model(what.model),
        what.load_format,
        what.max_model_len,
        what.decodes,
        what.prompts,
        what.output,
        SETTLE,
    )
    gaps = [b - a for a, b in itertools.pairwise(times)][: what.iterations]
    # The requests began at different times, so the last ones to begin have fewer tokens when the first ones end.
    if len(gaps) < what.iterations // 2:
        raise RuntimeError(f"vLLM had {len(gaps)} iterations of {what.decodes} decodes, too few to compare")
    return Timings.of(gaps)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print.

    Args:
        argv: command line after `conflux bench gpu decode`.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="conflux bench gpu decode", description="Iterations of decodes alone.")
    parser.add_argument("--model", default="qwen3-14b-shape")
    parser.add_argument("--load-format", choices=("auto", "safetensors", "dummy"), default="dummy")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--decodes", type=int, default=24)
    parser.add_argument("--context", type=int, default=8192, help="prompt tokens of each decode")
    parser.add_argument("--iterations", type=int, default=200)
    parser.add_argument("--against", choices=("vllm", "nothing"), default="vllm")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--part", choices=("conflux", "vllm"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    what = Decodes(args.model, args.device, args.load_format, args.decodes, args.context, args.iterations)
    if args.part:
        found = run_conflux(what) if args.part == "conflux" else {"iteration": run_vllm(what)}
        print(json.dumps({name: asdict(timings) for name, timings in found.items()}))
        return 0
    # A process each: neither is to find the other's GPU memory, threads or settings.
    words = [sys.executable, "-m", "conflux_ray.bench.gpu_decode", *(sys.argv[1:] if argv is None else argv), "--part"]
    conflux = _part([*words, "conflux"])
    print(f"{what.model}, {what.decodes} decodes of {what.context} tokens, {describe_machine(what.device, 1)}; ms")
    print("| | Median [P5, P95] |\n|---|--:|")
    print(f"| Conflux, one rank | {conflux['iteration']} |")
    print(f"| of it on the device | {conflux['device']} |")
    report: dict[str, Any] = {name: asdict(timings) for name, timings in conflux.items()}
    if args.against == "vllm":
        vllm = _part([*words, "vllm"])["iteration"]
        report["vllm"] = asdict(vllm)
        report["ratio"] = conflux["iteration"].median / vllm.median
        print(f"| vLLM, TP1 | {vllm} |")
        print(f"| Conflux / vLLM | {report['ratio']:.3f} |")
    print(f"| Conflux, host when not hidden | {conflux['exposed']} |")
    print(f"| of it planning | {conflux['planning']} |")
    if args.out:
        head = {"date": datetime.now(UTC).date().isoformat(), "what": asdict(what), "versions": software_versions()}
        args.out.write_text(json.dumps({**head, "units": "ms", **report}, indent=1) + "\n")
    return 0


def _part(command: list[str]) -> dict[str, Timings]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return {name: Timings(**values) for name, values in json.loads(done.stdout.splitlines()[-1]).items()}


if __name__ == "__main__":
    sys.exit(main())
