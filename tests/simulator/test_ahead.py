"""When iterations are planned: schedules that can be added up, with the machine of `build.py` (10 ms, 1 ms a token)."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest

from conflux_ray.execution import loop
from conflux_ray.simulator.ahead import Ahead
from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.deployment import Deployment
from conflux_ray.simulator.request import Request, Slo
from conflux_ray.simulator.run import Setup, simulate
from conflux_ray.simulator.systems import chunked, conflux
from tests.simulator.build import PlainHardware, served, times, workload


def test_vllm_plans_the_next_iteration_as_soon_as_one_has_started():
    outcome = served("chunked", workload((0.0, 150, 3), (0.05, 30, 2)), budget=100)
    # At 0: A 100 -> 110, and behind it, without B: A 50 -> 170. At 110: A decodes, B 30: 10 + 31 -> 211.
    # At 170: both decode -> 223.
    assert times(outcome) == [[170.0, 211.0, 223.0], [211.0, 223.0]]


def test_the_simulated_engine_plans_as_the_engine_does():
    assert Ahead(loop.RUN_AHEAD, loop.LEAD_SECONDS, loop.LEAD_SHARE) == conflux.ENGINE


def test_without_late_planning_the_next_iteration_is_planned_as_soon_as_one_has_started():
    outcome = served("conflux", workload((0.0, 100, 3), (0.065, 99, 1)), gpus=2, lead=inf)
    # At 0: A 100 / 2 -> 60, its decode -> 71. At 60, before B: its decode -> 82. At 71: B, 50 on a rank -> 142.
    assert times(outcome) == [[60.0, 71.0, 82.0], [142.0]]


@pytest.mark.parametrize(
    ("lead", "share", "a", "b"),
    [
        # The iteration from 60 to 71 is A's first decode. Planned 4 ms before its end, at 67, the next one has B.
        (4e-3, 0.0, 131.0, 131.0),
        # 8 ms before its end B is not there yet.
        (8e-3, 0.0, 82.0, 142.0),
        # 60 % of 11 ms are more than 4 ms: at 64.4.
        (4e-3, 0.6, 82.0, 142.0),
        # As late as can be: when it has ended.
        (0.0, 0.0, 131.0, 131.0),
    ],
)
def test_late_planning_sees_what_has_arrived_until_then(lead: float, share: float, a: float, b: float):
    trace = workload((0.0, 100, 3), (0.065, 99, 1))
    outcome = served("conflux", trace, gpus=2, lead=lead, lead_share=share)
    assert times(outcome) == [[60.0, 71.0, a], [b]]


@pytest.mark.parametrize("system", ["chunked", "conflux"])
def test_running_ahead_hides_what_planning_takes(system: str):
    trace = workload((0.0, 50, 3))
    # 2 + 60, + 11, + 11.
    assert times(served(system, trace, planning=2e-3)) == [[62.0, 73.0, 84.0]]
    # 2 + 60, 2 + 11, 2 + 11.
    assert times(served(system, trace, planning=2e-3, run_ahead=1)) == [[62.0, 75.0, 88.0]]


@pytest.mark.parametrize("system", ["chunked", "conflux"])
def test_a_gap_lies_between_two_iterations(system: str):
    assert times(served(system, workload((0.0, 50, 3)), gap=2e-3)) == [[60.0, 73.0, 86.0]]


@pytest.mark.parametrize("system", ["chunked", "conflux"])
def test_an_overrun_lengthens_iterations_with_prefill(system: str):
    # 60 * 1.5, + 11, + 11.
    assert times(served(system, workload((0.0, 50, 3)), overrun=1.5)) == [[90.0, 101.0, 112.0]]


def test_the_planner_learns_an_overrun():
    trace = workload((0.0, 20, 200), *[(0.1 + 0.001 * k, 300, 1) for k in range(230)])
    outcome = served("conflux", trace, slo=Slo(600.0, 0.5), overrun=1.1)
    mixed = [gap for a, b in pairwise(outcome.requests[0].times) if (gap := b - a) > 0.2]
    # Planned for up to 0.5 s, the first ones take up to a tenth more; having learnt most of that, it plans less.
    assert 0.5 < max(mixed[:5]) <= 0.55
    assert 0.45 < max(mixed[120:140]) < 0.51


def test_four_iterations_ahead_an_arrival_waits_for_four():
    outcome = served("conflux", workload((0.0, 50, 9), (0.061, 20, 1)), run_ahead=4, lead=inf)
    # At 0: A 50 -> 60, decodes -> 71, 82, 93. At 60: -> 104. B arrives; at 71: A decodes, B 20: 10 + 21 -> 135.
    assert times(outcome)[1] == [135.0]


def test_blocks_of_an_ended_request_return_when_no_iteration_in_flight_may_touch_them():
    held = {}
    for ahead in (1, 2):
        clock = Clock()
        (instance,) = conflux.build(clock, Deployment(PlainHardware(), 1), run_ahead=ahead, lead=inf)
        instance.submit(Request(0, 0.0, 16, 6, Slo(9.0, 9.0)))
        clock.at(1e-3, lambda to=instance: to.submit(Request(1, 1e-3, 16, 2, Slo(9.0, 9.0))))
        seen: list[int] = []
        for time in (0.075, 0.08, 0.09):
            clock.at(time, lambda to=instance, seen=seen: seen.append(to.kv_in_use()))
        clock.run()
        assert instance.kv_in_use() == 0
        held[ahead] = seen
    # Two ahead: C 16 -> 26, decodes -> 37; at 26: with A 16 -> 64; at 37: both decode -> 76, A has ended; at 64: -> 87.
    # Each has 16 + 1 tokens or more, 2 blocks. A's return at 87.
    assert held[2] == [4, 4, 2]
    # One ahead: C -> 26; with A -> 53; both decode -> 65, A has ended.
    assert held[1] == [2, 2, 2]


def test_vllm_frees_blocks_at_once():
    clock = Clock()
    (instance,) = chunked.build(clock, Deployment(PlainHardware(), 1))
    instance.submit(Request(0, 0.0, 16, 6, Slo(9.0, 9.0)))
    clock.at(1e-3, lambda: instance.submit(Request(1, 1e-3, 16, 2, Slo(9.0, 9.0))))
    seen: list[int] = []
    for time in (0.075, 0.08):
        clock.at(time, lambda: seen.append(instance.kv_in_use()))
    clock.run()
    assert seen == [4, 2]  # A ends at 76, as above


def test_priority_orders_the_waiting_and_lets_a_begun_prefill_run_to_its_end():
    trace = workload((0.0, 250, 1), (0.001, 60, 1), (0.002, 30, 1))
    outcome = served("chunked-priority", trace, budget=100, run_ahead=1)
    # A 100 -> 110, A 100 -> 220, A 50 + C 30 + B 20 -> 330, B 40 -> 380. Shortest remainder first has C and B before A.
    assert times(outcome) == [[330.0], [380.0], [330.0]]


@pytest.mark.parametrize("name", ["lead", "planning", "gap", "lead_share"])
def test_negative_times_are_refused(name: str):
    with pytest.raises(ValueError, match=f"{name}=-1"):
        Ahead(**{name: -1})
    with pytest.raises(ValueError, match="run_ahead=0 must be at least 1"):
        Ahead(0)


def test_delays_on_the_way_in_and_out():
    setup = Setup("chunked", Deployment(PlainHardware(), 1), Slo(0.065, 0.011), ingress=4e-3, egress=1e-3)
    outcome = simulate(setup, workload((0.0, 50, 2)), warm_up=0.0)
    assert times(outcome) == [[65.0, 76.0]]  # 4 + 60 + 1, + 11
    assert outcome.summary.attainment == 1.0
    with pytest.raises(ValueError, match="ingress=-1"):
        Setup("chunked", setup.deployment, setup.slo, ingress=-1)
