"""`conflux bench gpu scaling`: how much faster more GPUs prefill one prompt beside the decodes of each.

Every rank has the same decodes and takes the same number of prompt tokens an iteration at each degree, so a prompt
takes half as many iterations on twice as many ranks. An iteration runs attention in the fastest way that was measured,
as the planner chooses it by its profile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from conflux_ray.profiling.batches import Batch, BatchChunk, Case, split_evenly
from conflux_ray.profiling.command import Settings, workers
from conflux_ray.profiling.machine import software_versions
from conflux_ray.profiling.samples import SampleFile


@dataclass(frozen=True, slots=True)
class Prefill:
    """A prompt prefilled on N ranks; milliseconds, medians over the rounds.

    Args:
        degree: N.
        iterations: one of each chunk: the fastest way of running attention.
        serial: the same with the two attention paths in turn.
    """

    degree: int
    iterations: list[float]
    serial: list[float]

    @property
    def total(self) -> float:
        """Of the prompt."""
        return sum(self.iterations)


def cases_of(prompt: int, degree: int, tokens: int, decodes: int, context: int, splits: Sequence[int]) -> list[Case]:
    """The iterations of a prompt on `degree` ranks.

    Args:
        tokens: of the prompt, of every rank and iteration.
        decodes: of every rank, after `context` tokens each.
        splits: of the multiprocessors, for decode attention beside prefill.
    """
    contexts = ((context,) * decodes,) * degree
    cases = []
    for start in range(0, prompt, degree * tokens):
        chunk = BatchChunk(start, split_evenly(min(degree * tokens, prompt - start), degree))
        batch = Batch(contexts, (chunk,))
        cases.append(Case(f"{degree}@{start}-overlap", batch))
        cases.append(Case(f"{degree}@{start}-serial", replace(batch, overlap=False)))
        cases += [Case(f"{degree}@{start}-{sms}", replace(batch, decode_sms=sms)) for sms in splits]
    return cases


def prefill_of(cases: Sequence[Case], samples: SampleFile, degree: int) -> Prefill:
    """What was measured of the cases of one degree."""
    medians: dict[str, dict[str, float]] = {}
    for case in cases:
        start, _, way = case.name.partition("-")
        medians.setdefault(start, {})[way] = 1e3 * statistics.median(samples.of(case.name))
    ways = list(medians.values())
    return Prefill(degree, [min(way.values()) for way in ways], [way["serial"] for way in ways])


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the table.

    Args:
        argv: command line after `conflux bench gpu scaling`.

    Returns:
        Exit status.
    """
    parser = argparse.ArgumentParser(prog="conflux bench gpu scaling", description="A prompt's prefill on N ranks.")
    parser.add_argument("--model", default="qwen3-14b-shape")
    parser.add_argument("--load-format", choices=("auto", "safetensors", "dummy"), default="dummy")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2], help="N, one after the other")
    parser.add_argument("--prompt", type=int, default=32768, help="tokens")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt, of a rank and iteration")
    parser.add_argument("--decodes", type=int, default=24, help="of each rank")
    parser.add_argument("--context", type=int, default=8192, help="of each decode, tokens")
    parser.add_argument("--decode-sms", type=int, nargs="*", default=[], help="splits of the multiprocessors to try")
    parser.add_argument(
        "--peer-memory",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="heads written into the other GPUs' memory, not by NCCL (cuda)",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file")
    args = parser.parse_args(argv)
    # Imported here: it brings torch and vLLM.
    from conflux_ray.profiling.measure import WorkerMeasure, run_rounds, warm_up

    found, machine = [], ""
    splits = args.decode_sms if args.device == "cuda" else []
    for degree in args.degrees:
        cases = cases_of(args.prompt, degree, args.tokens, args.decodes, args.context, splits)
        settings = Settings(
            args.model,
            args.device,
            degree,
            load_format=args.load_format,
            peer_memory=args.peer_memory,
            max_tokens=max(degree * args.tokens, 16 * degree),
            max_batch=max(args.decodes, 4),
            max_context=max(args.context, 16, *(chunk.context for case in cases for chunk in case.batch.chunks)),
        )
        with tempfile.TemporaryDirectory() as folder, workers(settings) as (group, layout):
            samples = SampleFile(Path(folder) / "samples", {})
            measure = WorkerMeasure(group, layout, steady=args.device == "cuda")
            warm_up(cases, measure)
            run_rounds(cases, measure, samples, args.repeats, 0)
            found.append(prefill_of(cases, samples, degree))
        machine = settings.machine()
    title = (
        f"{args.model}: {args.prompt} tokens, {args.tokens} a rank and iteration, beside {args.decodes} decodes of "
        f"{args.context} tokens a rank, {machine}"
    )
    print(title)
    print("| N | Iterations | Prefill, ms | Speed-up | Paths in turn, ms | Speed-up |\n|--:|--:|--:|--:|--:|--:|")
    first = found[0]
    for one in found:
        print(
            f"| {one.degree} | {len(one.iterations)} | {one.total:.0f} | {first.total / one.total:.2f} | "
            f"{sum(one.serial):.0f} | {sum(first.serial) / sum(one.serial):.2f} |"
        )
    if args.out:
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "title": title,
            "versions": software_versions(),
            "repeats": args.repeats,
            "units": "ms",
            "degrees": [{**asdict(one), "speed_up": first.total / one.total} for one in found],
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
