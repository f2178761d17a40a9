"""SLO attainment as in section 8.1, and latency percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from conflux_ray.simulator.request import Phase, Request, Slo

ROUNDING = 1e-9
"""Seconds: a token at its deadline is on time, whatever the order of the additions."""


def is_compliant(arrival: float, times: Sequence[float], output_tokens: int, slo: Slo) -> bool:
    """Whether every output token met its own deadline: arrival + TTFT + (i - 1) * TBT for the i-th.

    Args:
        arrival: seconds.
        times: of the output tokens, seconds.
        output_tokens: how many were asked for; fewer are a miss.
        slo: the promises.
    """
    if len(times) < output_tokens:
        return False
    due = arrival + slo.ttft + slo.tbt * np.arange(len(times))
    return bool(np.all(np.asarray(times) <= due + ROUNDING))


def certainly_missed(request: Request, now: float) -> bool:
    """Whether the request has broken a promise already, as far as its recorded tokens show."""
    if request.phase is Phase.REJECTED:
        return True
    if not request.times:
        return now > request.slo.deadline(request.arrival, 1) + ROUNDING
    return not is_compliant(request.arrival, request.times, len(request.times), request.slo)


def percentiles(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """P50, P90, P95, P99 and mean; empty without values."""
    if not len(values):
        return {}
    array = np.asarray(values)
    return {
        **{f"p{q}": float(np.percentile(array, q)) for q in (50, 90, 95, 99)},
        "mean": float(array.mean()),
    }


@dataclass(frozen=True, slots=True)
class Summary:
    """What a simulation shows; requests of the warm-up are in none of it except `requests`.

    Args:
        requests: all.
        counted: after the warm-up.
        finished: of the counted.
        compliant: of the counted.
        attainment: compliant / counted, 0..1.
        goodput: compliant requests per second of arrivals.
        rate: arrivals per second.
        ttft: seconds, of the finished.
        tbt: gaps between output tokens, seconds, of the finished.
        preemptions: of the counted.
        rejected: of the counted: larger than the KV memory.
        iterations: of all instances.
    """

    requests: int
    counted: int
    finished: int
    compliant: int
    attainment: float
    goodput: float
    rate: float
    ttft: dict[str, float]
    tbt: dict[str, float]
    preemptions: int
    rejected: int
    iterations: int

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def summarize(requests: Sequence[Request], warm_up: int, iterations: int) -> Summary:
    """Count the requests after the first `warm_up`; unfinished ones are misses.

    Args:
        requests: in order of arrival.
        warm_up: how many to leave out.
        iterations: of all instances.

    Raises:
        ValueError: none is left to count.
    """
    counted = requests[warm_up:]
    if not counted:
        raise ValueError(f"warm_up={warm_up} leaves none of {len(requests)} requests to count")
    finished = [r for r in counted if r.phase is Phase.FINISHED]
    compliant = sum(is_compliant(r.arrival, r.times, r.output_tokens, r.slo) for r in finished)
    span = counted[-1].arrival - counted[0].arrival
    rate = (len(counted) - 1) / span if span > 0 else 0.0
    gaps = [np.diff(r.times) for r in finished if len(r.times) > 1]
    attainment = compliant / len(counted)
    return Summary(
        requests=len(requests),
        counted=len(counted),
        finished=len(finished),
        compliant=compliant,
        attainment=attainment,
        goodput=attainment * rate,
        rate=rate,
        ttft=percentiles([r.times[0] - r.arrival for r in finished]),
        tbt=percentiles(np.concatenate(gaps) if gaps else []),
        preemptions=sum(r.preemptions for r in counted),
        rejected=sum(r.phase is Phase.REJECTED for r in counted),
        iterations=iterations,
    )
