"""The simulated half of `conflux bench replay`, and how the two halves are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from conflux_ray.bench import replay
from conflux_ray.bench.live.point import Point
from conflux_ray.bench.live.score import Lag, Record
from conflux_ray.bench.replay import Comparison, Latencies, format_table
from conflux_ray.config import ConfluxConfig, parse
from conflux_ray.models import store
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.trace import Trace, TraceRequest

pytestmark = pytest.mark.heavy  # the models are written with torch

DEPLOYMENTS = Path(__file__).resolve().parents[2] / "deployments"
TRACE = Trace("t", tuple(TraceRequest(2.0 * i, 100 + 10 * i, 5) for i in range(10)))


def config_of(**sections: dict[str, object]) -> ConfluxConfig:
    """deployments/two-instances.yaml with changes."""
    args = yaml.safe_load((DEPLOYMENTS / "two-instances.yaml").read_text())["applications"][0]["args"]
    args["model"]["path"] = str(store.model_dir("tiny-llama"))
    for section, values in sections.items():
        args[section] |= values
    return parse(args)


def test_the_deployment_is_simulated_with_its_own_planner_and_pool() -> None:
    config = config_of()
    tokens = replay.kv_tokens_of(config)
    summary = replay.simulated(config, TRACE, tokens)
    assert summary.finished == summary.counted == 9
    assert summary.rejected == 0
    longest = max(r.prompt_tokens for r in TRACE.requests)
    halves = config_of(scheduler={"max_prefill_tokens": longest // 2})
    assert replay.simulated(halves, TRACE, tokens).iterations > summary.iterations
    assert replay.simulated(config, TRACE, 64).rejected == 9
    early = replay.simulated(config_of(instance={"late_planning": False}), TRACE, tokens)
    assert early.finished == 9


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"scheduler": {"policy": "plain"}}, "scheduler.policy='plain' has no latency model"),
        ({"instance": {"num_replicas": 2}}, "instance.num_replicas=2: it must be 1"),
    ],
)
def test_what_cannot_be_simulated_is_refused(sections: dict[str, dict[str, object]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replay.check(config_of(**sections))


def point_of(*records: Record) -> Point:
    return Point(1.0, 3, records, 1, Slo(600, 600), Lag(0, 0, 0, 0))


def test_live_latencies_leave_the_warm_up_out() -> None:
    found = Latencies.of_point(
        point_of(
            Record(0, 0.0, 10, 2, (9.0, 19.0)),
            Record(1, 1.0, 10, 3, (1.5, 1.6, 1.8)),
            Record(2, 2.0, 10, 2, (3.5, 3.9)),
        )
    )
    assert found.ttft_p50 == pytest.approx(1.0)  # of 0.5 and 1.5
    assert found.ttft_p95 == pytest.approx(1.45)
    assert found.tbt_p50 == pytest.approx(0.2)  # of 0.1, 0.2, 0.4
    assert found.tbt_p95 == pytest.approx(0.38)


def test_a_failed_request_spoils_the_comparison() -> None:
    with pytest.raises(ValueError, match="request 1 of seed 3 failed: HTTP 503"):
        Latencies.of_point(point_of(Record(0, 0.0, 10, 1, (1.0,)), Record(1, 1.0, 10, 1, (), fault="HTTP 503")))


def test_the_error_is_of_the_median_repeat_and_its_spread_of_all() -> None:
    live = tuple(Latencies(ttft, 1.0, 0.1, 0.2) for ttft in (0.4, 0.5, 1.0))
    comparison = Comparison(0.3, 0, live, Latencies(0.6, 1.0, 0.1, 0.1), (1.0, 1.0, 1.0))
    assert comparison.error("ttft_p50") == pytest.approx((0.2, -0.4, 0.5))
    assert comparison.error("tbt_p95") == pytest.approx((-0.5, -0.5, -0.5))
    rows = format_table([comparison]).splitlines()
    assert rows[2] == "| 0.3 | 0 | TTFT P50 | 500 [400, 1000] | 600 | +20% [-40%, +50%] |"
    assert rows[-1] == "| 0.3 | 0 | TBT P95 | 200 [200, 200] | 100 | -50% [-50%, -50%] |"


def test_the_served_configuration_has_the_promises_and_the_profile_of_the_command_line() -> None:
    words = ["--trace", "t.jsonl", "--deployment", str(DEPLOYMENTS / "conflux.yaml"), "--ttft", "7", "--profile", "p"]
    values = replay.deployment_of(replay._parse(words))["applications"][0]["args"]
    assert values["slo"] == {"ttft_s": 7.0, "tbt_s": 1.0}
    assert parse(values).scheduler.profile == "p"
