"""Contenders in simulated time, before anything is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conflux_ray.bench import compare
from conflux_ray.bench.live import plots
from conflux_ray.bench.live.contenders import standard
from conflux_ray.bench.live.forecast import Forecast, forecast, forecast_table, overrun_of
from conflux_ray.bench.live.point import Load
from conflux_ray.bench.live.predict import hardware_of, predict
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.workload import Workload
from tests.bench.test_live_run import made, trace_file

H200 = [{"name": "NVIDIA H200"}] * 2


def test_attainment_is_pooled_by_requests_and_crosses_the_goal_between_two_rates() -> None:
    one = Forecast("a", {1.0: [(1.0, 100), (0.97, 200)], 2.0: [(0.9, 100), (0.93, 200)], 3.0: [(0.2, 100)]})
    assert one.pooled(1.0) == pytest.approx(0.98)
    assert one.pooled(2.0) == pytest.approx(0.92)
    assert one.crossing(0.95) == pytest.approx(1.5)
    assert one.crossing(0.99) is None
    table = forecast_table([one, Forecast("b", {}, "no KV memory is left")], 0.95)
    assert "98.0 [97.0, 100.0]" in table
    assert "| 1.50 |" in " ".join(table.split())
    assert "no KV memory is left" in table


@pytest.mark.parametrize(
    ("words", "factor"), [([], 1.0), (["1.2"], 1.2), (["1.2", "vllm-*=1.1"], 1.1), (["conflux-*=1.3"], 1.0)]
)
def test_an_overrun_is_for_all_or_for_those_it_names(words: list[str], factor: float) -> None:
    assert overrun_of("vllm-tp2-2048", words) == factor


@pytest.mark.parametrize("word", ["fast", "vllm-*=", "vllm-*=0"])
def test_an_overrun_that_is_none_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match="--overrun"):
        overrun_of("vllm-tp2-2048", [word])


def test_a_forecast_is_the_prediction_of_each_point(tmp_path: Path) -> None:
    hardware = hardware_of("qwen3-14b-shape", H200)
    assert hardware is not None
    load = Load(Workload.from_table("toolagent", 32768), Slo(2.0, 0.1), 20.0, "poisson")
    contenders = [c for c in standard(2, "cuda", [2048], 8192) if c.name in ("conflux-slo", "vllm-tp2-2048")]
    found = forecast(contenders, hardware, 2, load, [1.0, 3.0], [4, 5], ["vllm-*=1.5"])
    assert [one.name for one in found] == ["conflux-slo", "vllm-tp2-2048"]
    for contender, one, overrun in zip(contenders, found, (1.0, 1.5), strict=True):
        for rate in (1.0, 3.0):
            said = [predict(contender, hardware, 2, load, rate, seed, overrun=overrun) for seed in (4, 5)]
            assert one.attained[rate] == [(each["attainment"], each["counted"]) for each in said]


def test_the_picture_has_a_line_and_the_measured_points_of_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    found = [
        Forecast("a", {1.0: [(1.0, 100), (0.9, 100)], 2.0: [(0.8, 100), (0.6, 100)]}),
        Forecast("b", {}, "no KV memory is left"),
    ]
    points = {"a": [made(1.0, 0, "+++-"), made(2.0, 0, "+--+", invalid="its client lagged")], "c": [made(1.0, 0, "+")]}
    plots.forecasts(found, points, tmp_path / "forecast.png", 0.95)
    (axis,) = drawn[0].axes
    lines = [line for line in axis.lines if line.get_label() == "a"]
    assert [list(line.get_ydata()) for line in lines] == [[95.0, 70.0]]
    markers = [line for line in axis.lines if line.get_marker() == "o"]
    assert [(list(m.get_xdata()), list(m.get_ydata())) for m in markers] == [([1.0], [75.0]), ([2.0], [50.0])]
    assert [m.get_markerfacecolor() == "white" for m in markers] == [False, True]


def test_the_command_needs_neither_gpu_nor_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        *("--forecast", "H200", "--gpus", "2", "--model", "qwen3-14b-shape", "--load-format", "dummy"),
        *("--max-model-len", "32768", "--vocab-size", "1000", "--trace", str(trace_file(tmp_path))),
        *("--seconds", "10", "--rates", "2", "1", "--repeats", "2", "--budgets", "2048", "--jobs", "1"),
        *("--only", "conflux-slo", "vllm-tp2-2048", "--out", str(tmp_path / "out")),
    ]
    assert compare.main(words) == 0
    printed = capsys.readouterr().out
    assert "conflux-slo" in printed
    assert "vllm-tp2-2048" in printed
    report = json.loads((tmp_path / "out" / "forecast.json").read_text())
    assert report["seeds"] == [0, 1]
    assert [one["contender"] for one in report["contenders"]] == ["conflux-slo", "vllm-tp2-2048"]
    assert [rate["rate"] for rate in report["contenders"][0]["rates"]] == [1.0, 2.0]
    assert "measured profile" in report["contenders"][0]["iteration_times"]
    assert (tmp_path / "out" / "forecast.png").stat().st_size > 10_000
    assert compare.main([*words, "--forecast", "A100"]) == 2
    assert "knows no 'qwen3-14b-shape' on 'A100'" in capsys.readouterr().err
