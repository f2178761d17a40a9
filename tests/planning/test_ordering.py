"""The order of every policy."""

from __future__ import annotations

import random

import pytest

from conflux_ray.planning.ordering import ORDERS, Queue
from tests.planning.build import request


def names(policy, pending, budget=100, now=0.0, tau=0.1):
    queue = Queue(pending)
    return [pending[i].request_id for i in ORDERS[policy](queue, budget, now, tau).indices]


def test_slo_takes_the_admitted_by_deadline_then_the_rejected_shortest_first():
    pending = [
        request("long", 5000, deadline=1.0),
        request("longer", 9000, deadline=0.9),
        request("late", 400, deadline=2.0),
        request("soon", 500, deadline=0.5),
    ]
    order = ORDERS["slo"](Queue(pending), 100, 0.0, 0.1)
    assert order.rejected == 2
    assert [pending[i].request_id for i in order.indices] == ["soon", "late", "long", "longer"]


def test_admission_counts_the_attention_of_long_prompts():
    # 1000 tokens are 1000 * 1001 / 2 = 500 500 pairs, so 500 more at 0.001 a pair; 100 behind 9900 computed ones are
    # 995 050 pairs. By length alone all three would fit in the 1600 tokens before the last deadline.
    pending = [
        request("short", 100, deadline=1.0),
        request("whole", 1000, deadline=1.55),
        request("rest", 10_000, computed_tokens=9_900, deadline=1.6),
    ]
    assert Queue(pending, 0.001).cost == [105, 1500, 1095]
    assert Queue(pending).cost == [100, 1000, 100]
    order = ORDERS["slo"](Queue(pending, 0.001), 100, 0.0, 0.1)
    assert ([pending[i].request_id for i in order.indices], order.rejected) == (["short", "rest", "whole"], 1)
    assert names("slo", pending) == ["short", "whole", "rest"]


def test_fcfs_goes_by_arrival_and_srpt_by_what_remains():
    pending = [
        request("b", 10, arrival=2.0),
        request("a", 90, arrival=1.0),
        request("c", 100, arrival=3.0, computed_tokens=95),
    ]
    assert names("fcfs", pending) == ["a", "b", "c"]
    assert names("srpt", pending) == ["c", "b", "a"]


def test_priority_comes_before_every_other_key():
    pending = [
        request("x", 10, deadline=1.0, arrival=0.0, priority=1),
        request("y", 99, deadline=9.0, arrival=5.0, priority=0),
    ]
    for policy in ORDERS:
        assert names(policy, pending) == ["y", "x"]


def test_equal_keys_give_the_same_order_whatever_the_queue_looks_like():
    rng = random.Random(0)
    pending = [request(f"r{i}", rng.choice((50, 700)), deadline=rng.choice((0.3, 0.6))) for i in range(40)]
    for policy in ORDERS:
        expected = names(policy, pending)
        for _ in range(5):
            rng.shuffle(pending)
            assert names(policy, pending) == expected


@pytest.mark.parametrize("deadlines", [(1.0, 2.0, 3.0), (1.0, 2.0, 2.0), (3.0, 2.0, 1.0), (2.0, 2.0, 1.0)])
def test_a_queue_that_is_listed_in_order_is_sorted_like_any_other(deadlines):
    queue = Queue([request(name, 10, deadline=d) for name, d in zip("cba", deadlines, strict=True)])
    assert list(queue.sort(queue.deadline)) == sorted(range(3), key=lambda i: (deadlines[i], "cba"[i]))


def test_the_longest_overdue_request_is_the_one_whose_deadline_passed_first():
    queue = Queue([request("a", 5, deadline=50.0), request("c", 5, deadline=40.0), request("b", 5, deadline=40.0)])
    assert queue.longest_overdue(now=60.0, after=30.0) is None
    assert queue.longest_overdue(now=71.0, after=30.0) == 2


def test_a_request_without_deadline_is_overdue_by_its_arrival():
    queue = Queue([request("never", 5, deadline=float("inf"), arrival=3.0), request("soon", 5, deadline=20.0)])
    assert queue.longest_overdue(now=34.0, after=30.0) == 0
