"""The global router: the lowest normalized queued workload, and what it is compared with."""

from __future__ import annotations

import numpy as np
import pytest

from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.deployment import Deployment, Instance
from conflux_ray.simulator.request import Request, Slo
from conflux_ray.simulator.router import ROUTERS, QueuedWork, RoundRobin, Router, ShortestQueue
from conflux_ray.simulator.run import Outcome, Setup, simulate
from conflux_ray.simulator.systems import chunked
from conflux_ray.simulator.trace import TABLE_3, Quantiles, synthesize
from tests.simulator.build import PlainHardware, served, workload


def slow_and_fast() -> list[Instance]:
    """1000 and 4000 prompt tokens a second, but for the 10 ms of an iteration."""
    clock = Clock()
    return [chunked.build(clock, Deployment(PlainHardware(), gpus))[0] for gpus in (1, 4)]


def test_work_is_measured_in_seconds_of_the_instance():
    slow, fast = slow_and_fast()
    slow.submit(Request(0, 0.0, 3000, 1, Slo()))
    fast.submit(Request(1, 0.0, 6000, 1, Slo()))
    # 3 s of work against 1.5 s: the longer queue is the emptier one.
    assert slow.queued_tokens() < fast.queued_tokens()
    assert QueuedWork([slow, fast]).choose(Request(2, 0.0, 10, 1, Slo())) == 1


def test_the_work_of_the_request_itself_counts():
    slow, fast = slow_and_fast()
    router = QueuedWork([slow, fast])
    fast.submit(Request(0, 0.0, 2000, 1, Slo()))
    # 0.5 s wait at the fast one. 100 tokens end after 0.1 s at the slow one; 2000 after 2 s there, 1 s here.
    assert router.choose(Request(1, 0.0, 100, 1, Slo())) == 0
    assert router.choose(Request(2, 0.0, 2000, 1, Slo())) == 1


def test_the_shortest_queue_is_that_of_fewest_requests_and_forgets_those_that_ended():
    clock = Clock()
    instances = [chunked.build(clock, Deployment(PlainHardware(), 1))[0] for _ in range(2)]
    router = ShortestQueue(instances)
    for index, prompt in enumerate((9000, 10, 10)):
        router.submit(Request(index, 0.0, prompt, 1, Slo()))
    assert router.routed == [2, 1]
    clock.run()
    router.submit(Request(3, clock.now, 10, 1, Slo()))
    assert router.routed == [2, 2]


def test_round_robin_takes_turns_whatever_the_work():
    router = RoundRobin(slow_and_fast())
    for index, prompt in enumerate((5000, 10, 5000, 10, 5000)):
        router.submit(Request(index, 0.0, prompt, 1, Slo()))
    assert router.routed == [3, 2]


def outcome_of(router: str, speeds: tuple[float, ...], rate: float) -> Outcome:
    """Lengths with the quantiles of toolagent, on two plain instances of 6000 tokens/s at speed 1."""
    trace = synthesize("toolagent", *TABLE_3["toolagent"], 400, rate, np.random.default_rng(5))
    hardware = PlainHardware(per_token=1 / 3000, blocks=100_000)
    setup = Setup("conflux", Deployment(hardware, 2), Slo(8.0, 0.5), {}, 2, router, speeds)
    return simulate(setup, trace)


@pytest.mark.parametrize(("speeds", "rate"), [((1.0, 1.0), 1.0), ((1.0, 3.0), 2.0)])
def test_queued_work_has_the_least_p95_ttft_and_keeps_most_promises(speeds: tuple[float, ...], rate: float):
    outcomes = {router: outcome_of(router, speeds, rate).summary for router in ROUTERS}
    ours = outcomes.pop("queued_work")
    assert all(ours.ttft["p95"] < other.ttft["p95"] for other in outcomes.values())
    assert all(ours.attainment >= other.attainment for other in outcomes.values())


def test_under_load_an_instance_three_times_as_fast_gets_three_times_the_work():
    def ratio(router: str) -> float:
        slow, fast = outcome_of(router, (1.0, 3.0), rate=3.5).routed_tokens
        return fast / slow

    assert 2.7 <= ratio("queued_work") <= 3.3
    assert ratio("shortest_queue") < 2
    assert outcome_of("round_robin", (1.0, 3.0), rate=3.5).routed == (200, 200)


def test_a_speed_shortens_every_iteration_and_nothing_else():
    def first_tokens(speed: float) -> list[float]:
        setup = Setup("chunked", Deployment(PlainHardware(), 1), Slo(), {"budget": 100}, 1, "queued_work", (speed,))
        outcome = simulate(setup, workload((0.0, 250, 3), (0.0, 40, 2)), warm_up=0.0)
        return [t for request in outcome.requests for t in request.times]

    assert [3 * t for t in first_tokens(3.0)] == pytest.approx(first_tokens(1.0))


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"router": "random"}, "router='random' is unknown; choose one of queued_work, shortest_queue, round_robin"),
        ({"speeds": (1.0,)}, "must be a positive number for each of the 2 instances"),
        ({"speeds": (1.0, 0.0)}, "must be a positive number"),
    ],
)
def test_wrong_routers_and_speeds_are_refused(values: dict[str, object], says: str):
    with pytest.raises(ValueError, match=says):
        Setup("chunked", Deployment(PlainHardware(), 1), Slo(), {}, 2, **values)


@pytest.mark.parametrize("system", ["conflux", "chunked", "muxwise"])
def test_equal_instances_get_equal_shares(system: str):
    trace = synthesize("even", Quantiles(80, 300), Quantiles(30, 120), 400, 20.0, np.random.default_rng(2))
    outcome = served(system, trace, gpus=1, instances=4)
    assert sum(outcome.routed) == 400
    assert max(outcome.routed) - min(outcome.routed) < 40


def test_four_instances_serve_four_times_the_load_about_as_well():
    def wait(instances: int) -> float:
        trace = synthesize("x", Quantiles(80, 300), Quantiles(3, 6), 400, 4.0 * instances, np.random.default_rng(3))
        return served("chunked", trace, instances=instances).summary.ttft["p95"]

    assert wait(4) < 1.1 * wait(1)


@pytest.mark.parametrize("router", ROUTERS.values())
def test_a_router_needs_instances(router: type[Router]):
    with pytest.raises(ValueError, match="at least one instance"):
        router([])
