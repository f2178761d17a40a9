"""What `conflux bench routing` prints, and how its live half makes servers and figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from conflux_ray.bench import routing
from conflux_ray.bench.live import routing as live
from conflux_ray.bench.live.point import Point
from conflux_ray.bench.live.score import Lag, Record
from conflux_ray.bench.routing import Run, format_table
from conflux_ray.config import parse
from conflux_ray.simulator.request import Slo

DEPLOYMENT = Path(__file__).resolve().parents[2] / "deployments" / "two-instances.yaml"


def test_every_router_is_simulated_with_equal_and_with_unequal_instances(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "routing.json"
    words = ["--workload", "qwen-a", "--seconds", "10", "--requests", "20", "--load", "1", "--seed", "0", "1"]
    assert routing.main([*words, "--jobs", "1", "--json", str(out)]) == 0
    rows = capsys.readouterr().out.splitlines()[-6:]
    assert [row.split("|")[1].strip() for row in rows] == ["1 : 1"] * 3 + ["1 : 3"] * 3
    assert [row.split("|")[3].strip() for row in rows] == ["`queued_work`", "`shortest_queue`", "`round_robin`"] * 2
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 12
    assert all(sum(run["work"]) == pytest.approx(1) for run in runs)


def test_a_row_has_the_means_over_its_seeds() -> None:
    runs = [
        Run((1.0, 3.0), 8.0, "queued_work", seed, 0.2, p95, attained, (0.25, 0.75))
        for seed, p95, attained in ((0, 1.0, 0.9), (1, 2.0, 1.0))
    ]
    row = format_table(runs).splitlines()[-1]
    assert row == "| 1 : 3 | 8 | `queued_work` | 0.20 | 1.50 [1.00, 2.00] | 95.0% | 25% : 75% |"


def test_a_live_server_is_the_deployment_with_another_router() -> None:
    config = live.deployment_of(DEPLOYMENT, 18600, "round_robin")
    args = parse(config["applications"][0]["args"])
    assert args.ingress.routing == "round_robin"
    assert args.model.name == live.MODEL
    original = yaml.safe_load(DEPLOYMENT.read_text())["applications"][0]["args"]
    assert args.instance == parse(original).instance


def point_of(*ttfts: float | None) -> Point:
    """Requests of two tokens 0.1 s apart, ten seconds after each other; None never got an answer."""
    records = tuple(
        Record(i, 10.0 * i, 100, 2, (), fault="HTTP 503")
        if ttft is None
        else Record(i, 10.0 * i, 100, 2, (10.0 * i + ttft, 10.0 * i + ttft + 0.1))
        for i, ttft in enumerate(ttfts)
    )
    return Point(2.0, 7, records, 1, Slo(120, 120), Lag(0, 0, 0, 0))


def test_live_figures_leave_the_warm_up_out_and_count_what_failed_as_a_miss() -> None:
    run = live.run_of(point_of(9.0, 0.5, 1.5, None, 0.7), "queued_work", (1.0, 3.0), Slo(1.0, 0.2), [10, 30])
    assert (run.rate, run.seed, run.router) == (2.0, 7, "queued_work")
    assert run.ttft_p50 == pytest.approx(0.7)
    assert run.attainment == 0.5
    assert run.work == (0.25, 0.75)


def test_live_figures_of_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="no counted request was answered"):
        live.run_of(point_of(1.0, None), "queued_work", (1.0, 1.0), Slo(1.0, 0.2), [0, 0])
