"""`conflux bench gpu [iteration]`: how near an iteration comes to its own lower bound on this machine's devices.

The bound is what no overlap can beat: the shared linear region alone, and the longer of the two attention paths alone.
All parts and the iterations are measured on the same workers in rounds of random order, as the profiler does it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from conflux_ray.profiling.batches import Batch, BatchChunk, Case, split_evenly
from conflux_ray.profiling.command import Settings, workers
from conflux_ray.profiling.machine import software_versions
from conflux_ray.profiling.samples import SampleFile

PARTS = ("gemm", "decode", "prefill", "comm")


@dataclass(frozen=True, slots=True)
class Row:
    """One chunk size; milliseconds, medians over the rounds, `low` and `high` their range."""

    chunk: int
    overlap: float
    overlap_low: float
    overlap_high: float
    serial: float
    gemm: float
    decode: float
    prefill: float
    comm: float
    splits: dict[int, float] = field(default_factory=dict)  # overlapped, by multiprocessors of decode attention

    @property
    def best(self) -> float:
        """The fastest way of running attention that was measured."""
        return min(self.overlap, self.serial, *self.splits.values())

    @property
    def bound(self) -> float:
        """The linear region alone and the longer attention path alone."""
        return self.gemm + max(self.decode, self.prefill + self.comm)

    @property
    def ratio(self) -> float:
        """The fastest way of running attention over the bound."""
        return self.best / self.bound


def cases_of(chunk: int, num_ranks: int, decodes: int, context: int, splits: Sequence[int] = ()) -> dict[str, Case]:
    """The iteration with `decodes` decodes of `context` tokens on every rank and one chunk after `context` tokens."""
    contexts = ((context,) * decodes,) * num_ranks
    chunks = (BatchChunk(context, split_evenly(chunk, num_ranks)),) if chunk else ()
    whole = Batch(contexts, chunks)
    prefill = Batch(((),) * num_ranks, chunks)
    # As many tokens on every rank as the iteration has, decodes counted in.
    load = whole.load.max_load
    linear = tuple(BatchChunk(0, tuple(load * (r == rank) for r in range(num_ranks))) for rank in range(num_ranks))
    cases = {
        "overlap": Case(f"overlap-{chunk}", whole),
        "gemm": Case(f"gemm-{chunk}", Batch(((),) * num_ranks, linear), "gemm"),
        "decode": Case(f"decode-{chunk}", Batch(contexts), "decode"),
    }
    if chunk:
        cases["serial"] = Case(f"serial-{chunk}", replace(whole, overlap=False))
        for sms in splits:
            cases[f"split-{sms}"] = Case(f"split-{sms}-{chunk}", replace(whole, decode_sms=sms))
        cases["prefill"] = Case(f"prefill-{chunk}", prefill, "prefill")
        if num_ranks > 1:
            cases["comm"] = Case(f"comm-{chunk}", prefill, "comm")
    return cases


def rows_of(
    chunks: Sequence[int],
    samples: SampleFile,
    num_ranks: int,
    decodes: int,
    context: int,
    splits: Sequence[int] = (),
) -> list[Row]:
    """The table from what was measured."""
    rows = []
    for chunk in chunks:
        cases = cases_of(chunk, num_ranks, decodes, context, splits)
        values = {name: [1e3 * s for s in samples.of(case.name)] for name, case in cases.items()}
        medians = {name: statistics.median(v) for name, v in values.items()}
        rows.append(
            Row(
                chunk,
                medians["overlap"],
                min(values["overlap"]),
                max(values["overlap"]),
                medians.get("serial", medians["overlap"]),
                medians["gemm"],
                medians["decode"],
                medians.get("prefill", 0.0),
                medians.get("comm", 0.0),
                {sms: medians[f"split-{sms}"] for sms in splits if f"split-{sms}" in medians},
            )
        )
    return rows


def format_rows(rows: Sequence[Row]) -> str:
    """The result as a Markdown table."""
    lines = [
        "| Chunk | Overlapped, ms [range] | Split, SMs of decode: ms | Serial | Linear | Decode | "
        "Prefill + collectives | Bound | Best / bound |",
        "|--:|--:|---|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {r.chunk} | {r.overlap:.2f} [{r.overlap_low:.2f}, {r.overlap_high:.2f}] | "
        f"{', '.join(f'{sms}: {ms:.2f}' for sms, ms in r.splits.items())} | {r.serial:.2f} | {r.gemm:.2f} | "
        f"{r.decode:.2f} | {r.prefill:.2f} + {r.comm:.2f} | {r.bound:.2f} | {r.ratio:.3f} |"
        for r in rows
    ]
    return "\n".join(lines)


def draw(rows: Sequence[Row], title: str, path: Path) -> None:
    """A bar for every chunk: the bound's parts, and the measured iterations beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.2))
    x = list(range(len(rows)))
    attention = [r.bound - r.gemm for r in rows]
    second, third = [i + 0.3 for i in x], [i + 0.6 for i in x]
    axes.bar(x, [r.gemm for r in rows], 0.28, color="#8c96a3", label="bound: linear region alone")
    longer = "bound: longer attention path alone"
    axes.bar(x, attention, 0.28, bottom=[r.gemm for r in rows], color="#c3cad3", label=longer)
    axes.bar(second, [r.overlap for r in rows], 0.28, color="#1b7837", label="iteration, paths overlapped")
    axes.bar(third, [r.serial for r in rows], 0.28, color="#2166ac", label="iteration, paths in turn")
    if any(r.splits for r in rows):
        split = [min(r.splits.values(), default=r.overlap) for r in rows]
        axes.plot(second, split, "_", color="black", markersize=14, label="overlapped, best split of the SMs")
    for i, row in enumerate(rows):
        axes.annotate(f"{row.ratio:.2f}", (i + 0.3, max(row.overlap, row.serial)), ha="center", va="bottom", fontsize=8)
    axes.set_xticks([i + 0.3 for i in x], [str(r.chunk) for r in rows])
    axes.set_xlabel("prefill tokens in the iteration")
    axes.set_ylabel("ms (above the bars: best over bound)")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


