"""Fitting recovers known coefficients and refuses rows that cannot identify one."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest

from conflux_ray.planning.fitting import (
    COMPONENTS,
    ComponentRow,
    FitRefusedError,
    IterationRow,
    evaluate,
    fit_error,
    fit_gemm,
    fit_profile,
    row_from_json,
    row_to_json,
)
from conflux_ray.planning.latency_model import Affine, Contention, Curve, GemmCurve, IterationLoad, LatencyModel
from conflux_ray.planning.profile import FitError

TRUTH = LatencyModel(
    name="truth",
    num_layers=40,
    num_ranks=2,
    gemm=GemmCurve.floor(180e-6, 130, 1e-6),
    decode=Affine(1.1e-9, 15e-6),
    prefill=Affine(5e-11, 20e-6),
    comm=Affine(4e-8, 90e-6),
    contention=(Contention(1.3, 1.15), Contention(1.6, 1.05, 48)),
    transfer=Affine(1.2e-8, 40e-6),
    transfer_exposed=0.25,
    host=Affine(5e-6, 3e-3),
)
GRIDS = {
    "gemm": [1, 8, 32, 64, 128, 192, 256, 512, 1024, 2048, 4096],
    "decode": [1e3, 4e3, 16e3, 64e3, 256e3, 1e6],
    "prefill": [1e3, 1e5, 1e6, 1e7, 5e7],
    "comm": [32, 128, 512, 1024, 4096],
    "transfer": [512, 2048, 8192, 32768],
    "host": [1, 8, 32, 128],
}


def component_rows(truth=TRUTH, noise=0.0, skip=()):
    rng = random.Random(0)
    return [
        ComponentRow(name, x, getattr(truth, name)(x) * (1 + noise * rng.uniform(-1, 1)))
        for name, grid in GRIDS.items()
        if name not in skip
        for x in grid
        for _ in range(3 if noise else 1)
    ]


def iteration_rows(count=60, truth=TRUTH, seed=0, noise=0.0, **fields):
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        decodes = (rng.randint(1, 128), rng.randint(1, 128)) if i % 5 else (0, 0)
        chunk, context = rng.randint(32, 10_000), rng.randint(0, 16_000)
        first = rng.randint(0, chunk)
        has_prefill = i % 5 != 1
        load = IterationLoad(
            decodes,
            tuple(d * rng.randint(1000, 16_000) for d in decodes),
            (first, chunk - first) if has_prefill else (),
            ((chunk, context),) if has_prefill else (),
            (float(chunk), 0.0) if i % 4 == 3 else (),
        )
        overlap, sms = rng.random() < 0.7, rng.choice((None, 48))
        seconds = truth.predict(load, overlap=overlap, decode_sms=sms).seconds * (1 + noise * rng.uniform(-1, 1))
        rows.append(IterationRow(load, seconds, overlap, sms, **fields))
    return rows


def fit(rows, **fields):
    return fit_profile(
        rows, **{"model": "m", "machine": "x", "num_layers": 40, "num_ranks": 2, "date": "2026-11-30", **fields}
    )


def test_exact_rows_give_back_every_coefficient():
    fitted = fit(component_rows() + iteration_rows()).latency
    for name in ("decode", "prefill", "comm", "transfer", "host"):
        expected = getattr(TRUTH, name)
        assert getattr(fitted, name).slope == pytest.approx(expected.slope, rel=1e-6)
        assert getattr(fitted, name).intercept == pytest.approx(expected.intercept, rel=1e-6)
    assert fitted.gemm.form == "floor"
    assert fitted.gemm.knee == pytest.approx(130, abs=4)
    assert fitted.gemm.slope == pytest.approx(1e-6, rel=0.01)
    assert [(c.decode_sms, c.alpha, c.beta, c.gamma) for c in fitted.contention] == [
        (None, pytest.approx(1.3, abs=0.01), pytest.approx(1.15, abs=0.01), 0),
        (48, pytest.approx(1.6, abs=0.01), pytest.approx(1.05, abs=0.01), 0),
    ]
    assert fitted.transfer_exposed == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_share_that_is_not_hidden_is_found(noise):
    truth = replace(TRUTH, contention=(Contention(1.0, 1.1, gamma=0.6), Contention(1.0, 1.0, 48)))
    rows = component_rows(truth) + [row for row in iteration_rows(200, truth, noise=noise) if row.decode_sms is None]
    (found,) = fit(rows).latency.contention  # of the rows without a split
    assert found.gamma == pytest.approx(0.6, abs=0.1)
    assert (found.alpha, found.beta) == (pytest.approx(1.0, abs=0.05), pytest.approx(1.1, abs=0.05))


def test_noisy_rows_predict_unseen_iterations_within_their_noise():
    rows = component_rows(noise=0.05) + iteration_rows(noise=0.05)
    unseen = iteration_rows(200, seed=1, noise=0.05, held_out=True)
    profile = fit(rows + unseen)
    assert profile.held_out["iteration"].count == 200
    assert profile.held_out["iteration"].mape < 5
    assert profile.held_out["iteration"] == evaluate(profile.latency, unseen)


def test_held_out_rows_are_not_fitted():
    rows = component_rows() + iteration_rows()
    absurd = [replace(row, seconds=100 * row.seconds, held_out=True) for row in iteration_rows(20, seed=2)]
    assert fit(rows + absurd).latency == fit(rows).latency


def test_host_time_comes_from_whole_iterations_where_it_has_no_rows():
    fitted = fit(component_rows(skip=("host",)) + iteration_rows(200)).latency
    assert fitted.host.intercept == pytest.approx(3e-3, rel=0.1)
    assert fitted.host.slope == pytest.approx(5e-6, rel=0.3)


def test_without_overlapped_iterations_the_model_never_overlaps():
    rows = [row for row in iteration_rows() if not row.overlap]
    assert fit(component_rows() + rows).latency.contention == ()


@pytest.mark.parametrize("name", ["gemm", "decode", "prefill", "comm"])
def test_a_component_without_rows_is_refused_by_name(name):
    with pytest.raises(FitRefusedError, match=f"^{name}: no rows"):
        fit(component_rows(skip=(name,)))


def test_one_rank_needs_no_communication():
    truth = replace(TRUTH, num_ranks=1)
    assert fit(component_rows(truth, skip=("comm", "transfer")), num_ranks=1).latency.comm == Affine(0.0)


@pytest.mark.parametrize("name", sorted(COMPONENTS))
def test_rows_of_one_size_cannot_identify_a_slope(name):
    rows = [row for row in component_rows() if row.component != name]
    rows += [ComponentRow(name, 1000 + k, 1e-3) for k in range(6)]
    with pytest.raises(FitRefusedError, match=f"^{name}: .* cannot tell slope from intercept"):
        fit(rows)


@pytest.mark.parametrize(("coefficient", "chunk", "batch"), [("alpha", 10_000, 1), ("beta", 32, 128)])
def test_a_contention_factor_needs_iterations_that_it_decides(coefficient, chunk, batch):
    load = IterationLoad((batch, batch), (batch * 8000,) * 2, (chunk, 0), ((chunk, 0),))
    with pytest.raises(FitRefusedError, match=f"^{coefficient}: "):
        fit([*component_rows(), IterationRow(load, 0.1)])


def test_host_cannot_be_told_from_contention():
    mixed = [row for row in iteration_rows() if row.overlap and any(row.load.decode_tokens) and row.load.chunks]
    with pytest.raises(FitRefusedError, match=r"^host: "):
        fit(component_rows(skip=("host",)) + mixed)


def test_incoming_kv_needs_transfer_rows():
    with pytest.raises(FitRefusedError, match=r"^transfer: "):
        fit(component_rows(skip=("transfer",)) + iteration_rows())


def test_an_affine_machine_gets_the_affine_form_and_a_bent_one_the_piecewise():
    x = np.array(GRIDS["gemm"], dtype=float)
    assert fit_gemm(x, 1e-6 * x + 5e-5)[0].form == "affine"
    curve, errors = fit_gemm(x, 1e-5 * x**0.6)
    assert curve.form == "piecewise"
    assert errors["piecewise"].mape < errors["floor"].mape
    assert set(errors) == {"affine", "floor", "piecewise"}


def test_noise_never_makes_the_gemm_curve_fall():
    rng = np.random.default_rng(0)
    x = np.repeat(GRIDS["gemm"], 3).astype(float)
    curve, _ = fit_gemm(x, np.array([TRUTH.gemm(n) for n in x]) * rng.uniform(0.6, 1.4, len(x)))
    values = [curve(n) for n in range(0, 6000, 7)]
    assert values == sorted(values)


SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)


def test_padded_batches_take_what_the_next_size_takes():
    x = np.array([*SIZES, 400, 800], dtype=float)
    y = np.array([100, 100, 101, 100, 101, 100, 120, 150, 260, 300, 400, 800]) * 1e-6
    curve, errors = fit_gemm(x, y, padded=SIZES)
    assert curve.form == "steps"
    assert "steps" in errors
    assert [curve(n) for n in (33, 50, 64, 65, 129, 192)] == pytest.approx(
        [120e-6, 120e-6, 120e-6, 150e-6, 260e-6, 260e-6]
    )
    assert curve(600) == pytest.approx(600e-6)
    assert curve(1600) == pytest.approx(1600e-6, rel=0.1)
    assert curve.knee == 32
    assert curve.table[50] == curve(50)


def test_a_size_between_padded_ones_counts_as_the_one_it_runs_at():
    curve, _ = fit_gemm(np.array([1.0, 20, 40, 100, 256]), np.array([1.0, 2, 3, 5, 9]), padded=SIZES)
    assert [curve(n) for n in (1, 17, 32, 33, 64, 100, 128)] == pytest.approx([1, 2, 2, 3, 3, 5, 5])


def test_too_few_measured_sizes_make_no_steps():
    x = np.array([1.0, 16, 128, 400, 800])
    curve, errors = fit_gemm(x, 1e-6 * x + 5e-5, padded=SIZES)
    assert curve.form == "affine"
    assert "steps" not in errors


def test_a_component_that_bends_is_fitted_in_pieces():
    bent = Curve.through((0.0, 64.0, 1024.0, 4096.0), (30e-6, 30e-6, 200e-6, 330e-6), 4e-8)
    rows = [row for row in component_rows() if row.component != "comm"]
    x = np.geomspace(16, 8192, 19)
    rows += [ComponentRow("comm", float(n), bent(float(n))) for n in x]
    profile = fit(rows)
    assert isinstance(profile.latency.comm, Curve)
    assert isinstance(profile.latency.decode, Affine)
    assert profile.held_out["comm"].mape < 6
    values = [profile.latency.comm(n) for n in range(0, 9000, 50)]
    assert values == sorted(values)


def test_iterations_show_whether_ranks_wait_for_each_other():
    # Without transfers, and with the busiest rank not the one with the most context.
    for barrier in (True, False):
        truth = replace(TRUTH, barrier=barrier)
        fitted = fit(component_rows(truth) + iteration_rows(120, truth, noise=0.01)).latency
        assert fitted.barrier is barrier


def test_iterations_show_that_a_component_runs_faster_between_the_others_than_alone():
    alone = replace(TRUTH, gemm=TRUTH.gemm.scaled(1.2))
    fitted = fit(component_rows(alone, skip=("host",)) + iteration_rows(200)).latency
    assert fitted.gemm(2000) == pytest.approx(TRUTH.gemm(2000), rel=0.02)
    assert fitted.prefill(1e7) == pytest.approx(TRUTH.prefill(1e7), rel=0.05)


def test_iterations_show_that_a_transfer_takes_longer_beside_other_work():
    alone = replace(TRUTH, transfer=Affine(2e-7, 1e-3))
    slowed = replace(alone, transfer=alone.transfer.scaled(2.5))
    fitted = fit(component_rows(alone) + iteration_rows(200, slowed)).latency
    assert fitted.transfer(8000) == pytest.approx(slowed.transfer(8000), rel=0.02)


def test_errors_are_percentages_of_the_measured_time():
    assert fit_error([1.1, 2.0, 3.0, 1.0], [1.0, 2.0, 2.0, 4.0]) == FitError(
        4, pytest.approx(33.75), pytest.approx(30.0), pytest.approx(71.25), pytest.approx(75.0)
    )


def test_rows_survive_a_json_line():
    for row in component_rows() + iteration_rows(held_out=True):
        assert row_from_json(json.loads(json.dumps(row_to_json(row)))) == row


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "magic"}, "kind='magic'"),
        ({"kind": "component", "component": "gemv", "x": 1, "seconds": 1}, "gemv"),
        ({"kind": "component", "component": "gemm", "x": 1, "seconds": 0}, "seconds=0"),
        ({"kind": "component", "component": "gemm", "x": 1}, "seconds"),
        ({"kind": "iteration", "seconds": 1}, "decode_tokens"),
    ],
)
def test_lines_that_are_no_rows_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        row_from_json(fields)
