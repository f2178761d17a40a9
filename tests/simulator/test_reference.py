"""The order of the systems on the toolagent surrogate, as an independent model of a hundred lines found it.

That model, with measured kernel times of two H200 and the Qwen3-14B shape, puts the knees at 2.4 req/s for tensor
parallelism with FCFS, 2.5 with SRPT, and at 2.6, 3.0 and 3.75 for Conflux with fcfs, srpt and slo.
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest

from conflux_ray.simulator.deployment import Deployment
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.run import Setup, simulate
from conflux_ray.simulator.workload import Workload
from tests.simulator.build import h200

TRACE = Path(__file__).parents[3] / "shared" / "data" / "traces" / "toolagent_surrogate.jsonl"
SEEDS = range(3)


@pytest.fixture(scope="module")
def surrogate() -> Workload:
    if not TRACE.exists():
        pytest.skip("needs the shared traces beside the repository")
    return Workload.from_file(TRACE, h200().shape.max_model_len)


def attainment(workload: Workload, system: str, rate: float, **options: object) -> float:
    setup = Setup(system, Deployment(h200(), 2), Slo(2.0, 0.1), dict(options))
    return mean(simulate(setup, workload.draw(rate, 200, seed)).summary.attainment for seed in SEEDS)


def test_order_of_the_systems_at_degree_2(surrogate: Workload):
    at_three = {
        "chunked": attainment(surrogate, "chunked", 3.0, budget=2048),
        "conflux-fcfs": attainment(surrogate, "conflux-fcfs", 3.0),
        "conflux-srpt": attainment(surrogate, "conflux-srpt", 3.0),
        "conflux": attainment(surrogate, "conflux", 3.0),
    }
    assert list(at_three) == sorted(at_three, key=lambda name: at_three[name])


def test_knees_lie_where_the_other_model_has_them(surrogate: Workload):
    # A fifth below its knee a system keeps 95 %, a third above it does not.
    for system, knee, options in (("conflux", 3.75, {}), ("chunked++", 2.5, {"budget": 2048})):
        assert attainment(surrogate, system, 0.8 * knee, **options) >= 0.95, system
        assert attainment(surrogate, system, 4 / 3 * knee, **options) < 0.95, system
