"""`conflux profile`: measure a model on this machine into a profile, or evaluate a profile (section 6.2)."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from conflux_ray.config import (
    GIB,
    ConfigError,
    ConfluxConfig,
    ModelGeometry,
    block_bytes,
    check_model,
    parse,
    read_model_config,
    resolve_model,
)
from conflux_ray.kv import KVGeometry
from conflux_ray.planning.fitting import IterationRow, fit_profile
from conflux_ray.planning.profile import ProfileError
from conflux_ray.planning.refit import check_settings, refit
from conflux_ray.profiling.batches import (
    Case,
    Ranges,
    component_case,
    component_cases,
    iteration_cases,
    kind_of,
    linear_sizes,
    padded_sizes,
)
from conflux_ray.profiling.evaluation import evaluate_iterations
from conflux_ray.profiling.machine import describe_machine, load_average, machine_slug, software_versions
from conflux_ray.profiling.registry import find_profile, profile_name
from conflux_ray.profiling.samples import SampleFile, read_settings
from conflux_ray.profiling.served import served_rows

SERVED = ":served:"
"""In the name of a refitted profile, between the one it was made of and the date."""
HELD_OUT = 0.2
"""Share of a profile's whole iterations that is set aside, for the errors the profile states."""
CPU_KV_GIB = 0.5
"""KV memory of a CPU worker, an instance's default: with less, caches would hold what an instance reads from memory."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What a measurement depends on; kept in the profile, so that it can be evaluated alike.

    Args:
        model: name or path.
        device: "cpu" or "cuda".
        sp_degree: N.
        tensor_parallel: base TP.
        dtype: of weights and KV.
        load_format: "dummy" for random weights.
        attention_graphs: enqueue attention once an iteration for all layers; on GPUs only.
        peer_memory: exchange heads by writing into the other GPUs' memory; on GPUs only.
        block_size: tokens of a KV block; None as the server chooses.
        threads: of each worker, on the CPU.
        max_tokens: prefill tokens of an iteration.
        max_batch: decodes of a rank.
        max_context: tokens.
        density: multiplies the points of each component's grid in each direction.
        decode_sms: splits of a GPU's multiprocessors to measure overlapped iterations with, beside none.
        iterations: whole iterations; on a GPU twice as many, for the splits.
        seed: of batches and order.
    """

    model: str
    device: str = "cpu"
    sp_degree: int = 1
    tensor_parallel: int = 1
    dtype: str = "auto"
    load_format: str = "auto"
    attention_graphs: bool = True
    peer_memory: bool = True
    block_size: int | None = None
    threads: int = 1
    max_tokens: int = 10240
    max_batch: int = 128
    max_context: int = 16384
    density: int = 1
    decode_sms: tuple[int, ...] = (64, 96)
    iterations: int = 120
    seed: int = 0

    @property
    def ranges(self) -> Ranges:
        """The largest batch; raises ValueError as it does."""
        return Ranges(self.sp_degree, self.max_tokens, self.max_batch, self.max_context)

    @property
    def splits(self) -> tuple[int, ...]:
        """`decode_sms` where there is something to split."""
        return self.decode_sms if self.device == "cuda" else ()

    @property
    def config(self) -> ConfluxConfig:
        """An instance of this shape; raises ConfigError if there can be none."""
        return parse(
            {
                "model": {
                    "path": self.model,
                    "dtype": self.dtype,
                    "load_format": self.load_format,
                    "max_model_len": self.ranges.max_length + 1,
                },
                "instance": {
                    "sp_degree": self.sp_degree,
                    "tensor_parallel": self.tensor_parallel,
                    "device": self.device,
                    "block_size": self.block_size,
                    "cpu_threads": self.threads,
                    "max_num_seqs": self.max_batch,
                    "attention_graphs": self.attention_graphs,
                    "peer_memory": self.peer_memory,
                },
            }
        )

    def machine(self) -> str:
        """Where this runs, in words."""
        return describe_machine(self.device, self.sp_degree * self.tensor_parallel)

    def profile_cases(self) -> list[Case]:
        """Everything a profile is fitted to."""
        count = self.iterations * (2 if self.splits else 1)
        whole = iteration_cases(self.ranges, count, self.seed, HELD_OUT, splits=self.splits)
        parts = component_cases(self.ranges, self.density, linear_sizes(self.ranges) if self.device == "cuda" else ())
        if self.device == "cuda":
            # Run-ahead hides the host behind the GPU: what is left of it shows in whole iterations alone.
            parts = [case for case in parts if case.part != "host"]
        return parts + whole

    def evaluation_cases(self, batches: int) -> list[Case]:
        """Other random batches than the profile's."""
        return iteration_cases(self.ranges, batches, self.seed + 1, name="evaluation", splits=self.splits)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, or evaluate.

    Args:
        argv: command line after `conflux profile`.

    Returns:
        Exit status: 0, 1 after an error, 130 after an interrupt.
    """
    options = _parse(argv)
    try:
        if options.log:
            return _served(options)
        return _evaluate(options) if options.evaluate else _profile(options)
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from here", file=sys.stderr)
        return 130
    except (ConfigError, OSError, RuntimeError, ValueError) as error:
        print(f"conflux profile: {error}", file=sys.stderr)
        return 1


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    default = Settings("")
    parser = argparse.ArgumentParser(
        prog="conflux profile",
        description="Measure a model on this machine and fit its latency profile. A run that was interrupted goes on "
        "when it is called again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--evaluate", metavar="PROFILE", help="a profile's file or name: measure random batches, print its errors")
    add("--batches", type=int, default=200, help="of --evaluate")
    add("--refit", metavar="PROFILE", help="fit a profile to what iterations took while serving (--log)")
    add(
        "--log",
        type=Path,
        nargs="+",
        help="iteration logs of instances (instance.iteration_log), for --refit, or for --evaluate without measuring",
    )
    add("--model", help="a model that conflux-ray builds, a folder or a hub id (--evaluate: the profile's)")
    add("--samples", type=Path, help="measure nothing: fit (--evaluate: compare with) what this file holds")
    add("--date", help="of --samples, ISO 8601 (default: today)")
    add("--out", type=Path, help="file to write (default: MODEL.DEVICE.spN.json; --evaluate: printed only)")
    add("--device", choices=("cpu", "cuda"), default=default.device)
    add("--sp-degree", type=int, default=default.sp_degree, help="N, logical ranks")
    add("--tensor-parallel", type=int, default=default.tensor_parallel, help="devices of a logical rank")
    add("--dtype", default=default.dtype)
    add("--load-format", choices=("auto", "safetensors", "dummy"), default=default.load_format)
    add(
        "--attention-graphs",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="attention enqueued once an iteration, for all layers (cuda)",
    )
    add(
        "--peer-memory",
        action=argparse.BooleanOptionalAction,
        default=default.peer_memory,
        help="heads written into the other GPUs' memory, not by NCCL (cuda)",
    )
    add("--block-size", type=int, default=default.block_size, help="tokens (default: as the server chooses)")
    add("--threads", type=int, default=default.threads, help="of each worker, on the CPU")
    add("--max-tokens", type=int, default=default.max_tokens, help="most prefill tokens of an iteration")
    add("--max-batch", type=int, default=default.max_batch, help="most decodes of a rank")
    add("--max-context", type=int, default=default.max_context, help="tokens")
    add("--density", type=int, default=default.density, help="multiplies the points of the grids, in each direction")
    add("--decode-sms", type=int, nargs="*", default=default.decode_sms, help="of overlapped decodes, beside no split")
    add("--iterations", type=int, default=default.iterations, help="whole iterations to measure")
    add("--repeats", type=int, default=5, help="samples of each measurement; their median counts")
    add("--minutes", type=float, default=float("inf"), help="measure no longer, but everything once")
    add("--seed", type=int, default=default.seed)
    add("--machine", help="the device in words (default: found out)")
    options = parser.parse_args(argv)
    if options.refit and options.evaluate:
        parser.error("--refit or --evaluate, not both")
    if (options.refit and not options.log) or (options.log and not (options.refit or options.evaluate)):
        parser.error("--refit needs --log, and --log needs --refit or --evaluate")
    if not (options.evaluate or options.model or options.samples or options.refit):
        parser.error("--model is needed, or --evaluate, --samples or --refit")
    for name in ("batches", "iterations", "repeats", "density", "threads", "block_size", "sp_degree"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    return options


def _profile(options: argparse.Namespace) -> int:
    if options.samples:
        return _refit(options)
    settings = _settings({name: getattr(options, name) for name in Settings.__dataclass_fields__})
    out = options.out or _default_out(settings)
    machine = options.machine or settings.machine()
    versions = software_versions()
    cases = settings.profile_cases()
    samples = SampleFile(_beside(out), {**_conditions(settings), "machine": machine, "versions": versions})
    load_before = load_average()
    _measure(settings, cases, samples, options)
    quality = _quality(samples, load_before)
    return _fit(settings, cases, samples, machine, versions, datetime.now(UTC).date().isoformat(), quality, out)


def _refit(options: argparse.Namespace) -> int:
    """Fit what a file of samples holds, measured by whichever grid."""
    found = read_settings(options.samples)
    settings = _settings({name: value for name, value in found.items() if name in Settings.__dataclass_fields__})
    samples = SampleFile(options.samples, found)
    whole = [case for case in settings.profile_cases() if not case.part and case.name in samples.cases]
    parts = set(samples.cases) - {case.name for case in whole}
    cases = [component_case(name, settings.ranges) for name in samples.cases if name in parts] + whole
    date = options.date or datetime.now(UTC).date().isoformat()
    out = options.out or _default_out(settings)
    quality = {"samples_of_a_case": samples.counts(), "noise_percent": samples.noise()}
    return _fit(settings, cases, samples, found["machine"], found["versions"], date, quality, out)


def _fit(
    settings: Settings,
    cases: Sequence[Case],
    samples: SampleFile,
    machine: str,
    versions: dict[str, str],
    date: str,
    quality: dict[str, Any],
    out: Path,
) -> int:
    num_layers = _model(settings)[1].num_layers
    profile = fit_profile(
        _rows(cases, samples, num_layers),
        model=Path(settings.model).name,
        machine=machine,
        num_layers=num_layers,
        num_ranks=settings.sp_degree,
        base_tp=settings.tensor_parallel,
        versions=versions,
        date=date,
        padded=padded_sizes(cases) if settings.device == "cuda" else (),
    )
    replace(profile, conditions={**_conditions(settings), **quality}).save(out)
    for kind, errors in (("in-sample", profile.in_sample), ("held out", profile.held_out)):
        for component, error in errors.items():
            print(f"{kind:9} {component:9} MAPE {error.mape:5.1f} %  P95 {error.p95:5.1f} %  ({error.count})")
    print(out)
    return 0


def _default_out(settings: Settings) -> Path:
    slug = machine_slug(settings.device)
    return Path(f"{profile_name(settings.model, slug, settings.sp_degree, settings.tensor_parallel)}.json")


def _evaluate(options: argparse.Namespace) -> int:
    profile = find_profile(options.evaluate)
    known: dict[str, Any] = dict(profile.conditions)
    if options.samples:
        known = read_settings(options.samples)
    if "max_tokens" not in known:
        raise ProfileError(f"{options.evaluate}: says nothing of how it was measured; profile again")
    known = {name: value for name, value in known.items() if name in Settings.__dataclass_fields__}
    settings = _settings({**known, "model": options.model or known["model"]})
    cases = settings.evaluation_cases(options.batches)
    load_before = load_average()
    if options.samples:
        samples = SampleFile(options.samples, read_settings(options.samples))
        cases = [case for case in cases if case.name in samples.cases]
    else:
        out = options.out or Path(f"{Path(options.evaluate).name.removesuffix('.json')}.evaluation.json")
        samples = SampleFile(_beside(out), {**_conditions(settings), "machine": options.machine or settings.machine()})
        _measure(settings, cases, samples, options)
    rows = _rows(cases, samples, _model(settings)[1].num_layers)
    errors = evaluate_iterations(
        profile.latency, [row for row in rows if isinstance(row, IterationRow)], [case.batch.kind for case in cases]
    )
    report = {
        "profile": profile.latency.name,
        "date": datetime.now(UTC).date().isoformat(),
        **_quality(samples, load_before),
        **asdict(errors),
    }
    text = json.dumps(report, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0


def _served(options: argparse.Namespace) -> int:
    """Hold a profile against iteration logs, or fit it to them."""
    source = options.refit or options.evaluate
    profile = find_profile(source)
    rows = [row for path in options.log for row in served_rows(path, profile.latency.num_ranks)]
    if not options.refit:
        check_settings(profile.latency, rows)
        kinds = [kind_of(row.load, row.overlap) for row in rows]
        errors = evaluate_iterations(profile.latency, rows, kinds)
        text = json.dumps({"profile": profile.latency.name, **asdict(errors)}, indent=2)
        print(text)
        if options.out:
            options.out.write_text(text + "\n")
        return 0
    date = options.date or datetime.now(UTC).date().isoformat()
    made = refit(profile.latency, rows, f"{profile.latency.name.partition(SERVED)[0]}{SERVED}{date}")
    out = options.out or Path(f"{Path(source).name.removesuffix('.json')}.served.json")
    replace(
        profile,
        latency=made.latency,
        date=date,
        rows={**profile.rows, "served": made.count},
        in_sample={"served": made.in_sample},
        held_out={"served": made.after, "served, before": made.before},
    ).save(out)
    for name, error in (("before", made.before), ("after", made.after)):
        print(f"{name:6}  MAPE {error.mape:5.1f} %  P95 {error.p95:5.1f} %  ({error.count} iterations, not fitted to)")
    print(out)
    return 0


def _settings(fields: dict[str, Any]) -> Settings:
    """From values as a command line or JSON has them; a profile that says nothing of a way was measured without."""
    ways = {"decode_sms": tuple(fields.get("decode_sms", ())), "peer_memory": fields.get("peer_memory", False)}
    return Settings(**{**fields, **ways})


def _measure(settings: Settings, cases: Sequence[Case], samples: SampleFile, options: argparse.Namespace) -> None:
    """Measure what is missing."""
    _model(settings)
    if all((case.name, number) in samples for case in cases for number in range(options.repeats)):
        return
    with workers(settings) as (group, layout):
        # Imported here: it imports torch and vLLM, which takes seconds and wants its environment first.
        from conflux_ray.profiling.measure import WorkerMeasure, run_rounds, warm_up

        measure = WorkerMeasure(group, layout, steady=settings.device == "cuda")
        warm_up(cases, measure)
        run_rounds(cases, measure, samples, options.repeats, settings.seed, 60 * options.minutes)


def _model(settings: Settings) -> tuple[str, ModelGeometry]:
    """The model's folder and shape; raises ValueError if it is too short for the settings."""
    folder = resolve_model(settings.model)
    config = read_model_config(folder)
    positions = config.get("max_position_embeddings")
    needed = settings.ranges.max_length + 1
    if positions is not None and needed > positions:
        raise ValueError(
            f"max_tokens={settings.max_tokens} after max_context={settings.max_context} needs {needed} positions, "
            f"{settings.model} has {positions}; lower them"
        )
    return folder, check_model(settings.config, config)


