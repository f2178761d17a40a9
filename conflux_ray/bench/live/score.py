"""What a run shows: attainment with cumulative deadlines, its uncertainty, and the same by prompt length.

A request's fate is that of section 8.1: token i is due at arrival + TTFT + (i - 1) TBT, where the arrival is when the
request was to be sent, not when a late client sent it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from conflux_ray.simulator.metrics import is_compliant, percentiles, summarize
from conflux_ray.simulator.request import Phase, Request, Slo

LENGTHS = (1024, 4096, 16384)
"""Prompt tokens that separate the groups of the breakdown."""
BLOCK = 20
"""Consecutive requests that the bootstrap draws together: a queue makes neighbours share their fate."""
DRAWS = 2000
_Z = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Record:
    """One request of a run as it is kept on disk; seconds after the run's start.

    Args:
        index: its place in the trace.
        arrival: when it was due to be sent.
        prompt_tokens: of its prompt.
        output_tokens: that were asked for.
        times: of its tokens.
        replica: that served it.
        lag: of the client when it sent the request.
        fault: what was wrong with the answer; None if nothing was.
    """

    index: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    times: tuple[float, ...]
    replica: int = 0
    lag: float = 0.0
    fault: str | None = None

    def compliant(self, slo: Slo) -> bool:
        """Whether the right answer came, every token on time."""
        return self.fault is None and is_compliant(self.arrival, self.times, self.output_tokens, slo)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Record:
        return cls(**{**values, "times": tuple(values["times"])})


def wilson(successes: int, count: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share, by Wilson's score; (0, 1) without trials."""
    if count == 0:
        return 0.0, 1.0
    share, square = successes / count, _Z * _Z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count * count)) / (1 + square / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_difference(ours: Sequence[bool], theirs: Sequence[bool], seed: int = 0) -> tuple[float, float, float]:
    """Difference of two attainments on the same requests, with its 95 % interval by a block bootstrap.

    Args:
        ours: whether each request was compliant, in order of arrival.
        theirs: the same requests elsewhere.
        seed: of the bootstrap.

    Returns:
        ours - theirs, and the ends of the interval.

    Raises:
        ValueError: they are not the same requests, or none.
    """
    if len(ours) != len(theirs) or not ours:
        raise ValueError(f"{len(ours)} and {len(theirs)} requests are no pairs; run both on the same trace and rate")
    gains = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float)
    size = min(BLOCK, len(gains))
    rng = np.random.default_rng(seed)
    starts = rng.integers(0, len(gains), (DRAWS, -(-len(gains) // size)))
    # Blocks wrap around, so that every request is drawn equally often.
    places = (starts[:, :, None] + np.arange(size)).reshape(DRAWS, -1)[:, : len(gains)] % len(gains)
    low, high = np.percentile(gains[places].mean(axis=1), [2.5, 97.5])
    return float(gains.mean()), float(low), float(high)


@dataclass(frozen=True, slots=True)
class Lag:
    """How late the client was, seconds: at sending, and at waking up to read."""

    send_p99: float
    send_max: float
    wake_p99: float
    wake_max: float

    @classmethod
    def of(cls, sends: Sequence[float], wakes: Sequence[float]) -> Lag:
        """From single values; 0 without any."""

        def ends(values: Sequence[float]) -> tuple[float, float]:
            return (float(np.percentile(values, 99)), float(max(values))) if len(values) else (0.0, 0.0)

        return cls(*ends(sends), *ends(wakes))

    def verdict(self, limit: float) -> str | None:
        """Why the run is invalid; None if it is not.

        Args:
            limit: of the 99th percentiles, seconds; the single worst moment may have five times it.
        """
        for name, value, allowed in (
            ("99 % of the requests left within", self.send_p99, limit),
            ("the latest request left after", self.send_max, 5 * limit),
            ("99 % of the time the client woke up within", self.wake_p99, limit),
            ("the client once woke up after", self.wake_max, 5 * limit),
        ):
            if value > allowed:
                return (
                    f"the client lagged: {name} {value * 1e3:.1f} ms, more than {allowed * 1e3:.1f} ms; give it idle "
                    f"cores, more --clients or, where such delays do not matter, a larger --max-lag"
                )
        return None


def score(records: Sequence[Record], slo: Slo, warm_up: int) -> dict[str, Any]:
    """Everything that a run shows about its server.

    Args:
        records: in order of arrival.
        slo: the promises.
        warm_up: how many of the first requests are not counted.

    Returns:
        The simulator's summary (`simulator.metrics.Summary`) with confidence interval, faults and breakdown.
    """
    requests = [
        Request(
            r.index,
            r.arrival,
            r.prompt_tokens,
            r.output_tokens,
            slo,
            phase=Phase.FINISHED if r.fault is None else Phase.WAITING,
            times=list(r.times),
        )
        for r in records
    ]
    summary = summarize(requests, warm_up, 0)
    counted = records[warm_up:]
    faults = Counter(_kind(r.fault) for r in counted if r.fault is not None)
    result = summary.to_json()
    for name in ("preemptions", "rejected", "iterations"):  # what a client cannot see
        del result[name]
    span = max((r.times[-1] for r in records if r.times), default=0.0)
    return {
        **result,
        "interval": wilson(summary.compliant, summary.counted),
        "output_tokens_per_s": sum(len(r.times) for r in records) / span if span else 0.0,
        "faults": dict(faults.most_common()),
        "lengths": by_length(counted, slo),
    }


def _kind(fault: str) -> str:
    """The fault without what differs from request to request."""
    return re.sub(r"\d+", "N", fault[:120])


def by_length(records: Sequence[Record], slo: Slo) -> list[dict[str, Any]]:
    """Attainment and TTFT in groups of prompt length; a group without requests is left out."""
    edges = (0, *LENGTHS, math.inf)
    groups = []
    for low, high in pairwise(edges):
        mine = [r for r in records if low < r.prompt_tokens <= high]
        if not mine:
            continue
        good = sum(r.compliant(slo) for r in mine)
        groups.append(
            {
                "above": low,
                "up_to": None if high == math.inf else high,
                "counted": len(mine),
                "compliant": good,
                "attainment": good / len(mine),
                "interval": wilson(good, len(mine)),
                "late_first_token": sum(
                    r.fault is not None or not r.times or r.times[0] > slo.deadline(r.arrival, 1) for r in mine
                ),
                "ttft": percentiles([r.times[0] - r.arrival for r in mine if r.times]),
            }
        )
    return groups
