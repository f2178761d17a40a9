"""The ablation without waterfill admits what Conflux admits."""

from __future__ import annotations

import pytest

from conflux_ray.planning.latency_model import Affine
from conflux_ray.planning.scheduler import Scheduler, SchedulerParams
from conflux_ray.simulator.systems.ablations import EvenDispatch
from tests.planning.build import MS, per_token_model, request, resident, roomy_kv


@pytest.mark.parametrize(("attention", "deadline", "rejected"), [(0.0, 0.3, 0), (0.01, 0.3, 1), (0.0, 0.24, 1)])
def test_attention_and_margin_count_without_waterfill_too(attention: float, deadline: float, rejected: int) -> None:
    # 200 tokens an iteration of 0.1 s: 380 end at 0.2 s, if their attention takes nothing.
    model = per_token_model(prefill=Affine(attention * MS))
    params = SchedulerParams(quantum=1, headroom=0, idle_tau=0.1)
    pending = [request("long", 380, deadline=deadline), request("short", 10, deadline=5.0)]
    for policy in (Scheduler(model, "slo", params), EvenDispatch(model, "slo", params)):
        decision = policy.schedule(pending, resident(0, 0), roomy_kv(), 0.0)
        assert (decision.rejected, decision.chunks[0].request_id) == (rejected, "short" if rejected else "long")
