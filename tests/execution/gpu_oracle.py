"""The oracle on GPUs: random schedules on CUDA workers, checked against transformers on the CPU.

    python -m tests.execution.gpu_oracle --model tiny-llama --n 2 --tp 1 --dtype float32 --seeds 4

In float32 every token and logit is checked as in `oracle`, on small pages. In bfloat16 no two programs agree to the
bit, so the yardstick is transformers itself in bfloat16: over all rows of a schedule, and in the worst row, the engine
may be `BFLOAT16_FACTOR` times as far from the float32 reference as transformers in bfloat16 is on the same tokens. A
wrong block, head or position is some ten times as far. Prefill pages are FlashAttention's 128 tokens then, and prompts
longer.

Prints a table and exits with 1 if a schedule failed; with OUT set, writes the numbers to a JSON file there.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from conflux_ray.execution.exchange import SHARED_VARIABLE
from conflux_ray.execution.group import LocalWorkerGroup
from conflux_ray.execution.loop import WorkerLostError
from conflux_ray.execution.request import Request
from conflux_ray.execution.worker import WorkerSpec
from conflux_ray.kv import KVGeometry
from conflux_ray.models import store
from conflux_ray.models.reference import Reference
from conflux_ray.vllm_compat.graphs import decode_sizes, graph_sizes
from conflux_ray.vllm_compat.loader import ModelArgs
from tests.execution.oracle import OracleMismatchError, Schedule, run_schedule

BFLOAT16_FACTOR = 3.0
"""How many times as far from float32 as transformers in bfloat16 the engine may be."""

PAGE = 128  # tokens of a prefill page in bfloat16


@dataclass
class Distance:
    """How far logits rows are from the float32 reference's."""

    rows: int = 0
    squares: float = 0.0  # sum over rows of the mean squared difference
    worst: float = 0.0  # largest root mean square of a row
    agreeing: int = 0  # rows with the reference's greedy token

    def add(self, got: np.ndarray, want: np.ndarray) -> None:
        squares = ((got.astype(np.float64) - want) ** 2).mean(axis=1)
        self.rows += len(got)
        self.squares += float(squares.sum())
        self.worst = max(self.worst, float(np.sqrt(squares.max())))
        self.agreeing += int((got.argmax(axis=1) == want.argmax(axis=1)).sum())

    @property
    def rms(self) -> float:
        return float(np.sqrt(self.squares / max(self.rows, 1)))


class Bfloat16Check:
    """Measures the engine and transformers in bfloat16, both against float32 (an `oracle.Check`)."""

    def __init__(self, folder: Path, num_threads: int) -> None:
        from transformers import AutoModelForCausalLM

        self._num_threads = num_threads
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, attn_implementation="eager", local_files_only=True
        ).eval()
        self.engine, self.transformers = Distance(), Distance()

    @torch.inference_mode()
    def __call__(
        self, schedule: Schedule, request: Request, rows: list[bytes], reference: Reference
    ) -> tuple[float, int]:
        if not request.output:
            return 0.0, 0
        tokens = request.prompt + request.output[:-1]
        first = len(request.prompt) - 1
        want = reference.logits(tokens).numpy()[first:]
        got = np.stack([np.frombuffer(row, "<f4") for row in rows])
        torch.set_num_threads(self._num_threads)
        theirs = self._model(torch.tensor([tokens]), use_cache=False).logits[0, first:].float().numpy()
        self.engine.add(got, want)
        self.transformers.add(theirs, want)
        if not np.array_equal(got.argmax(axis=1), np.array(request.output)):
            raise OracleMismatchError(f"{request.request_id}: a token is not the best of its own logits")
        return float(np.abs(got - want).max()), 0

    def verdict(self) -> str | None:
        """What is wrong, or None."""
        for name in ("rms", "worst"):
            ours, theirs = getattr(self.engine, name), getattr(self.transformers, name)
            if not ours <= BFLOAT16_FACTOR * theirs:
                return f"{name} error {ours:.3g} is over {BFLOAT16_FACTOR} x transformers' {theirs:.3g}"
        return None


