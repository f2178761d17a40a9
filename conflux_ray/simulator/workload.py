"""Where a simulation's requests come from: drawn anew for every rate and seed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from conflux_ray.simulator.trace import (
    TABLE_3,
    Quantiles,
    Trace,
    TraceError,
    cap_lengths,
    debucket,
    read_mooncake,
    rescale,
    shrink,
    subsample,
    synthesize,
)


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace to subsample, or quantiles to draw from.

    Args:
        name: for reports.
        max_model_len: lengths are capped to it, tokens.
        trace: requests are a random subset of it, its arrivals scaled to the rate.
        quantiles: of prompts and outputs, if there is no trace.
        source: file, unit and whether bad rows are skipped, if the trace is that file's. Another process reads the file
            once instead of getting the trace with every task.

    Raises:
        ValueError: there is neither trace nor quantiles, or both.
    """

    name: str
    max_model_len: int
    trace: Trace | None = None
    quantiles: tuple[Quantiles, Quantiles] | None = None
    source: tuple[Path, str, bool] | None = None
    _spread: dict[int, Trace] = field(default_factory=dict, repr=False, compare=False)  # by seed

    def __post_init__(self) -> None:
        if (self.trace is None) == (self.quantiles is None):
            raise ValueError(f"workload {self.name!r} needs either a trace or quantiles")

    @classmethod
    def from_file(cls, path: Path, max_model_len: int, unit: str = "auto", skip_bad: bool = False) -> Workload:
        """A Mooncake JSONL, its name that of the file.

        Raises:
            TraceError: it cannot be used.
        """
        trace = read_mooncake(path, unit, skip_bad)
        name = trace.name.replace("_trace", "").replace("_", " ")
        return cls(name, max_model_len, trace, source=(path.resolve(), unit, skip_bad))

    def __reduce__(self) -> tuple[Any, ...]:
        if self.source is None:
            return Workload, (self.name, self.max_model_len, self.trace, self.quantiles)
        path, *how = self.source
        return _from_file, (path, self.max_model_len, *how)

    @classmethod
    def from_table(cls, name: str, max_model_len: int) -> Workload:
        """Log-normal lengths with a workload's quantiles of Table 3, Poisson arrivals.

        Raises:
            ValueError: the table has no such workload.
        """
        if name not in TABLE_3:
            raise ValueError(f"workload={name!r} is not in Table 3; choose one of {', '.join(TABLE_3)}")
        return cls(f"{name} (from Table 3's quantiles)", max_model_len, quantiles=TABLE_3[name])

    def shrunk(self, prompt: float, output: float) -> Workload:
        """The same arrivals with shorter prompts and outputs.

        Raises:
            TraceError: there is no trace, or a factor is not in (0, 1].
        """
        if self.trace is None:
            raise TraceError(f"workload {self.name!r} has no trace to shorten; give one")
        return Workload(f"{self.name}, shortened", self.max_model_len, shrink(self.trace, prompt, output))

    def draw(self, rate: float, seconds: float, seed: int, least: int = 0) -> Trace:
        """At least `seconds` of arrivals at `rate` requests per second, and `least` requests.

        One seed gives the same requests at every rate, with their gaps scaled; a longer draw contains a shorter one. So
        rates and systems are compared on the same requests.

        Raises:
            TraceError: the trace has fewer requests than that.
        """
        count = max(2, round(rate * seconds), least)
        for_buckets, for_requests = np.random.default_rng(seed).spawn(2)
        if self.trace is not None:
            if seed not in self._spread:
                self._spread[seed] = debucket(self.trace, for_buckets)
            drawn = rescale(subsample(self._spread[seed], count, for_requests), rate)
        else:
            assert self.quantiles is not None
            drawn = synthesize(self.name, *self.quantiles, count, rate, for_requests)
        return cap_lengths(drawn, self.max_model_len)


@cache
def _from_file(path: Path, max_model_len: int, unit: str, skip_bad: bool) -> Workload:
    return Workload.from_file(path, max_model_len, unit, skip_bad)