OTHERS = ("decode", "scaling")
"""Words after `conflux bench gpu` that name another module, `gpu_WORD`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table, or what another word asks for.

    Args:
        argv: command line after `conflux bench gpu`.

    Returns:
        Exit status.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in OTHERS:
        other = importlib.import_module(f"conflux_ray.bench.gpu_{words[0]}")
        return int(other.main(words[1:]))
    if words and words[0] == "iteration":
        del words[0]
    parser = argparse.ArgumentParser(
        prog="conflux bench gpu [iteration]",
        description="Iterations against their lower bound. `conflux bench gpu decode`: iterations of decodes alone, "
        "beside vLLM's. `conflux bench gpu scaling`: a prompt's prefill on more ranks.",
    )
    parser.add_argument("--model", default="qwen3-14b-shape")
    parser.add_argument("--load-format", choices=("auto", "safetensors", "dummy"), default="dummy")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--attention-graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="enqueue attention once for all layers (cuda)",
    )
    parser.add_argument(
        "--peer-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="heads written into the other GPUs' memory, not by NCCL (cuda)",
    )
    parser.add_argument(
        "--decode-sms", type=int, nargs="*", default=[64, 96], help="multiprocessors for decodes beside a chunk"
    )
    parser.add_argument("--sp-degree", type=int, default=2)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--decodes", type=int, default=24, help="of each rank")
    parser.add_argument("--context", type=int, default=8192, help="of each decode, and before the chunk, tokens")
    parser.add_argument("--chunks", type=int, nargs="+", default=[0, 512, 1024, 2048, 4096, 8192])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--png", type=Path, help="picture")
    args = parser.parse_args(words)
    # Imported here: it brings torch and vLLM.
    from conflux_ray.profiling.measure import WorkerMeasure, run_rounds, warm_up

    settings = Settings(
        args.model,
        args.device,
        args.sp_degree,
        args.tensor_parallel,
        load_format=args.load_format,
        attention_graphs=args.attention_graphs,
        peer_memory=args.peer_memory,
        max_tokens=max([*args.chunks, 16 * args.sp_degree]),
        max_batch=max(args.decodes, 4),
        max_context=max(args.context, 16),
    )
    splits = args.decode_sms if args.device == "cuda" else []
    shape = (args.sp_degree, args.decodes, args.context, splits)
    cases = [case for chunk in args.chunks for case in cases_of(chunk, *shape).values()]
    with tempfile.TemporaryDirectory() as folder, workers(settings) as (group, layout):
        samples = SampleFile(Path(folder) / "samples", {})
        measure = WorkerMeasure(group, layout, steady=args.device == "cuda")
        warm_up(cases, measure)
        run_rounds(cases, measure, samples, args.repeats, 0)
        rows = rows_of(args.chunks, samples, *shape)
    title = (
        f"{args.model}, N={args.sp_degree} x TP{args.tensor_parallel}, {args.decodes} decodes of {args.context} tokens "
        f"a rank, {settings.machine()}"
    )
    print(title)
    print(format_rows(rows))
    if args.out:
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "title": title,
            "versions": software_versions(),
            "repeats": args.repeats,
            "units": "ms",
            "rows": [{**asdict(row), "best": row.best, "bound": row.bound, "ratio": row.ratio} for row in rows],
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.png:
        draw(rows, title, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
