"""Options that the simulator's commands share."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from conflux_ray.simulator.hardware import DEVICES, MODELS, Hardware, MeasuredHardware, StatedHardware
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.trace import TABLE_3
from conflux_ray.simulator.workload import Workload

SLOS = {"llama-8b": Slo(1.0, 0.05), "qwen-14b": Slo(2.0, 0.1), "qwen-32b": Slo(2.0, 0.1)}
"""Of section 8.1."""


def add_machine(parser: argparse.ArgumentParser) -> None:
    """--model, --device, --gpus, --profile."""
    parser.add_argument("--model", choices=sorted(MODELS), default="qwen-14b")
    parser.add_argument("--device", choices=sorted(DEVICES), default="h200", help="stated figures of this GPU")
    parser.add_argument("--gpus", type=int, default=4, help="of one instance")
    parser.add_argument(
        "--profile",
        type=Path,
        nargs="*",
        default=[],
        help="measured profiles; each replaces the stated one of its kind",
    )


def add_workload(parser: argparse.ArgumentParser) -> None:
    """--trace or --workload, and the promises."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", type=Path, help="Mooncake JSONL, subsampled and rescaled to the rate")
    source.add_argument("--workload", choices=sorted(TABLE_3), help="synthetic, with the quantiles of Table 3")
    parser.add_argument("--unit", choices=["auto", "s", "ms"], default="auto", help="of the trace's timestamps")
    parser.add_argument("--skip-bad-rows", action="store_true", help="leave rows out that cannot be used")
    parser.add_argument("--ttft", type=float, help="seconds; default: the paper's for the model")
    parser.add_argument("--tbt", type=float, help="seconds; default: the paper's for the model")
    parser.add_argument("--seconds", type=float, default=180.0, help="of arrivals in one simulation")
    parser.add_argument("--prefix-cache", type=float, default=0.0, help="share of KV memory for remembered prompts")


def add_output(parser: argparse.ArgumentParser) -> None:
    """--jobs and --json."""
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--json", type=Path, help="write the result there")


def hardware_of(args: argparse.Namespace) -> Hardware:
    """What the options say."""
    stated = StatedHardware(MODELS[args.model], DEVICES[args.device])
    return MeasuredHardware.load(stated, args.profile) if args.profile else stated


def slo_of(args: argparse.Namespace) -> Slo:
    """The promises; what is not given is the paper's for the model."""
    default = SLOS[args.model]
    return Slo(args.ttft or default.ttft, args.tbt or default.tbt)


def workload_of(args: argparse.Namespace) -> Workload:
    """The workload; without --trace and --workload, toolagent's quantiles."""
    longest = MODELS[args.model].max_model_len
    if args.trace:
        return Workload.from_file(args.trace, longest, args.unit, args.skip_bad_rows)
    return Workload.from_table(args.workload or "toolagent", longest)


def options_of(words: list[str]) -> dict[str, Any]:
    """`name=value` words; numbers become numbers.

    Raises:
        ValueError: a word has no `=`.
    """
    options: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"option {word!r} must be NAME=VALUE")
        options[name] = _number(value)
    return options


def _number(word: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(word)
    return word


def write_json(path: Path | None, document: Any) -> None:
    """Write `document` if there is a path."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2) + "\n")
