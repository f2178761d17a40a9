"""The latency model against Eqs. 2-12 worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_ray.planning.latency_model import (
    NOTHING,
    Affine,
    Contention,
    Curve,
    GemmCurve,
    IterationLoad,
    LatencyModel,
    chunk_work,
)

MODEL = LatencyModel(
    name="by hand",
    num_layers=10,
    num_ranks=2,
    gemm=GemmCurve.floor(100.0, 50, 2.0),
    decode=Affine(0.1, 5.0),
    prefill=Affine(0.01, 3.0),
    comm=Affine(0.5, 7.0),
    contention=(Contention(1.5, 1.25),),
    serial=False,
    host=Affine(1.0, 20.0),
)
CURVES = [Curve.through((0, 40, 300), (3.1, 3.1, 14.9), 0.03), Curve.through((0, 7, 90_000), (2.3, 5.3, 400.7), 0.01)]


def test_iteration_ends_at_two_boundaries_a_layer():
    load = IterationLoad((10, 20), (1000, 600), prefill_tokens=(60, 40), chunks=((100, 8),))
    # busiest rank 70 tokens: 100 + 2 * 20 = 140
    # T_P = 0.5 * 60 + 7 + 0.01 * 100 * (8 + 50.5) / 2 + 3 = 69.25; T_D = 0.1 * 1000 + 5 = 105
    # T_ATTN = max(1.25 * 69.25, 1.5 * 105) = 157.5; host 20 + 1 * 20
    prediction = MODEL.predict(load)
    assert (prediction.gemm, prediction.prefill, prediction.decode) == pytest.approx((140, 69.25, 105))
    assert prediction.seconds == pytest.approx(10 * (140 + 157.5) + 40)


def test_one_path_alone_suffers_no_contention():
    decode_only = MODEL.predict(IterationLoad((10, 20), (1000, 600)))
    prefill_only = MODEL.predict(IterationLoad((0, 0), (0, 0), prefill_tokens=(60, 40), chunks=((100, 8),)))
    assert decode_only.seconds == pytest.approx(10 * (100 + 105) + 40)
    assert prefill_only.seconds == pytest.approx(10 * (120 + 69.25) + 20)


def test_serial_attention_adds_the_paths_and_is_chosen_where_overlap_hurts():
    load = IterationLoad((10, 20), (1000, 600), prefill_tokens=(1, 0), chunks=((1, 0),))
    model = replace(MODEL, contention=(Contention(3.0, 1.0),), serial=True)
    prediction = model.predict(load)
    assert not prediction.overlap
    assert prediction.attention == pytest.approx(prediction.prefill + prediction.decode)
    assert model.predict(load, overlap=True).attention == pytest.approx(3 * 105)


def test_the_fastest_partition_of_the_sms_is_chosen():
    load = IterationLoad((10, 20), (1000, 600), prefill_tokens=(60, 40), chunks=((100, 8),))
    model = replace(MODEL, contention=(Contention(1.5, 1.2, 48), Contention(1.1, 1.4, 64)))
    assert model.predict(load).decode_sms == 64
    assert model.predict(load, overlap=True, decode_sms=48).attention == pytest.approx(157.5)
    with pytest.raises(ValueError, match="decode_sms=32"):
        model.predict(load, overlap=True, decode_sms=32)


@pytest.mark.parametrize(("exposed", "layer"), [(0.0, 205), (0.5, 255), (1.0, 305)])
def test_kv_transfer_adds_its_exposed_share(exposed, layer):
    load = IterationLoad((10, 20), (1000, 600), incoming=(0, 100))
    model = replace(MODEL, transfer=Affine(1.0), transfer_exposed=exposed)
    assert model.predict(load).seconds == pytest.approx(10 * layer + 40)


def test_a_transfer_longer_than_the_layers_bounds_the_iteration():
    load = IterationLoad((10, 20), (1000, 600), incoming=(0, 400))
    assert replace(MODEL, transfer=Affine(1.0)).predict(load).seconds == pytest.approx(10 * 400 + 40)


def test_base_tp_all_reduce_follows_the_busiest_rank():
    load = IterationLoad((10, 20), (1000, 600))
    model = replace(MODEL, all_reduce=Affine(0.5, 4.0))
    assert model.predict(load).gemm == pytest.approx(100 + 0.5 * 20 + 4)
    assert model.free_level == 0


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("decodes", [(0, 0), (10, 20)])
@pytest.mark.parametrize("shard", [(0, 0), (60, 40)])
def test_the_estimator_of_a_step_agrees_with_the_model(serial, decodes, shard):
    model = replace(MODEL, serial=serial, transfer=Affine(0.2, 1.0), transfer_exposed=0.3)
    chunks = ((100, 8),) if any(shard) else ()
    load = IterationLoad(decodes, tuple(50 * d for d in decodes), shard, chunks, (0, 30))
    estimator = model.given(load.decode_tokens, load.decode_context)
    assert estimator.seconds(load.max_load, load.max_shard, load.work, 30) == pytest.approx(model.predict(load).seconds)


@given(
    load=st.integers(0, 500),
    shard=st.integers(0, 500),
    work=st.integers(0, 10**6),
    incoming=st.integers(0, 5000),
    decodes=st.sampled_from([(0, 0), (3, 40)]),
    changes=st.fixed_dictionaries(
        {},
        optional={
            "gemm": st.sampled_from([GemmCurve.affine(0.3, 7.1), GemmCurve((0, 9, 31), (0.0, 5.3, 9.7), 1.1)]),
            "prefill": st.sampled_from(CURVES),
            "comm": st.sampled_from([NOTHING, *CURVES]),
            "serial": st.just(True),
            "contention": st.just((Contention(1.7, 1.2, 48), Contention(1.1, 1.4, 64, gamma=0.3))),
            "all_reduce": st.just(Affine(0.7, 4.3)),
            "transfer": st.just(Affine(0.3, 1.7)),
            "transfer_exposed": st.floats(0, 1),
        },
    ),
)
def test_the_estimator_gives_what_its_parts_give_to_the_last_bit(load, shard, work, incoming, decodes, changes):
    model = replace(MODEL, **changes)
    estimator = model.given(decodes, [110 * d for d in decodes])
    layer = model.linear(load) + estimator.attention(estimator.prefill_path(shard, work))
    layer = model.with_transfer(layer, model.transfer(incoming) if incoming else 0.0)
    assert estimator.seconds(load, shard, work, incoming) == model.num_layers * layer + estimator.host


def test_the_longer_path_hides_all_of_the_shorter_one_but_a_share():
    assert Contention(1.5, 1.25).attention(prefill=4.0, decode=2.0) == 5.0
    assert Contention(1.5, 1.25, gamma=0.5).attention(prefill=4.0, decode=2.0) == 6.0
    assert Contention(1.5, 1.25, gamma=0.5).attention(prefill=2.0, decode=4.0) == 7.0


def test_an_empty_iteration_takes_the_host_only():
    assert MODEL.predict(IterationLoad((0, 0), (0, 0))).seconds == 20


def test_chunk_work_is_what_causal_attention_reads():
    assert chunk_work(3, 10) == 11 + 12 + 13


def test_gemm_curve_interpolates_between_knots_and_continues_with_its_slope():
    curve = GemmCurve((0, 10, 30), (5.0, 5.0, 9.0), 1.0, "piecewise")
    assert [curve(n) for n in (0, 10, 20, 30, 40)] == [5, 5, 7, 9, 19]
    assert curve.knee == 10


@pytest.mark.parametrize(
    "make",
    [
        lambda: Affine(-1e-9),
        lambda: GemmCurve((0, 5), (2.0, 1.0), 1.0),
        lambda: GemmCurve((1,), (2.0,), 1.0),
        lambda: Curve.through((0, 5), (2.0, 1.0), 1.0),
        lambda: Contention(0.9, 1.0),
        lambda: Contention(1.0, 1.0, gamma=1.1),
        lambda: IterationLoad((1, 2), (1,)),
        lambda: IterationLoad((1, 2), (1, 2), prefill_tokens=(3, 3), chunks=((5, 0),)),
        lambda: replace(MODEL, transfer_exposed=1.5),
        lambda: replace(MODEL, contention=()),
        lambda: MODEL.given((1, 2, 3), (1, 2, 3)),
    ],
)
def test_impossible_values_are_refused(make):
    with pytest.raises(ValueError):
        make()


def test_without_a_barrier_a_rank_s_decodes_begin_when_its_own_linear_region_ends():
    model = replace(MODEL, contention=(Contention(1.0, 1.0),), serial=True, barrier=False)
    # Rank 0, 70 tokens: 100 + 2 * 20 = 140, T_D = 0.1 * 400 + 5 = 45; rank 1, 20 tokens: 100, T_D = 105.
    load = IterationLoad((10, 20), (400, 1000), prefill_tokens=(60, 0), chunks=((60, 8),))
    prefill = 0.5 * 60 + 7 + 0.01 * 60 * (8 + 30.5) / 2 + 3  # 51.55
    assert model.predict(load, overlap=False).seconds == pytest.approx(10 * (100 + 105 + prefill) + 40)
    assert model.predict(load, overlap=True).seconds == pytest.approx(10 * max(140 + prefill, 100 + 105) + 40)
    decodes = IterationLoad((10, 60), (1000, 400))  # 100 + 105 against 120 + 45
    assert model.predict(decodes).seconds == pytest.approx(10 * 205 + 80)
    shared = replace(model, contention=(Contention(1.0, 1.0, gamma=0.5),))
    # 40 of rank 1's 105 pass while rank 0 is in its linear region; half of the 51.55 that both share comes on top.
    assert shared.predict(load, overlap=True).seconds == pytest.approx(10 * (205 + 0.5 * prefill) + 40)


@given(
    level=st.integers(41, 300),
    contexts=st.tuples(st.integers(0, 5000), st.integers(0, 5000)),
    chunk_context=st.integers(0, 300),
    skew=st.integers(0, 40),
)
def test_without_a_barrier_evenly_loaded_ranks_take_what_the_step_s_estimator_says(
    level, contexts, chunk_context, skew
):
    model = replace(MODEL, contention=(Contention(1.2, 1.1, gamma=0.4),), serial=True, barrier=False)
    decodes = (3, 40)
    shard = (level - 3, level - 40)
    estimator = model.given(decodes, contexts)
    load = IterationLoad(decodes, contexts, shard, ((sum(shard), chunk_context),))
    assert model.predict(load).seconds == pytest.approx(estimator.seconds(level, shard[0], load.work))
    skewed = IterationLoad(decodes, contexts, (shard[0] + skew, shard[1]), ((sum(shard) + skew, chunk_context),))
    bound = estimator.seconds(skewed.max_load, skewed.max_shard, skewed.work)
    assert model.predict(skewed).seconds <= bound * (1 + 1e-12)


def test_a_component_that_bends_interpolates_and_goes_on_as_its_last_line():
    curve = Curve.through((0, 10, 30), (5.0, 5.0, 9.0), 1.0)
    assert [curve(x) for x in (0, 10, 20, 30, 40)] == [5, 5, 7, 9, 19]
    assert curve(1000) == curve.slope * 1000 + curve.intercept
    assert [curve.scaled(2.0)(x) for x in (0, 20, 40)] == [10, 14, 38]
    assert [curve.raised(1.0)(x) for x in (0, 20, 40)] == [6, 8, 20]


@given(
    load=st.integers(1, 500),
    shard=st.integers(0, 500),
    work=st.integers(0, 10**6),
    incoming=st.integers(0, 5000),
    more=st.tuples(*[st.integers(0, 100)] * 4),
    serial=st.booleans(),
    bends=st.booleans(),
    decodes=st.sampled_from([(0, 0), (3, 40)]),
)
def test_latency_never_falls_as_work_grows(load, shard, work, incoming, more, serial, bends, decodes):
    model = replace(MODEL, serial=serial, transfer=Affine(0.2, 1.0), transfer_exposed=0.3)
    if bends:
        model = replace(model, comm=CURVES[0], prefill=CURVES[1], gemm=GemmCurve((0, 64, 65), (3.0, 3.0, 9.0), 0.1))
    estimator = model.given(decodes, [100 * d for d in decodes])
    before = estimator.seconds(load, shard, work, incoming)
    after = estimator.seconds(load + more[0], shard + more[1], work + more[2], incoming + more[3])
    assert 0 <= before <= after * (1 + 1e-12)
