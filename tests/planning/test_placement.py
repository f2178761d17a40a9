"""Algorithm 3 against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conflux_ray.planning.interface import KVState
from conflux_ray.planning.placement import choose_rank, feasible_ranks
from tests.planning.build import request

REQUEST = request("r", 100, decode_blocks=10)


def test_worst_fit_takes_the_rank_with_the_least_context():
    kv = KVState(capacity=100, free=[60, 70, 80])
    assert choose_rank([0, 1, 2], kv, context=[300, 100, 200], eta=0.8) == 1


def test_best_fit_takes_the_fullest_rank_once_all_reached_the_threshold():
    kv = KVState(capacity=100, free=[15, 12, 20])
    assert choose_rank([0, 1, 2], kv, context=[300, 100, 200], eta=0.8) == 1
    assert choose_rank([0, 2], kv, context=[300, 100, 200], eta=0.8) == 0


def test_a_rank_below_the_threshold_wins_over_a_less_loaded_one_above():
    kv = KVState(capacity=100, free=[30, 12])
    assert choose_rank([0, 1], kv, context=[900, 1], eta=0.8) == 0


def test_equal_ranks_go_to_the_lowest_number():
    assert choose_rank([1, 2], KVState(100, [50, 50, 50]), [0, 7, 7], 0.8) == 1
    assert choose_rank([1, 2], KVState(100, [5, 5, 5]), [0, 7, 7], 0.8) == 1


def test_no_rank_is_infeasible():
    assert choose_rank([], KVState(100, [5, 5]), [0, 0], 0.8) is None


def test_headroom_protects_ranks_with_residents_only():
    kv = KVState(capacity=100, free=[12, 14, 12])
    assert feasible_ranks(REQUEST, kv, residents=[1, 1, 0], max_decodes=8, headroom=4) == [1, 2]


def test_a_rank_full_of_decodes_is_infeasible():
    assert feasible_ranks(REQUEST, KVState(100, [50, 50]), [8, 7], max_decodes=8, headroom=0) == [1]


def test_blocks_of_an_unstarted_prefill_count_as_taken():
    unstarted = request("r", 100, prefill_blocks=5, decode_blocks=10)
    assert feasible_ranks(unstarted, KVState(100, [14, 15]), [0, 0], max_decodes=8, headroom=0) == [1]


@given(
    ranks=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1000), st.integers(0, 4)), min_size=1, max_size=6),
    eta=st.floats(0, 1),
    headroom=st.integers(0, 8),
)
def test_placement_is_its_definition(ranks, eta, headroom):
    kv = KVState(capacity=50, free=[free for free, _, _ in ranks])
    context, residents = [c for _, c, _ in ranks], [n for _, _, n in ranks]
    chosen = choose_rank(feasible_ranks(REQUEST, kv, residents, 4, headroom), kv, context, eta)
    feasible = [
        r for r in range(len(ranks)) if kv.free[r] - 10 >= (headroom if residents[r] else 0) and residents[r] < 4
    ]
    if chosen is None:
        assert not feasible
        return
    assert chosen in feasible
    below = [r for r in feasible if kv.utilization(r) < eta]
    if below:
        assert context[chosen] == min(context[r] for r in below)
    else:
        assert kv.utilization(chosen) == max(kv.utilization(r) for r in feasible)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_the_extremes_of_eta_are_pure_policies(eta):
    kv = KVState(capacity=100, free=[80, 20])
    assert choose_rank([0, 1], kv, context=[5, 500], eta=eta) == (1 if eta == 0 else 0)
