"""The plain policy."""

from __future__ import annotations

from conflux_ray.planning.interface import KVState
from conflux_ray.planning.plain import PlainPolicy, even_split
from tests.planning.build import request, resident, roomy_kv


def test_split_is_even():
    assert even_split(7, 3) == [3, 2, 2]


def test_requests_run_in_order_of_arrival_within_the_budget():
    decision = PlainPolicy(budget=100, max_decodes=8).schedule(
        [request("b", 80, arrival=1.0), request("a", 60, arrival=0.0)], resident(0, 0), roomy_kv(), 0.0
    )
    assert [(c.request_id, c.length) for c in decision.chunks] == [("a", 60), ("b", 40)]


def test_a_chunk_that_starts_and_completes_needs_room_for_both_residencies():
    tight = request("r", 60, prefill_blocks=2, decode_blocks=4)
    policy = PlainPolicy(budget=100, max_decodes=8)
    assert policy.schedule([tight], resident(0, 0), KVState(10, [5, 5]), 0.0).chunks == ()
    assert policy.schedule([tight], resident(0, 0), KVState(10, [5, 6]), 0.0).placements == {"r": 1}
