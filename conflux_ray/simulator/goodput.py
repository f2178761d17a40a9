"""Goodput: the largest rate at which 95 % of the requests are compliant (section 8.1), found by bisection.

Each seed is one workload per rate and one search; the seeds' results give a mean and a confidence interval. A search
assumes that attainment falls as the rate rises; near the knee it does so up to the noise of one workload, which is what
the interval over seeds shows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from conflux_ray.simulator.parallel import run_all
from conflux_ray.simulator.run import Setup, simulate
from conflux_ray.simulator.workload import Workload

ATTAINMENT = 0.95
WARM_UP = 0.1
LOWEST_RATE = 0.02
"""Requests per second below which a system counts as unable to serve the workload."""
STEP = 1.3
"""Factor between the rates that look for a bracket."""
COARSE = 0.1
"""Tolerance of the rates by which configurations are compared."""
FINALISTS = 2
"""Configurations of a system that get all seeds."""

_T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)


def largest_passing(
    passes: Callable[[float], bool],
    guess: float,
    tolerance: float = 0.02,
    step: float = STEP,
    lowest: float = LOWEST_RATE,
) -> float:
    """The largest rate that passes, by steps up or down from `guess` and then bisection.

    Args:
        passes: true below some rate and false above it.
        guess: where to start.
        tolerance: the answer is at most this share below the largest passing rate.
        step: factor between the rates that look for a bracket.
        lowest: rates below it are not tried.

    Returns:
        A rate that passed; 0 if none at or above `lowest` did.
    """
    if not guess > 0:
        raise ValueError(f"guess={guess} must be a positive rate")
    low, high = 0.0, math.inf
    rate = guess
    while not low or high == math.inf:
        if passes(rate):
            low, rate = rate, rate * step
        else:
            high, rate = rate, rate / step
            if not low and rate < lowest:
                return 0.0
        if low and high < math.inf:
            break
    while high / low > 1 + tolerance:
        middle = math.sqrt(low * high)
        if passes(middle):
            low = middle
        else:
            high = middle
    return low


def interval(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of the mean, by Student's t; infinity for a single value."""
    if len(values) < 2:
        return math.inf
    degrees = len(values) - 1
    t = _T_975[degrees - 1] if degrees <= len(_T_975) else 1.96 + 2.4 / degrees
    return t * statistics.stdev(values) / math.sqrt(len(values))


@dataclass(frozen=True, slots=True)
class Search:
    """How goodput is searched.

    Args:
        seconds: of arrivals that a simulation has at least.
        seeds: how many; seed k is the number k.
        attainment: share of compliant requests, 0..1.
        tolerance: of the rate.
        guess: requests per second to start from.
        step: factor between the rates that look for a bracket.
        requests: that a simulation has at least.
    """

    seconds: float = 180.0
    seeds: int = 3
    attainment: float = ATTAINMENT
    tolerance: float = 0.02
    guess: float = 3.0
    step: float = STEP
    requests: int = 1000


@dataclass(frozen=True, slots=True)
class Goodput:
    """The result for one system.

    Args:
        system: a key of `SYSTEMS`.
        options: the best configuration found.
        per_seed: requests per second.
        mean: of them.
        half_width: of the 95 % confidence interval; infinity for one seed.
        tried: (options, rate on the first seed, coarsely) of every swept configuration, best first.
    """

    system: str
    options: dict[str, Any]
    per_seed: tuple[float, ...]
    mean: float
    half_width: float
    tried: tuple[tuple[dict[str, Any], float], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As a JSON object; an infinite interval is null."""
        return {**asdict(self), "half_width": self.half_width if math.isfinite(self.half_width) else None}


def passes(setup: Setup, workload: Workload, search: Search, rate: float, seed: int) -> bool:
    """Whether one simulation attains what is asked."""
    trace = workload.draw(rate, search.seconds, seed, search.requests)
    outcome = simulate(setup, trace, warm_up=WARM_UP, floor=search.attainment)
    return not outcome.certain_miss and outcome.summary.attainment >= search.attainment


def _search_seed(task: tuple[Setup, Workload, Search, int]) -> float:
    setup, workload, search, seed = task
    return largest_passing(
        lambda rate: passes(setup, workload, search, rate, seed), search.guess, search.tolerance, search.step
    )


def goodputs(
    cases: Sequence[tuple[Setup, list[dict[str, Any]], Workload]], search: Search, jobs: int, label: str = "goodput"
) -> list[Goodput]:
    """Goodput of every case, each in its best configuration.

    Configurations are compared on the first seed, to `COARSE`; the best of a case, two if they are close, then get all
    seeds and the full tolerance, and the better mean is the case's.

    Args:
        cases: a setup, the options to sweep beside its own, and the workload.
        search: how.
        jobs: processes.
        label: of the progress bar.
    """
    coarse = replace(search, tolerance=max(COARSE, search.tolerance))
    first = [
        (replace(setup, options={**setup.options, **changes}), workload, coarse, 0)
        for setup, options, workload in cases
        for changes in options
        if len(options) > 1
    ]
    reached = iter(run_all(_search_seed, first, jobs, f"{label}: configurations"))
    finalists: list[list[tuple[dict[str, Any], float]]] = []
    for _, options, _ in cases:
        rates = [next(reached) if len(options) > 1 else search.guess for _ in options]
        finalists.append(sorted(zip(options, rates, strict=True), key=lambda entry: -entry[1]))
    contenders = [_contenders(ranked) for ranked in finalists]
    last = []
    for (setup, _, workload), ranked in zip(cases, contenders, strict=True):
        for changes, rate in ranked:
            step = STEP if rate == search.guess else 1 + 1.5 * COARSE
            fine = replace(search, guess=rate or search.guess, step=step)
            chosen = replace(setup, options={**setup.options, **changes})
            last += [(chosen, workload, fine, seed) for seed in range(search.seeds)]
    finals = iter(_by_seed(run_all(_search_seed, last, jobs, label), search.seeds))
    results = []
    for (setup, _, _), ranked, best in zip(cases, finalists, contenders, strict=True):
        full = [(changes, next(finals)) for changes, _ in best]
        chosen_options, per_seed = max(full, key=lambda entry: statistics.mean(entry[1]))
        mean = statistics.mean(per_seed)
        results.append(
            Goodput(
                setup.system,
                {**setup.options, **chosen_options},
                per_seed,
                mean,
                interval(per_seed),
                tuple(ranked) if len(ranked) > 1 else ((chosen_options, mean),),
            )
        )
    return results


def _contenders(ranked: list[tuple[dict[str, Any], float]]) -> list[tuple[dict[str, Any], float]]:
    """The best configurations that the coarse comparison cannot tell apart, `FINALISTS` at most."""
    return [entry for entry in ranked[:FINALISTS] if entry[1] >= ranked[0][1] * (1 - 1.5 * COARSE)]


def _by_seed(values: Sequence[float], seeds: int) -> list[tuple[float, ...]]:
    return [tuple(values[k : k + seeds]) for k in range(0, len(values), seeds)]
