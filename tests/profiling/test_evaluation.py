"""Errors of a model whose predictions are known."""

from __future__ import annotations

import pytest

from conflux_ray.planning.fitting import IterationRow
from conflux_ray.planning.latency_model import NOTHING, Affine, GemmCurve, IterationLoad, LatencyModel
from conflux_ray.profiling.evaluation import evaluate_iterations

# One layer, one rank: a token takes a second, and nothing else takes any time.
MODEL = LatencyModel("m", 1, 1, GemmCurve.affine(1.0, 0.0), Affine(0.0), NOTHING, NOTHING)


def row(tokens: int, seconds: float) -> IterationRow:
    return IterationRow(IterationLoad((tokens,), (tokens,)), seconds)


def test_errors_are_relative_to_the_measurement_and_signed_ones_average_out() -> None:
    errors = evaluate_iterations(MODEL, [row(8, 10.0), row(12, 10.0), row(4, 4.0)], ["a", "a", "b"])
    assert errors.overall.count == 3
    assert errors.overall.mape == pytest.approx(40 / 3)
    assert errors.overall.max == pytest.approx(20)
    assert errors.bias == pytest.approx(0)
    assert errors.std == pytest.approx((800 / 3) ** 0.5)
    assert errors.by_kind["a"].mape == pytest.approx(20)
    assert errors.by_kind["b"].mape == 0