@dataclass
class Row:
    """What one schedule gave."""

    seed: int
    failure: str | None = None
    seconds: float = 0.0
    max_error: float | None = None
    counters: dict[str, int] = field(default_factory=dict)
    bfloat16: dict[str, float] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a model folder, or a name of conflux_ray.models.store")
    parser.add_argument("--n", type=int, default=2, help="logical ranks (SP degree)")
    parser.add_argument("--tp", type=int, default=1, help="GPUs of a logical rank (base TP)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seeds", type=int, default=4, help="number of schedules")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=10, help="requests of one schedule")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--block-size", type=int, help="tokens; default: 4 in float32, 128 / n in bfloat16")
    parser.add_argument("--size-pool", action="store_true", help="let the GPU's memory size the KV pool")
    parser.add_argument("--delay", type=float, default=0.0, help="most seconds injected before side-stream work")
    parser.add_argument("--graphs", type=int, default=0, help="capture the linear regions up to this many tokens")
    parser.add_argument("--repeat", action="store_true", help="enqueue attention once an iteration for all layers")
    parser.add_argument("--peer", action="store_true", help="exchange heads by writing into the other GPUs' memory")
    parser.add_argument("--one-gpu", action="store_true", help="all workers on one GPU, with --peer")
    parser.add_argument("--runner", help="module:class of a runner with a planted bug (tests.execution.faults)")
    parser.add_argument("--threads", type=int, default=8, help="of the reference")
    args = parser.parse_args()
    folder = Path(args.model) if Path(args.model).is_dir() else store.model_dir(args.model)
    small = args.dtype == "float32"
    block_size = args.block_size or (4 if small else -(-PAGE // args.n))
    max_model_len = 128 if small else 1024
    num_blocks = KVGeometry(block_size, args.n, 2).min_blocks(max_model_len)
    started = time.monotonic()
    options: dict[str, Any] = {"runner": args.runner} if args.runner else {}
    if args.one_gpu:
        os.environ[SHARED_VARIABLE] = "1"
    group = LocalWorkerGroup(
        WorkerSpec(
            ModelArgs(str(folder), args.dtype, max_model_len, tensor_parallel=args.tp, block_size=block_size),
            0,
            args.n * args.tp,
            0 if args.size_pool else num_blocks,
            block_size,
            "",
            device=args.device,
            return_logits=True,
            decode_delay=(0.0, args.delay),
            transfer_delay=(0.0, args.delay),
            # What is larger goes by collectives, which cannot be captured where workers share a GPU.
            max_prefill_tokens=4096 if args.one_gpu else 512,
            max_num_seqs=16,
            repeat_attention=args.repeat,
            peer_memory=args.peer or args.one_gpu,
            one_gpu=args.one_gpu,
            graph_sizes=graph_sizes(args.graphs) if args.graphs else (),
            decode_sizes=decode_sizes(16) if args.graphs else (),
            **options,
        )
    )
    print(f"workers up after {time.monotonic() - started:.1f} s, {group.num_blocks} blocks", flush=True)
    reference = Reference(folder, num_threads=args.threads)
    rows: list[Row] = []
    try:
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            shape = {} if small else {"max_prompt": 700, "max_output": 80, "max_chunk": 300}
            schedule = Schedule(seed, num_requests=args.requests, **shape)
            check = None if small else Bfloat16Check(folder, args.threads)
            # The engine may know fewer blocks than there are, so that decodes are preempted.
            geometry = (args.n, args.tp, num_blocks, block_size, max_model_len)
            rows.append(run_one(schedule, group, reference, geometry, check))
            print(line(rows[-1]), flush=True)
    except WorkerLostError as error:
        rows.append(Row(seed, failure=f"workers lost: {error}"))
        print(error, flush=True)
        group.kill()
    else:
        group.close()
    report(args, group, rows)
    return int(any(row.failure for row in rows))


def run_one(
    schedule: Schedule,
    group: LocalWorkerGroup,
    reference: Reference,
    geometry: tuple[int, int, int, int, int],
    check: Bfloat16Check | None,
) -> Row:
    """Run one schedule; a worker's death raises, a wrong result is in the row."""
    started = time.monotonic()
    row = Row(schedule.seed)
    try:
        outcome = run_schedule(schedule, group, reference, *geometry, check=check)
    except OracleMismatchError as error:
        row.failure = str(error)
    else:
        row.max_error, row.counters = outcome.max_error, asdict(outcome.counters)
        if check is not None:
            row.failure = check.verdict()
    if check is not None:
        ours, theirs = check.engine, check.transformers
        row.bfloat16 = {
            "rows": ours.rows,
            "rms": ours.rms,
            "transformers_rms": theirs.rms,
            "worst": ours.worst,
            "transformers_worst": theirs.worst,
            "agreement": ours.agreeing / max(ours.rows, 1),
            "transformers_agreement": theirs.agreeing / max(theirs.rows, 1),
        }
    row.seconds = time.monotonic() - started
    return row


def line(row: Row) -> str:
    """One line of the table."""
    c = row.counters
    parts = [f"seed {row.seed:3d}  {'FAIL' if row.failure else 'ok  '}  {row.seconds:5.1f} s"]
    if row.max_error is not None:
        parts.append(f"max {row.max_error:.2e}")
    if row.bfloat16:
        b = row.bfloat16
        parts.append(f"rms {b['rms']:.2e} (hf {b['transformers_rms']:.2e})")
        parts.append(f"worst {b['worst']:.2e} (hf {b['transformers_worst']:.2e})")
        parts.append(f"greedy {b['agreement']:.3f} (hf {b['transformers_agreement']:.3f})")
    if c:
        parts.append(
            f"it {c['iterations']} mixed {c['mixed_iterations']} uneven {c['uneven_chunks']} empty {c['empty_shards']} "
            f"transitions {c['transitions']} preempt {c['preemptions']} abort {c['aborted']}"
        )
    if row.failure:
        parts.append(row.failure.strip().splitlines()[-1][:200])
    return "  ".join(parts)


def report(args: argparse.Namespace, group: LocalWorkerGroup, rows: list[Row]) -> None:
    """Print the table, and write it where OUT says."""
    name = f"{Path(args.model).name}-n{args.n}-tp{args.tp}-{args.dtype}"
    failed = sum(row.failure is not None for row in rows)
    print(f"== {name}: {len(rows) - failed} of {args.seeds} schedules ok" + (f", {failed} FAILED" if failed else ""))
    for row in rows:
        print(line(row))
    if os.environ.get("OUT"):
        out = {"model": name, "num_blocks": group.num_blocks, "rows": [asdict(row) for row in rows]}
        Path(os.environ["OUT"], f"gpu_oracle-{name}.json").write_text(json.dumps(out, indent=1))


if __name__ == "__main__":
    sys.exit(main())
