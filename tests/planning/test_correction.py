"""The online correction."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_ray.planning.correction import Correction


def test_it_converges_to_a_steady_error():
    correction = Correction()
    for _ in range(500):
        correction.observe(predicted=correction.factor * 0.050, measured=0.060)
    assert correction.factor == pytest.approx(1.2, rel=1e-3)


@given(st.lists(st.tuples(st.floats(1e-9, 1e9), st.floats(1e-9, 1e9)), max_size=200))
def test_it_stays_within_its_bounds(iterations):
    correction = Correction(rate=0.5, bounds=(0.8, 1.3))
    for predicted, measured in iterations:
        correction.observe(predicted, measured)
        assert 0.8 <= correction.factor <= 1.3


def test_one_hung_iteration_moves_it_little():
    correction = Correction(rate=0.02, clip=1.5)
    correction.observe(predicted=0.05, measured=60.0)
    assert correction.factor == pytest.approx(1.5**0.02)


@pytest.mark.parametrize(("predicted", "measured"), [(0.0, 1.0), (1.0, 0.0), (1.0, math.inf), (1.0, math.nan)])
def test_meaningless_times_teach_nothing(predicted, measured):
    correction = Correction()
    correction.observe(predicted, measured)
    assert correction.factor == 1.0


def test_reset_forgets():
    correction = Correction(rate=1.0)
    correction.observe(1.0, 1.2)
    assert correction.factor > 1
    correction.reset()
    assert correction.factor == 1.0


@pytest.mark.parametrize("fields", [{"rate": 2.0}, {"bounds": (1.1, 2.0)}, {"clip": 1.0}])
def test_parameters_out_of_range_are_refused(fields):
    with pytest.raises(ValueError, match="correction"):
        Correction(**fields)
