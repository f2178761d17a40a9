"""Which contender, budget and rate to measure: all of them in simulated time first, by the requests they would get."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from conflux_ray.bench.live.contenders import Contender
from conflux_ray.bench.live.point import Load
from conflux_ray.bench.live.predict import predict
from conflux_ray.bench.live.tables import markdown
from conflux_ray.simulator.hardware import Hardware
from conflux_ray.simulator.parallel import run_all


@dataclass(frozen=True, slots=True)
class Forecast:
    """What the simulator says of a contender.

    Args:
        name: of the contender.
        attained: by rate, share of the counted requests of each seed that kept every promise, and how many these are.
        error: why it cannot serve the load; empty if it can.
    """

    name: str
    attained: Mapping[float, Sequence[tuple[float, int]]]
    error: str = ""

    def pooled(self, rate: float) -> float:
        """Over the seeds."""
        counted = sum(count for _, count in self.attained[rate])
        return sum(share * count for share, count in self.attained[rate]) / counted

    def crossing(self, goal: float) -> float | None:
        """Requests per second at which attainment falls through `goal`, between two rates; None if it does not."""
        for low, high in pairwise(sorted(self.attained)):
            above, below = self.pooled(low), self.pooled(high)
            if above >= goal > below:
                return low + (high - low) * (above - goal) / (above - below)
        return None

    def to_json(self) -> dict[str, Any]:
        rates = [
            {"rate": rate, "attainment": self.pooled(rate), "seeds": [share for share, _ in self.attained[rate]]}
            for rate in sorted(self.attained)
        ]
        return {"contender": self.name, "rates": rates, "error": self.error}


def overrun_of(name: str, words: Sequence[str]) -> float:
    """The factor of a contender: of the last of `FACTOR` and `PATTERN=FACTOR` that is for it; 1 without one.

    Raises:
        ValueError: a word is neither.
    """
    factor = 1.0
    for word in words:
        pattern, equals, value = word.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            raise ValueError(f"--overrun {word!r} must be like 1.1 or vllm-*=1.1") from None
        if not number > 0:
            raise ValueError(f"--overrun {word!r} must be positive")
        if not equals or fnmatch.fnmatchcase(name, pattern):
            factor = number
    return factor


def forecast(
    contenders: Sequence[Contender],
    hardware: Hardware,
    gpus: int,
    load: Load,
    rates: Sequence[float],
    seeds: Sequence[int],
    overruns: Sequence[str] = (),
    jobs: int = 1,
) -> list[Forecast]:
    """Simulate every contender at every rate and seed; those that the simulator has no system for are left out.

    Args:
        contenders: with rates of their own or not.
        hardware: of the machine.
        gpus: of the machine.
        load: how points are drawn.
        rates: requests per second, ascending.
        seeds: of the draws.
        overruns: see `overrun_of`.
        jobs: processes.
    """
    tasks = [
        (c, rate, seed, overrun_of(c.name, overruns)) for c in contenders for rate in c.rates or rates for seed in seeds
    ]
    said = run_all(partial(_predict, hardware, gpus, load), tasks, jobs, "simulating")
    found = []
    for contender in contenders:
        mine = [(task[1], outcome) for task, outcome in zip(tasks, said, strict=True) if task[0] is contender]
        known = [(rate, outcome) for rate, outcome in mine if outcome]
        if not known:
            continue
        error = next((outcome["error"] for _, outcome in known if "error" in outcome), "")
        attained: dict[float, list[tuple[float, int]]] = {}
        for rate, outcome in known:
            if not error:
                attained.setdefault(rate, []).append((outcome["attainment"], outcome["counted"]))
        found.append(Forecast(contender.name, attained, error))
    return found


def _predict(hardware: Hardware, gpus: int, load: Load, task: tuple[Contender, float, int, float]) -> dict[str, Any]:
    contender, rate, seed, overrun = task
    return predict(contender, hardware, gpus, load, rate, seed, overrun=overrun)


def _where(one: Forecast, goal: float) -> str:
    """The crossing in words, beyond the rates too."""
    crossing = one.crossing(goal)
    if crossing is not None:
        return f"{crossing:.2f}"
    lowest, highest = min(one.attained), max(one.attained)
    return f"> {highest:g}" if one.pooled(highest) >= goal else f"< {lowest:g}"


def forecast_table(found: Sequence[Forecast], goal: float) -> str:
    """Attainment by rate, with the range of the seeds, and where it falls through the goal."""
    rates = sorted({rate for one in found for rate in one.attained})
    rows = []
    for one in found:
        cells = []
        for rate in rates:
            shares = [100 * share for share, _ in one.attained.get(rate, ())]
            many = f" [{min(shares):.1f}, {max(shares):.1f}]" if len(shares) > 1 else ""
            cells.append(f"{100 * one.pooled(rate):.1f}{many}" if shares else "-")
        rows.append([one.name, *cells, one.error or _where(one, goal)])
    header = ("Attained, % [seeds], at", *(f"{rate:g}" for rate in rates), f"{goal:.0%} at, requests/s")
    return markdown(header, rows, left=1)
