"""A profile refitted to iterations of a serving instance finds what the profile had wrong."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from conflux_ray.planning.fitting import FitRefusedError, IterationRow
from conflux_ray.planning.latency_model import Affine, Contention, GemmCurve, IterationLoad, LatencyModel
from conflux_ray.planning.refit import refit

TRUTH = LatencyModel(
    name="truth",
    num_layers=40,
    num_ranks=2,
    gemm=GemmCurve((0.0, 64.0), (200e-6, 215e-6), 1.02e-6),
    decode=Affine(1.1e-9, 12e-6),
    prefill=Affine(3.5e-11, 27e-6),
    comm=Affine(4e-8, 10e-6),
    contention=(Contention(1.0, 1.0, 96, 0.6),),
    transfer=Affine(8e-9, 60e-6),
    transfer_exposed=0.4,
    host=Affine(30e-6, 0.3e-3),
    barrier=False,
)
STEPS = GemmCurve((0.0, 128.0, 129.0, 1152.0, 1153.0, 2304.0), (190e-6, 190e-6, 300e-6, 1.0e-3, 1.2e-3, 2.1e-3), 0.8e-6)
MEASURED = replace(
    TRUTH,
    name="measured",
    gemm=STEPS,
    prefill=Affine(4.2e-11, 32e-6),
    decode=Affine(0.9e-9, 10e-6),
    contention=(Contention(1.3, 1.2), Contention(1.1, 1.0, 96)),
    transfer_exposed=1.0,
)


def served(truth: LatencyModel, count: int, noise: float = 0.0, seed: int = 0) -> list[IterationRow]:
    """Iterations as an instance serves them: decodes, beside which there is a chunk half of the time."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        decodes = (rng.randint(1, 40), rng.randint(1, 40))
        context = tuple(tokens * rng.randint(1000, 9000) for tokens in decodes)
        load = IterationLoad(decodes, context)
        if number % 2:
            level = rng.randint(300, 2200)
            shard = tuple(max(level - tokens, 0) for tokens in decodes)
            load = replace(load, prefill_tokens=shard, chunks=((sum(shard), rng.randint(0, 20000)),))
            if number % 6 == 1:
                load = replace(load, incoming=(rng.uniform(500, 8000), 0.0))
        seconds = truth.predict(load, overlap=True, decode_sms=96).seconds
        rows.append(IterationRow(load, seconds * (1 + noise * rng.gauss(0, 1)), True, 96))
    return rows


def test_what_the_profile_had_wrong_is_found_and_the_rest_stays() -> None:
    made = refit(MEASURED, served(TRUTH, 1600), "refitted")
    assert made.count == 800
    assert (made.before.count, made.after.count) == (800, 800)
    assert made.before.mape > 5
    assert made.after.mape < 0.5
    assert made.in_sample.mape < 0.5
    found = made.latency
    assert found.name == "refitted"
    for tokens in (10, 200, 700, 1153, 2000, 4000):
        assert found.gemm(tokens) == pytest.approx(TRUTH.gemm(tokens), rel=0.02)
    assert [c.decode_sms for c in found.contention] == [96]  # the setting that was not used is gone
    assert found.contention[0].gamma == pytest.approx(0.6, abs=0.051)
    assert found.transfer_exposed == pytest.approx(0.4, abs=0.05)
    assert (found.host, found.num_layers, found.barrier) == (MEASURED.host, 40, False)


def test_noise_and_an_outlier_move_it_little() -> None:
    rows = served(TRUTH, 1600, noise=0.02, seed=3)
    rows[41] = replace(rows[41], seconds=3.0)
    made = refit(MEASURED, rows, "refitted")
    assert made.after.p50 == pytest.approx(1.35, abs=0.2)  # half of a normal error lies within 0.67 of its deviation
    assert made.latency.gemm(1500) == pytest.approx(TRUTH.gemm(1500), rel=0.02)


def test_the_linear_region_never_gets_faster_with_more_tokens() -> None:
    # Above 1024 tokens nothing but noise is to be seen, and the last piece would come out flat.
    rng = np.random.default_rng(5)
    rows = served(replace(TRUTH, gemm=GemmCurve((0.0, 1024.0), (0.2e-3, 1.5e-3), 0.0)), 1200)
    rows = [replace(row, seconds=row.seconds * (1 + 0.05 * rng.standard_normal())) for row in rows]
    gemm = refit(MEASURED, rows, "refitted").latency.gemm
    assert all(a <= b for a, b in pairwise(gemm(n) for n in range(0, 6000, 10)))
    assert gemm.slope > 1e-7
    assert gemm(5000) > gemm(2300) + 1e-4


