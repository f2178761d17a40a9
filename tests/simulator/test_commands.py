"""The command lines: what they print and write, and how they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conflux_ray.simulator.commands import figures, goodput, plan, simulate

SMALL = ["--workload", "qwen-a", "--seconds", "20", "--jobs", "1"]


def test_simulate_prints_a_line_for_each_run_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "out.json"
    words = ["--system", "conflux", "chunked", "--rate", "1", "2", "--gpus", "2", "--json", str(out), *SMALL]
    assert simulate.main(words) == 0
    printed = capsys.readouterr().out
    assert "Qwen3-14B on 1 x 2 H200" in printed
    results = json.loads(out.read_text())["results"]
    assert [(r["system"], r["asked_rate"]) for r in results] == [
        ("conflux", 1.0),
        ("conflux", 2.0),
        ("chunked", 1.0),
        ("chunked", 2.0),
    ]
    assert all(r["finished"] == r["counted"] for r in results)


def test_simulate_reads_a_trace_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    trace = tmp_path / "t.jsonl"
    rows = ({"timestamp": 700 * i, "input_length": 900 + i, "output_length": 5} for i in range(40))
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert simulate.main(["--trace", str(trace), "--seconds", "10", "--jobs", "1", "--rate", "2"]) == 0
    printed = capsys.readouterr().out
    assert "timestamps taken for milliseconds" in printed
    assert "20 of 40 requests at random" in printed


def test_simulate_describes_the_hardware(capsys: pytest.CaptureFixture[str]):
    assert simulate.main(["--describe-hardware", "--device", "h100"]) == 0
    assert "data sheet" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--option", "budget"], "must be NAME=VALUE"),
        (["--option", "colour=blue"], "options ['colour'] are unknown; there are: base_tp, without, tbt"),
        (["--gpus", "3"], "which SP 3 x TP 1 does not divide"),
        (["--trace", "/nowhere.jsonl"], "cannot read the trace"),
        (["--instances", "0"], "instances=0 must be at least 1"),
        (["--prefix-cache", "1.5"], "prefix_cache=1.5 must be in [0, 1)"),
    ],
)
def test_simulate_refuses_with_a_reason(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        simulate.main([*words, "--jobs", "1", "--seconds", "5"])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_goodput_prints_the_best_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "g.json"
    words = ["--system", "chunked", "--option", "budget=1024", "--gpus", "1"]
    words += ["--seeds", "2", "--tolerance", "0.2", "--requests", "0"]
    assert goodput.main([*words, "--json", str(out), *SMALL]) == 0
    assert "budget=1024" in capsys.readouterr().out
    (result,) = json.loads(out.read_text())["results"]
    assert result["mean"] == pytest.approx(sum(result["per_seed"]) / 2)
    assert result["options"] == {"budget": 1024}


def test_plan_names_a_layout_and_its_headroom(capsys: pytest.CaptureFixture[str]):
    words = [
        "--budget",
        "7",
        "--gpu-price",
        "6",
        "--rate",
        "1",
        "--seeds",
        "1",
        "--tolerance",
        "0.5",
        "--requests",
        "0",
    ]
    assert plan.main([*words, "--system", "conflux", *SMALL]) == 0
    printed = capsys.readouterr().out
    assert "Qwen3-14B, 1 H200" in printed
    assert "Best: ConfluxServe, base TP" in printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--budget", "10"], "--budget needs --gpu-price"),
        (["--budget", "1", "--gpu-price", "3"], "pays for 0 GPUs"),
        (["--gpus", "2"], "--rate is needed"),
    ],
)
def test_plan_refuses_with_a_reason(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        plan.main([*words, *SMALL])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_figures_write_page_images_and_tables(tmp_path: Path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    words = ["--out", str(tmp_path), "--traces", str(tmp_path), "--only", "--jobs", "1"]
    assert figures.main(words) == 0
    page = (tmp_path / "reproduction.md").read_text()
    assert "| Fig. 15a | even dispatch over waterfill: shared-linear latency | 1.32 |" in page
    assert "not run" in page  # no goodput was asked for
    assert "Made by `conflux figures --only`" in page  # no folder of this machine
    for image in ("scaling.png", "components.png"):
        assert (tmp_path / "img" / "reproduction" / image).stat().st_size > 10_000
    assert (tmp_path / "data" / "reproduction" / "fig13.csv").read_text().startswith("prompt,variant,ms,normalised")