@contextmanager
def workers(settings: Settings) -> Iterator[tuple[Any, Any]]:
    """Workers that time parts of iterations, with the KV pool of an instance, and the layout of their block tables.

    On a GPU the pool takes all its memory, on the CPU it holds the longest sequence twice.

    Raises:
        ConfigError: the model does not fit the instance.
        ValueError: it is too short for the settings.
    """
    folder, geometry = _model(settings)
    if settings.device == "cpu":
        from conflux_ray.vllm_compat.plugin import use_cpu_platform

        use_cpu_platform()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from conflux_ray.execution.group import LocalWorkerGroup
    from conflux_ray.execution.worker import worker_spec
    from conflux_ray.profiling.plans import TableLayout
    from conflux_ray.profiling.runner import RUNNER

    length = settings.ranges.max_length + 1
    instance = settings.config.instance
    blocks = max(
        2 * KVGeometry(instance.block_tokens, settings.sp_degree, 2).min_blocks(length),
        int(CPU_KV_GIB * GIB // block_bytes(geometry, instance)),
    )
    spec = replace(
        worker_spec(settings.config, folder, geometry, blocks if settings.device == "cpu" else 0),
        runner=RUNNER,
        max_prefill_tokens=settings.max_tokens,
    )
    group = LocalWorkerGroup(spec)
    try:
        yield group, TableLayout(group.num_blocks, instance.block_tokens, settings.sp_degree, geometry.vocab_size)
    except BaseException:
        group.kill()
        raise
    group.close()


def _rows(cases: Sequence[Case], samples: SampleFile, num_layers: int) -> list[Any]:
    from conflux_ray.profiling.measure import to_rows

    return to_rows(cases, samples, num_layers)


def _quality(samples: SampleFile, load_before: float) -> dict[str, Any]:
    """What a reader needs to judge the measurements: the machine's load before includes nothing of this run's own."""
    return {
        "samples_of_a_case": samples.counts(),
        "noise_percent": samples.noise(),
        "load_average_before": load_before,
        "load_average_after": load_average(),
    }


def _conditions(settings: Settings) -> dict[str, Any]:
    """The settings without the machine's paths."""
    return {**asdict(settings), "model": Path(settings.model).name}


def _beside(out: Path) -> Path:
    """Where the samples behind the file `out` are."""
    return out.with_name(f"{out.stem}.samples.jsonl")


if __name__ == "__main__":
    sys.exit(main())
