"""A limit with a known answer, from outside the simulator: the M/D/1 queue."""

from __future__ import annotations

import numpy as np
import pytest

from conflux_ray.simulator.trace import Trace, TraceRequest
from tests.simulator.build import served


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_one_prompt_at_a_time_waits_as_in_an_md1_queue(load: float):
    service = 0.110  # 10 ms + 100 tokens
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.exponential(service / load, 30_000))
    trace = Trace("md1", tuple(TraceRequest(float(a), 100, 1) for a in arrivals))
    outcome = served("distserve", trace, gpus=2, split="1x1:1x1", batch=1)
    waits = [r.times[0] - r.arrival - service for r in outcome.requests]
    expected = load * service / (2 * (1 - load))  # Pollaczek-Khinchine at zero variance
    assert np.mean(waits) == pytest.approx(expected, rel=0.06)
