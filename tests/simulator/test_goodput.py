"""The search on functions whose answer is known, and end to end on a small machine."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from conflux_ray.simulator.deployment import Deployment
from conflux_ray.simulator.goodput import Search, goodputs, interval, largest_passing, passes
from conflux_ray.simulator.parallel import run_all
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.run import Setup, simulate
from conflux_ray.simulator.trace import Quantiles
from conflux_ray.simulator.workload import Workload
from tests.simulator.build import PlainHardware

SMALL = Workload("small", 4000, quantiles=(Quantiles(80, 300), Quantiles(5, 20)))


@pytest.mark.parametrize("knee", [0.07, 1.0, 3.0, 55.5])
@pytest.mark.parametrize("tolerance", [0.1, 0.01])
def test_search_finds_the_knee_of_a_monotone_function(knee: float, tolerance: float):
    asked: list[float] = []

    def below(rate: float) -> bool:
        asked.append(rate)
        return rate <= knee

    found = largest_passing(below, guess=3.0, tolerance=tolerance)
    assert knee / (1 + tolerance) <= found <= knee
    assert found in asked
    assert len(asked) < 30


def test_search_gives_up_where_nothing_passes():
    assert largest_passing(lambda rate: False, guess=3.0) == 0.0
    with pytest.raises(ValueError, match="must be a positive rate"):
        largest_passing(lambda rate: True, guess=0.0)


def test_interval_is_students():
    # Mean 2, deviation 1, t(0.975, 2) = 4.303: 4.303 / sqrt(3).
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(2.4843, abs=1e-3)
    assert interval([1.0]) == math.inf


def test_interval_covers_the_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    samples = [rng.normal(5.0, 1.0, 4).tolist() for _ in range(1000)]
    covered = sum(abs(statistics.mean(s) - 5.0) <= interval(s) for s in samples) / len(samples)
    assert 0.92 < covered < 0.98


def test_goodput_lies_at_the_boundary_of_attainment():
    setup = Setup("chunked", Deployment(PlainHardware(), 1), Slo(0.5, 0.5))
    search = Search(seconds=60, seeds=2, tolerance=0.05, guess=2.0, requests=600)
    (result,) = goodputs([(setup, [{"budget": 256}, {"budget": 32}], SMALL)], search, jobs=1)
    assert len(result.per_seed) == 2
    assert result.mean == pytest.approx(statistics.mean(result.per_seed))
    best = Setup(setup.system, setup.deployment, setup.slo, result.options)
    for seed, rate in enumerate(result.per_seed):
        assert passes(best, SMALL, search, rate, seed)
        assert not passes(best, SMALL, search, rate * 1.3, seed)
    assert [options["budget"] for options, _ in result.tried] == [256, 32]  # the larger budget has fewer iterations
    assert result.options == {"budget": 256}


def test_stopping_early_agrees_with_running_to_the_end():
    setup = Setup("chunked", Deployment(PlainHardware(), 1), Slo(0.5, 0.5))
    verdicts = []
    for rate in (1.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0):
        trace = SMALL.draw(rate, 60, seed=1)
        whole = simulate(setup, trace)
        early = simulate(setup, trace, floor=0.95)
        assert early.certain_miss <= (whole.summary.attainment < 0.95)
        verdicts.append(early.certain_miss)
    assert any(verdicts)
    assert not all(verdicts)


def test_draws_follow_the_seed():
    assert SMALL.draw(2.0, 30, 1).requests == SMALL.draw(2.0, 30, 1).requests
    assert SMALL.draw(2.0, 30, 1).requests != SMALL.draw(2.0, 30, 2).requests


def test_a_seed_has_the_same_requests_at_every_rate_and_length():
    slow, fast, longer = SMALL.draw(1.0, 10, 1, 40), SMALL.draw(4.0, 10, 1, 40), SMALL.draw(4.0, 20, 1)
    assert (len(slow), len(fast), len(longer)) == (40, 40, 80)
    lengths = [[(r.prompt_tokens, r.output_tokens) for r in drawn.requests[:40]] for drawn in (slow, fast, longer)]
    assert lengths[0] == lengths[1] == lengths[2]
    assert [r.arrival for r in slow.requests] == pytest.approx([4 * r.arrival for r in fast.requests])


def test_a_workload_has_one_source():
    with pytest.raises(ValueError, match="either a trace or quantiles"):
        Workload("none", 100)
    with pytest.raises(ValueError, match="not in Table 3"):
        Workload.from_table("nonsense", 100)


def _square(x: int) -> int:
    return x * x


def test_parallel_results_are_in_the_order_of_the_tasks():
    assert run_all(_square, list(range(7)), jobs=2) == run_all(_square, list(range(7)), jobs=1)
