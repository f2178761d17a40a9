"""Algorithm 4 against the optimum by exhaustion."""

from __future__ import annotations

from itertools import combinations
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from conflux_ray.planning.admission import capacity_before, moore_hodgson

job = st.tuples(st.integers(1, 20), st.integers(0, 60))  # tokens, capacity before the deadline


def admit(jobs, priority=None):
    """`moore_hodgson` on (tokens, capacity) pairs that are in order."""
    return moore_hodgson([tokens for tokens, _ in jobs], [capacity for _, capacity in jobs], priority)


def on_time(jobs) -> bool:
    total = 0
    for tokens, capacity in jobs:
        total += tokens
        if total > capacity:
            return False
    return True


def most_on_time(jobs) -> int:
    return max(k for k in range(len(jobs) + 1) if any(on_time(chosen) for chosen in combinations(jobs, k)))


def plain_moore_hodgson(jobs) -> list[bool]:
    """Algorithm 4 to the letter; of equally large jobs the last is popped."""
    total, heap, rejected = 0, [], set()
    for i, (tokens, capacity) in enumerate(jobs):
        total += tokens
        heap.append(i)
        if total > capacity:
            largest = max(heap, key=lambda j: (jobs[j][0], j))
            heap.remove(largest)
            total -= jobs[largest][0]
            rejected.add(largest)
    return [i not in rejected for i in range(len(jobs))]


def test_the_longest_job_gives_way():
    assert admit([(5, 10), (6, 12), (3, 13)]) == [True, False, True]


def test_everything_is_admitted_when_everything_fits():
    assert admit([(5, 5), (6, 11), (3, 14)]) == [True, True, True]


def test_nothing_is_admitted_without_capacity():
    assert admit([(1, 0), (1, 0)]) == [False, False]


def test_of_equal_jobs_the_later_one_gives_way():
    assert admit([(4, 8), (4, 8), (4, 8)]) == [True, True, False]


def test_an_empty_queue_admits_nobody():
    assert admit([]) == []


@given(st.lists(job, max_size=9))
def test_admitted_jobs_are_on_time_and_as_many_as_can_be(jobs):
    jobs.sort(key=lambda j: j[1])
    admitted = admit(jobs)
    assert on_time([j for j, kept in zip(jobs, admitted, strict=True) if kept])
    assert sum(admitted) == most_on_time(jobs)


@given(st.lists(job, max_size=60))
def test_the_result_is_that_of_the_algorithm_to_the_letter(jobs):
    jobs.sort(key=lambda j: j[1])
    assert admit(jobs) == plain_moore_hodgson(jobs)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 20)), max_size=120), st.integers(0, 30))
def test_it_is_under_overload_too_with_many_equal_sizes_and_deadlines(jobs, budget):
    jobs = sorted(((tokens, iteration * budget) for tokens, iteration in jobs), key=lambda j: j[1])
    assert admit(jobs) == plain_moore_hodgson(jobs)


@given(st.lists(job, max_size=5), st.lists(job, max_size=5))
def test_a_less_urgent_class_takes_only_what_is_left(urgent, other):
    urgent.sort(key=lambda j: j[1])
    other.sort(key=lambda j: j[1])
    admitted = admit(urgent + other, [0] * len(urgent) + [1] * len(other))
    assert admitted[: len(urgent)] == admit(urgent)
    promised = sum(tokens for (tokens, _), kept in zip(urgent, admitted, strict=False) if kept)
    assert sum(admitted[len(urgent) :]) == most_on_time([(t, c - promised) for t, c in other])


def test_capacity_counts_whole_iterations_before_the_deadline():
    deadlines = [9.0, 10.0, 10.25, 10.35, inf]
    assert capacity_before(deadlines, 100, now=10.0, tau=0.1) == [0, 0, 200, 300, inf]


@given(
    deadlines=st.lists(st.floats(-50, 500) | st.just(inf), max_size=30),
    budget=st.integers(0, 9000),
    now=st.floats(-50, 50),
    tau=st.floats(1e-3, 1.0),
)
def test_capacity_is_its_definition_past_deadlines_and_none_included(deadlines, budget, now, tau):
    for d, capacity in zip(deadlines, capacity_before(deadlines, budget, now, tau), strict=True):
        assert capacity == (inf if d == inf else max(0, int((d - now) / tau)) * budget)


def test_without_budget_only_requests_without_deadline_have_capacity():
    assert capacity_before([99.0, inf], 0, now=0.0, tau=0.1) == [0, inf]
