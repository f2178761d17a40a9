"""Workloads: Mooncake traces, synthetic ones with given quantiles, and what is done to both (section 8.1).

Random generators are passed in. Nothing is random that was not asked for by name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

SECONDS_RATE = 0.05
"""Requests per second below which timestamps are taken for milliseconds: a thousand times that is a usual rate."""
NORMAL_P95 = 1.6448536269514722
"""95th percentile of the standard normal distribution."""


class TraceError(ValueError):
    """A trace that cannot be used: the message names the file, the line and the remedy."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a workload.

    Args:
        arrival: seconds.
        prompt_tokens: at least 1.
        output_tokens: at least 1.
        hash_ids: identities of the prompt's 512-token blocks; empty if unknown.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """A workload in order of arrival.

    Args:
        name: for reports.
        requests: in order of arrival.
        unit: of the timestamps in the file: "s", "ms", or "" if there was no file.
        bad_rows: rows that were skipped.
        notes: what was done to it, in order.
    """

    name: str
    requests: tuple[TraceRequest, ...]
    unit: str = ""
    bad_rows: int = 0
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def rate(self) -> float:
        """Mean arrivals per second; 0 if they all come at once."""
        if len(self.requests) < 2:
            return 0.0
        span = self.requests[-1].arrival - self.requests[0].arrival
        return (len(self.requests) - 1) / span if span else 0.0

    def noted(self, requests: Sequence[TraceRequest], note: str) -> Trace:
        """With other requests, and one note more."""
        return replace(self, requests=tuple(requests), notes=(*self.notes, note))


def read_mooncake(path: Path, unit: str = "auto", skip_bad: bool = False) -> Trace:
    """Read a Mooncake JSONL: `timestamp`, `input_length`, `output_length` and perhaps `hash_ids` in each row.

    Args:
        path: of the file.
        unit: of the timestamps: "s", "ms", or "auto": milliseconds if as seconds they would be less than
            `SECONDS_RATE` requests per second.
        skip_bad: leave rows out that cannot be used, instead of refusing the file.

    Raises:
        TraceError: the file cannot be read, holds no usable row, or has bad rows and `skip_bad` is not set.
    """
    if unit not in ("auto", "s", "ms"):
        raise TraceError(f"unit={unit!r} must be auto, s or ms")
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot read the trace ({error})") from error
    rows: list[TraceRequest] = []
    bad: list[tuple[int, str]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(_row(json.loads(line)))
        except (ValueError, TypeError) as error:
            bad.append((number, str(error)))
    if bad and not skip_bad:
        raise TraceError(
            f"{path}: {len(bad)} of {len(rows) + len(bad)} rows are bad, the first in line {bad[0][0]}: {bad[0][1]}; "
            f"repair them or skip bad rows"
        )
    if not rows:
        first = f"; the first bad row is line {bad[0][0]}: {bad[0][1]}" if bad else ""
        raise TraceError(f"{path}: no usable row{first}")
    rows.sort(key=lambda r: r.arrival)
    notes = [f"skipped {len(bad)} bad rows, the first in line {bad[0][0]}"] if bad else []
    if unit == "auto":
        span = rows[-1].arrival - rows[0].arrival
        unit = "ms" if span > 0 and len(rows) / span < SECONDS_RATE else "s"
        notes.insert(0, f"timestamps taken for {'milliseconds' if unit == 'ms' else 'seconds'}")
    scale = 1e-3 if unit == "ms" else 1.0
    start = rows[0].arrival
    shifted = [replace(r, arrival=(r.arrival - start) * scale) for r in rows]
    return Trace(path.stem, tuple(shifted), unit, len(bad), tuple(notes))


def _row(row: Any) -> TraceRequest:
    if not isinstance(row, dict):
        raise TypeError(f"a row is a JSON object, this is {type(row).__name__}")
    for name in ("timestamp", "input_length", "output_length"):
        if name not in row:
            raise ValueError(f"field {name!r} is missing")
        value = row[name]
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name}={value!r} is no number")
    for name in ("input_length", "output_length"):
        if row[name] < 1 or row[name] != int(row[name]):
            raise ValueError(f"{name}={row[name]!r} must be a whole number of at least 1 token")
    if row["timestamp"] < 0:
        raise ValueError(f"timestamp={row['timestamp']!r} must not be negative")
    ids = row.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise ValueError("hash_ids must be a list of integers")
    return TraceRequest(float(row["timestamp"]), int(row["input_length"]), int(row["output_length"]), tuple(ids))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Median and 95th percentile of a length, tokens."""

    p50: float
    p95: float

    def __post_init__(self) -> None:
        if not 0 < self.p50 <= self.p95:
            raise ValueError(f"quantiles need 0 < p50={self.p50} <= p95={self.p95}")

    def sample(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """`count` lengths of the log-normal distribution with these quantiles, at least 1."""
        sigma = math.log(self.p95 / self.p50) / NORMAL_P95
        return np.maximum(1, np.rint(rng.lognormal(math.log(self.p50), sigma, count))).astype(int)


TABLE_3 = {
    "toolagent": (Quantiles(6346, 26114), Quantiles(30, 600)),
    "synthetic": (Quantiles(11587, 49009), Quantiles(69, 519)),
    "qwen-a": (Quantiles(1046, 8809), Quantiles(375, 1032)),
}
"""Prompt and output quantiles of the paper's workloads."""


def synthesize(
    name: str, prompt: Quantiles, output: Quantiles, count: int, rate: float, rng: np.random.Generator
) -> Trace:
    """Independent log-normal lengths with the given quantiles, Poisson arrivals.

    More requests from a generator of the same seed begin with those of fewer.

    Args:
        name: of the workload.
        prompt: tokens.
        output: tokens.
        count: requests.
        rate: per second.
        rng: for all of it.
    """
    for_arrivals, for_prompts, for_outputs = rng.spawn(3)
    arrivals = np.cumsum(for_arrivals.exponential(1 / rate, count))
    prompts, outputs = prompt.sample(for_prompts, count), output.sample(for_outputs, count)
    requests = tuple(TraceRequest(float(a), int(p), int(o)) for a, p, o in zip(arrivals, prompts, outputs, strict=True))
    return Trace(name, requests, notes=("synthetic: independent log-normal lengths, Poisson arrivals",))


def subsample(trace: Trace, count: int, rng: np.random.Generator) -> Trace:
    """`count` random requests, in their order; with the same seed a larger subset contains a smaller one.

    Raises:
        TraceError: the trace has not that many.
    """
    if not 1 <= count <= len(trace):
        raise TraceError(f"{trace.name}: cannot take {count} of {len(trace)} requests")
    chosen = np.sort(rng.permutation(len(trace))[:count])
    return trace.noted([trace.requests[i] for i in chosen], f"{count} of {len(trace)} requests at random")


def rescale(trace: Trace, rate: float) -> Trace:
    """Inter-arrival times scaled uniformly to `rate` requests per second, the first arrival at 0.

    Raises:
        TraceError: all requests arrive at once.
    """
    if not rate > 0:
        raise TraceError(f"rate={rate} must be positive, requests per second")
    if not trace.rate:
        raise TraceError(f"{trace.name}: its arrivals have no rate to rescale")
    factor, start = trace.rate / rate, trace.requests[0].arrival
    scaled = [replace(r, arrival=(r.arrival - start) * factor) for r in trace.requests]
    return trace.noted(scaled, f"arrivals scaled to {rate:g} requests/s")


def debucket(trace: Trace, rng: np.random.Generator) -> Trace:
    """Requests with one timestamp spread uniformly up to the next timestamp.

    Returns:
        The trace with other arrivals; the same one if no two requests share a timestamp. The last bucket gets the
        median width of the others.
    """
    times = sorted({r.arrival for r in trace.requests})
    if len(times) in (1, len(trace)):
        return trace
    widths = [b - a for a, b in pairwise(times)]
    width = dict(zip(times, [*widths, float(np.median(widths))], strict=True))
    places = rng.random(len(trace))
    spread = [
        TraceRequest(r.arrival + place * width[r.arrival], r.prompt_tokens, r.output_tokens, r.hash_ids)
        for r, place in zip(trace.requests, places.tolist(), strict=True)
    ]
    spread.sort(key=lambda r: r.arrival)
    return trace.noted(spread, f"arrivals of {len(times)} buckets spread uniformly inside their bucket")


def cap_lengths(trace: Trace, max_model_len: int) -> Trace:
    """Prompts cut to `max_model_len - 1` tokens, then outputs so that prompt and output fit (section 8.1)."""
    if max_model_len < 2:
        raise TraceError(f"max_model_len={max_model_len} must be at least 2")
    capped, cut = [], 0
    for r in trace.requests:
        prompt = min(r.prompt_tokens, max_model_len - 1)
        output = min(r.output_tokens, max_model_len - prompt)
        if (prompt, output) != (r.prompt_tokens, r.output_tokens):
            cut += 1
            r = replace(r, prompt_tokens=prompt, output_tokens=output)
        capped.append(r)
    return trace.noted(capped, f"{cut} requests cut to {max_model_len} tokens") if cut else trace


def shrink(trace: Trace, prompt: float, output: float) -> Trace:
    """Lengths times `prompt` and `output`, at least 1 token: the same mix for a small model on a small machine.

    Prompts lose their `hash_ids`, whose blocks have a fixed length.

    Raises:
        TraceError: a factor is not in (0, 1].
    """
    if not (0 < prompt <= 1 and 0 < output <= 1):
        raise TraceError(f"prompt={prompt} and output={output} must be factors in (0, 1]")
    shrunk = [
        TraceRequest(r.arrival, max(1, round(r.prompt_tokens * prompt)), max(1, round(r.output_tokens * output)))
        for r in trace.requests
    ]
    return trace.noted(shrunk, f"prompts times {prompt:g}, outputs times {output:g}")
