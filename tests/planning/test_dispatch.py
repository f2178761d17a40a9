"""Algorithm 2 against exhaustive search over water levels and over all assignments."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_ray.planning.dispatch import capped_level, ensure_token, largest_within, pour, water_level, waterfill
from conflux_ray.planning.latency_model import Affine, GemmCurve
from tests.planning.assignments import fastest_by_caps, fastest_by_exhaustion, gaps, random_model, seconds_of
from tests.planning.build import MS, dispatcher, per_token_model

heights = st.lists(st.integers(0, 60), min_size=1, max_size=5)


def test_water_rises_on_the_lowest_ranks_first():
    assert waterfill([5, 0, 3], 7) == [0, 5, 2]
    assert waterfill([5, 0, 3], 10) == [1, 6, 3]


@given(heights, st.integers(1, 300))
def test_waterfill_conserves_tokens_and_makes_the_largest_load_smallest(loads, tokens):
    poured = waterfill(loads, tokens)
    level = water_level(loads, tokens)
    assert sum(poured) == tokens
    assert min(poured) >= 0
    assert max(load + new for load, new in zip(loads, poured, strict=True)) == max(level, *loads)
    assert sum(max(0, level - 1 - load) for load in loads) < tokens


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 40)), min_size=1, max_size=5), st.data())
def test_capped_water_respects_every_cap(ranks, data):
    loads, room = [h for h, _ in ranks], [r for _, r in ranks]
    if not sum(room):
        return
    tokens = data.draw(st.integers(1, sum(room)))
    level = capped_level(loads, room, tokens)
    poured = pour(loads, room, level, tokens)
    assert sum(poured) == tokens
    assert all(0 <= new <= free for new, free in zip(poured, room, strict=True))
    assert sum(min(free, max(0, level - 1 - load)) for load, free in ranks) < tokens


@pytest.mark.parametrize(("loads", "tokens", "level"), [([0, 0, 34], 66, 33), ([0, 0, 34], 69, 35), ([0, 9], 9, 9)])
def test_the_level_is_the_lowest_that_holds_the_tokens(loads, tokens, level):
    assert water_level(loads, tokens) == level


def test_capped_water_refuses_more_than_there_is_room_for():
    with pytest.raises(ValueError, match="do not fit"):
        capped_level([0, 0], [3, 4], 8)


def plain_search(d, wanted: int, context: int | None) -> int:
    """Algorithm 2, lines 2-5, by trying every water level from below; `wanted` in one go if it fits."""
    best, level = 0, 0
    while True:
        tokens = min(d.capacity(level), wanted)
        if d.seconds_at(level, wanted, context) > d.tau:
            return best
        best = tokens
        if tokens == wanted:
            return best
        level += d.quantum


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
def test_dispatch_equals_exhaustive_search_over_water_levels(num_ranks):
    rng = random.Random(num_ranks)
    shortened = 0
    for _ in range(60):
        model = random_model(rng, num_ranks)
        decodes = [rng.choice((0, rng.randint(1, 128))) for _ in range(num_ranks)]
        alone = model.given(decodes, [10 * n for n in decodes]).seconds(max(decodes), 0, 0)
        d = dispatcher(
            model, decodes, tau=alone * rng.uniform(0.9, 4), quantum=rng.choice((1, 16, 32)), max_tokens=4096
        )
        assert d.budget() == plain_search(d, d.room, None)
        for _ in range(3):
            remaining, context = rng.randint(1, 3000), rng.choice((0, 5000))
            room = d.room
            whole = d.assign(min(remaining, room), context)
            expected = (
                min(remaining, room)
                if whole.seconds <= d.tau and d.assigned.seconds <= d.tau and room
                else plain_search(d, min(remaining, room), context)
            )
            assignment = d.dispatch(remaining, context)
            assert (sum(assignment.shard) if assignment else 0) == expected
            if assignment:
                shortened += expected < remaining
                d.commit(assignment)
    assert shortened > 20


def test_latency_at_a_level_is_that_of_the_assignment():
    rng = random.Random(11)
    for _ in range(100):
        num_ranks = rng.choice((1, 2, 4))
        decodes = [rng.choice((0, rng.randint(1, 200))) for _ in range(num_ranks)]
        d = dispatcher(random_model(rng, num_ranks), decodes, tau=1.0)
        d.commit(d.assign(rng.randint(1, 400), 100))
        level, wanted = rng.randint(1, 600), rng.randint(1, 1500)
        tokens = min(d.capacity(level), wanted)
        assert d.capacity(level) == sum(max(0, level - load) for load in d.assigned.loads)
        exact, complete = d.assign(tokens, 70), d.seconds_at(level, wanted, 70)
        if tokens < wanted:
            assert complete == pytest.approx(exact.seconds, rel=1e-12)
        else:
            assert exact.seconds * (1 - 1e-12) <= complete <= d.assign(tokens + num_ranks, 70).seconds * (1 + 1e-12)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_no_more_tokens_fit_in_any_assignment_when_only_the_linear_region_counts(num_ranks):
    rng = random.Random(7)
    for _ in range(30):
        decodes = [rng.randint(0, 12) for _ in range(num_ranks)]
        d = dispatcher(per_token_model(num_ranks), decodes, tau=rng.randint(1, 14) * MS * 1.0001)
        tokens = d.budget()
        if max(decodes) * MS > d.tau:
            assert tokens == 0
            continue
        assert fastest_by_exhaustion(d.estimator, decodes, tokens, 0) <= d.tau
        assert fastest_by_exhaustion(d.estimator, decodes, tokens + 1, 0) > d.tau


def test_the_two_cap_search_for_the_best_assignment_is_exhaustive():
    rng = random.Random(3)
    for _ in range(40):
        num_ranks = rng.choice((2, 3, 4))
        model = random_model(rng, num_ranks)
        decodes = [rng.randint(0, 200) for _ in range(num_ranks)]
        estimator = model.given(decodes, decodes)
        tokens = rng.randint(1, 14)
        assert fastest_by_caps(estimator, decodes, tokens, 50) == pytest.approx(
            fastest_by_exhaustion(estimator, decodes, tokens, 50), rel=1e-12
        )


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_evening_shards_below_the_free_level_closes_the_gap_to_the_best_assignment(num_ranks):
    pure, ours = gaps(seed=1, cases=60, num_ranks=num_ranks)
    assert max(pure) > 0.5  # the cases do have something to gain
    assert max(ours) < 0.6
    assert sum(ours) < sum(pure) / 10
    assert min(ours) > -1e-9


def test_shards_are_even_where_the_linear_region_is_flat_anyway():
    model = per_token_model(4, gemm=GemmCurve.floor(1.0, 128, MS), comm=Affine(MS))
    d = dispatcher(model, [60, 0, 0, 0], tau=10.0)
    assert d.assign(100, 0).shard == [25, 25, 25, 25]
    assert seconds_of(d.estimator, [60, 0, 0, 0], (25, 25, 25, 25), 0) < seconds_of(
        d.estimator, [60, 0, 0, 0], waterfill([60, 0, 0, 0], 100), 0
    )


def test_a_rank_fuller_than_the_water_evens_the_shards_of_the_others():
    model = per_token_model(3, comm=Affine(MS))
    d = dispatcher(model, [50, 20, 0], tau=1.0)
    assert d.assign(20, 0).shard == [0, 10, 10]


def test_levels_are_multiples_of_the_quantum_unless_the_request_ends_below():
    d = dispatcher(per_token_model(2), [3, 0], tau=20.5 * MS, quantum=8)
    assert d.budget() == (16 - 3) + 16
    assert sum(d.dispatch(33, 0).shard) == 33  # all of it fits at level 18, under tau
    assert sum(d.dispatch(39, 0).shard) == 29


def test_long_context_shortens_the_chunk():
    model = per_token_model(2, prefill=Affine(1e-6))
    d = dispatcher(model, [0, 0], tau=50 * MS)
    fresh, deep = sum(d.dispatch(1000, 0).shard), sum(d.dispatch(1000, 1000).shard)
    assert 0 < deep < fresh


def test_chunks_accumulate_until_nothing_fits():
    d = dispatcher(per_token_model(2), [4, 0], tau=10.5 * MS)
    first = d.dispatch(9, 0)
    d.commit(first)
    second = d.dispatch(100, 0)
    d.commit(second)
    assert sum(first.shard) + sum(second.shard) == 16
    assert d.assigned.loads == [10, 10]
    assert d.dispatch(1, 0) is None
    assert d.budget() == 0


def test_the_limits_on_tokens_hold():
    d = dispatcher(per_token_model(2), [0, 0], tau=1.0, max_tokens=50)
    assert d.budget() == 50
    assert sum(d.dispatch(200, 0, limit=30).shard) == 30
    d.commit(d.dispatch(200, 0, limit=30))
    assert sum(d.dispatch(200, 0).shard) == 20


@pytest.mark.parametrize("decodes", [[0, 0], [5, 0], [30, 30]])
def test_no_tokens_fit_a_budget_of_zero(decodes):
    d = dispatcher(per_token_model(2), decodes, tau=0.0)
    assert d.budget() == 0
    assert d.dispatch(10, 0) is None


def test_a_completing_shard_moves_one_token_to_its_decode_rank():
    assert ensure_token([0, 5, 5], 0, [20, 10, 12]) == [1, 5, 4]
    assert ensure_token([2, 5, 5], 0) == [2, 5, 5]


@given(
    limit=st.integers(0, 4000),
    curve=st.lists(st.integers(0, 300), min_size=2, max_size=40),
)
def test_interpolating_search_finds_what_halving_finds(limit, curve):
    values = [float(sum(curve[: k + 1])) for k in range(len(curve))]
    if not values[0] <= limit < values[-1]:
        return
    found = largest_within(lambda k: values[k], limit, 0, len(values) - 1, values[0], values[-1])
    assert found == max(k for k, value in enumerate(values) if value <= limit)


def test_the_search_takes_logarithmically_many_probes_at_worst():
    probes = 0

    def cliff(x: int) -> float:
        nonlocal probes
        probes += 1
        return 0.0 if x < 60_000 else 1e9

    assert largest_within(cliff, 1.0, 0, 1 << 16, 0.0, 1e9) == 59_999
    assert probes <= 3 * 16


@given(
    decodes=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    taus=st.tuples(st.integers(0, 90), st.integers(0, 90)),
)
def test_the_budget_grows_with_tau(decodes, taus):
    model = per_token_model(len(decodes), comm=Affine(MS / 4, MS))
    small, large = (dispatcher(model, decodes, tau=t * MS).budget() for t in sorted(taus))
    assert 0 <= small <= large


def test_attention_is_counted_in_tokens_of_the_budget():
    # 2 decodes a rank take 2 ms of 12, and leave room for 10 tokens a rank: 20 tokens in 10 ms, 0.5 ms each.
    # A pair takes 0.25 ms over the two ranks' shares, so half a token.
    model = per_token_model(prefill=Affine(0.5 * MS))
    pool = dispatcher(model, [2, 2], 12 * MS)
    assert pool.budget() == 20
    assert pool.tokens_per_pair(20) == pytest.approx(0.5)
    # One rank is at tau, the other has room for 8 tokens that cost nothing; 6 ms are counted for them.
    uneven = dispatcher(model, [12, 4], 12 * MS)
    assert uneven.budget() == 8
    assert uneven.tokens_per_pair(8) == pytest.approx(8 * 0.25 / 6)
