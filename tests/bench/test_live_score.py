"""Attainment, intervals and lag by numbers that can be checked by hand."""

from __future__ import annotations

import pytest

from conflux_ray.bench.live.score import Lag, Record, by_length, paired_difference, score, wilson
from conflux_ray.simulator.request import Slo

SLO = Slo(ttft=2.0, tbt=0.5)


def record(index: int, arrival: float, times: tuple[float, ...], output: int = 3, **fields) -> Record:
    return Record(index, arrival, fields.pop("prompt", 100), output, times, **fields)


def test_deadlines_are_cumulative_and_run_from_the_arrival() -> None:
    # Due at 3.0, 3.5 and 4.0.
    assert record(0, 1.0, (3.0, 3.5, 4.0)).compliant(SLO)
    assert record(0, 1.0, (1.1, 3.4, 4.0)).compliant(SLO)  # a long gap, after a first token that came early
    assert not record(0, 1.0, (3.0, 3.5, 4.001)).compliant(SLO)
    assert not record(0, 1.0, (3.001, 3.1, 3.2)).compliant(SLO)
    assert not record(0, 1.0, (3.0, 3.5)).compliant(SLO)
    assert not record(0, 1.0, (1.1, 1.2, 1.3), fault="finish_reason is 'stop'").compliant(SLO)
    assert record(0, 1.0, (3.0, 3.5, 4.0), lag=0.5).compliant(SLO)


def test_the_warm_up_is_not_counted_and_faults_are_misses() -> None:
    records = [
        record(0, 0.0, (9.0, 9.1, 9.2)),
        record(1, 1.0, (1.5, 1.6, 1.8)),
        record(2, 2.0, (3.5, 3.6, 9.0)),
        record(3, 3.0, (3.1,), fault="connection closed after 1 tokens"),
        record(4, 5.0, (6.0, 6.1, 6.2)),
    ]
    result = score(records, SLO, warm_up=1)
    assert (result["requests"], result["counted"], result["finished"], result["compliant"]) == (5, 4, 3, 2)
    assert result["attainment"] == 0.5
    assert result["rate"] == pytest.approx(3 / 4)
    assert result["faults"] == {"connection closed after N tokens": 1}
    assert result["ttft"]["p50"] == pytest.approx(1.0)  # of 0.5, 1.5 and 1.0
    assert result["output_tokens_per_s"] == pytest.approx(13 / 9.2)


def test_prompt_lengths_are_grouped() -> None:
    records = [
        record(0, 0.0, (1.0, 1.1, 1.2), prompt=1024),
        record(1, 0.0, (3.0, 3.1, 3.2), prompt=1025),
        record(2, 0.0, (1.0, 1.1, 9.2), prompt=4096),
        record(3, 0.0, (), prompt=20000, fault="HTTP 429"),
    ]
    groups = [
        (g["above"], g["up_to"], g["counted"], g["compliant"], g["late_first_token"]) for g in by_length(records, SLO)
    ]
    assert groups == [(0, 1024, 1, 1, 0), (1024, 4096, 2, 0, 1), (16384, None, 1, 0, 1)]


def test_wilsons_interval() -> None:
    assert wilson(95, 100) == pytest.approx((0.8882, 0.9785), abs=1e-4)
    assert wilson(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)


def test_paired_differences() -> None:
    ours, theirs = [True] * 90 + [False] * 10, [True] * 80 + [False] * 20
    difference, low, high = paired_difference(ours, theirs)
    assert difference == pytest.approx(0.1)
    assert low <= 0.1 <= high
    assert paired_difference(ours, ours) == (0.0, 0.0, 0.0)
    assert paired_difference([True] * 3, [False] * 3) == (1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="no pairs"):
        paired_difference([True], [True, False])


def test_a_client_that_lagged_makes_a_run_invalid() -> None:
    assert Lag.of([0.001] * 100, [0.002] * 100).verdict(0.01) is None
    assert "left within 20.0 ms, more than 10.0 ms" in (Lag.of([0.02] * 10, [0.0]).verdict(0.01) or "")
    assert "woke up within" in (Lag.of([0.0], [0.02] * 10).verdict(0.01) or "")
    rare = [0.0] * 9999
    assert Lag.of([0.0], [*rare, 0.049]).verdict(0.01) is None
    assert "once woke up after 51.0 ms, more than 50.0 ms" in (Lag.of([0.0], [*rare, 0.051]).verdict(0.01) or "")
    assert "the latest request left after 60.0 ms" in (Lag.of([*rare, 0.06], [0.0]).verdict(0.01) or "")
    assert Lag.of([], []).verdict(0.01) is None