def test_one_rank_with_a_barrier_is_no_other_case() -> None:
    truth = replace(TRUTH, num_ranks=1, comm=Affine(0.0), barrier=True, transfer=Affine(0.0))
    rows = []
    for row in served(TRUTH, 1200):
        load = row.load
        shard = load.prefill_tokens[:1]
        chunks = ((shard[0], load.chunks[0][1]),) if shard and shard[0] else ()
        load = IterationLoad(load.decode_tokens[:1], load.decode_context[:1], shard if chunks else (), chunks)
        rows.append(IterationRow(load, truth.predict(load, overlap=True, decode_sms=96).seconds, True, 96))
    old = replace(truth, gemm=STEPS)
    made = refit(old, rows, "refitted")
    assert made.after.mape < 0.5 < made.before.mape


def test_with_a_barrier_the_busiest_rank_counts_wherever_it_is() -> None:
    truth, old = (replace(model, barrier=True) for model in (TRUTH, MEASURED))
    rows = []
    for row in served(truth, 1600):
        load = row.load
        if not load.chunks:  # nothing on rank 0
            load = IterationLoad((0, load.decode_tokens[1]), (0, load.decode_context[1]))
        rows.append(replace(row, load=load, seconds=truth.predict(load, overlap=True, decode_sms=96).seconds))
    assert refit(old, rows, "refitted").after.mape < 0.5


def test_paths_in_turn_end_with_the_rank_that_has_most_of_both() -> None:
    rng = random.Random(1)
    rows = []
    for row in served(TRUTH, 2400):
        if (
            row.load.chunks and len(rows) % 4 == 3
        ):  # the chunk is on one rank, most of the decodes' context on the other
            length = rng.randint(100, 700)
            load = IterationLoad(
                (2, 40), (2000, 40 * rng.randint(4000, 12000)), (length, 0), ((length, rng.randint(0, 20000)),)
            )
            row = IterationRow(load, TRUTH.predict(load, overlap=False).seconds, False)
        rows.append(row)
    made = refit(MEASURED, rows, "refitted")
    assert made.after.mape < 0.5
    assert made.latency.gemm(1500) == pytest.approx(TRUTH.gemm(1500), rel=0.01)


def test_a_setting_that_was_hardly_used_is_not_fitted() -> None:
    rows = served(replace(TRUTH, contention=(*TRUTH.contention, Contention(1.3, 1.2))), 1600)
    mixed = [k for k, row in enumerate(rows) if row.load.chunks]
    for k in mixed[:30]:  # some of them with KV arriving
        rows[k] = replace(rows[k], decode_sms=None, seconds=0.8 * rows[k].seconds)
    made = refit(MEASURED, rows, "refitted")
    assert [c.decode_sms for c in made.latency.contention] == [96]
    assert made.after.mape < 0.5


def test_a_setting_that_the_profile_does_not_know_is_refused() -> None:
    rows = [replace(row, decode_sms=48) for row in served(TRUTH, 400)]
    with pytest.raises(ValueError, match="decode_sms=48, which these are; give the profile that was served"):
        refit(MEASURED, rows, "refitted")


def test_iterations_that_are_all_alike_are_refused() -> None:
    load = IterationLoad((8, 8), (40000, 40000))
    mixed = replace(load, prefill_tokens=(1000, 1000), chunks=((2000, 4000),))
    rows = []
    for k in range(800):
        seconds = TRUTH.predict(mixed if k % 2 else load, overlap=True, decode_sms=96).seconds
        rows.append(IterationRow(mixed if k % 2 else load, seconds, True, 96))
    with pytest.raises(FitRefusedError, match="too alike"):
        refit(MEASURED, rows, "refitted")


def test_an_instance_that_never_overlapped_teaches_nothing_of_overlap() -> None:
    rows = [replace(row, overlap=False, decode_sms=None) for row in served(TRUTH, 800)]
    with pytest.raises(FitRefusedError, match="with decodes beside prefill"):
        refit(MEASURED, rows, "refitted")


@pytest.mark.parametrize("kind", [0, 1])
def test_too_few_iterations_of_a_kind_are_refused(kind: int) -> None:
    rows = served(TRUTH, 400)
    few = [row for k, row in enumerate(rows) if k % 2 != kind or k < 100]
    with pytest.raises(FitRefusedError, match="too few"):
        refit(MEASURED, few, "refitted")
