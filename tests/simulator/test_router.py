"""The global router: the lowest normalized queued workload."""

from __future__ import annotations

import numpy as np
import pytest

from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.deployment import Deployment
from conflux_ray.simulator.request import Request, Slo
from conflux_ray.simulator.router import Router
from conflux_ray.simulator.systems import chunked
from conflux_ray.simulator.trace import Quantiles, synthesize
from tests.simulator.build import PlainHardware, served


def test_work_is_measured_in_seconds_of_the_instance():
    clock = Clock()
    slow = chunked.build(clock, Deployment(PlainHardware(), 1))[0]
    fast = chunked.build(clock, Deployment(PlainHardware(), 4))[0]
    router = Router([slow, fast])
    slow.submit(Request(0, 0.0, 3000, 1, Slo()))
    fast.submit(Request(1, 0.0, 6000, 1, Slo()))
    # 3 s of work against 1.5 s: the longer queue is the emptier one.
    assert slow.queued_tokens() < fast.queued_tokens()
    assert router.choose() == 1


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


def test_a_router_needs_instances():
    with pytest.raises(ValueError, match="at least one instance"):
        Router([])
