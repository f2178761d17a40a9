"""Attainment as section 8.1 defines it: cumulative deadlines, every token."""

from __future__ import annotations

import pytest

from conflux_ray.simulator.metrics import is_compliant, summarize
from conflux_ray.simulator.request import Phase, Request, Slo

SLO = Slo(ttft=2.0, tbt=0.1)


@pytest.mark.parametrize(
    ("times", "compliant"),
    [
        ([12.0, 12.1, 12.2], True),  # each at its very deadline
        ([12.01, 12.1, 12.2], False),  # the first is late
        ([10.5, 12.1, 12.2], True),  # a gap of 1.6 s, but the second token is due at 12.1: slack carries over
        ([10.5, 12.15, 12.2], False),  # the second is late although the third is not
        ([10.5, 10.6], False),  # one is missing
    ],
)
def test_every_token_has_its_own_deadline(times: list[float], compliant: bool):
    assert is_compliant(10.0, times, 3, SLO) is compliant


def finished(index: int, arrival: float, *times: float) -> Request:
    request = Request(index, arrival, 10, len(times), SLO)
    request.to(Phase.PREFILLING)
    request.emit(times)
    request.to(Phase.FINISHED)
    return request


def test_summary_leaves_out_the_warm_up_and_counts_unfinished_as_misses():
    late = finished(0, 0.0, 9.0)
    good = finished(1, 1.0, 1.5, 1.55)
    unfinished = Request(2, 3.0, 10, 2, SLO)
    summary = summarize([late, good, unfinished], warm_up=1, iterations=7)
    assert (summary.counted, summary.finished, summary.compliant, summary.attainment) == (2, 1, 1, 0.5)
    assert summary.rate == pytest.approx(0.5)  # two counted requests, 2 s apart
    assert summary.goodput == pytest.approx(0.25)
    assert summary.ttft["p50"] == pytest.approx(0.5)
    assert summary.tbt["p95"] == pytest.approx(0.05)


def test_summary_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="warm_up=1 leaves none"):
        summarize([finished(0, 0.0, 1.0)], warm_up=1, iterations=1)


@pytest.mark.parametrize(("ttft", "tbt"), [(0.0, 0.1), (2.0, -1.0)])
def test_promises_are_positive(ttft: float, tbt: float):
    with pytest.raises(ValueError, match="must be positive"):
        Slo(ttft, tbt)
