"""`conflux profile` on a tiny model: measured, fitted, loaded, evaluated."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from conflux_ray.planning.profile import Profile
from conflux_ray.profiling import command
from conflux_ray.profiling.measure import run_rounds
from conflux_ray.profiling.samples import SampleFile

pytestmark = pytest.mark.heavy

SETTINGS = [
    "--model=tiny-llama", "--sp-degree=2", "--dtype=float32", "--block-size=8",
    "--max-tokens=32", "--max-batch=64", "--max-context=128", "--iterations=28", "--repeats=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile, whose measuring was interrupted on the way and taken up again."""
    out = tmp_path_factory.mktemp("profile") / "tiny.json"

    def interrupted(cases, measure, samples: SampleFile, *args) -> None:
        run_rounds(cases[:10], measure, samples, *args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("conflux_ray.profiling.measure.run_rounds", interrupted)
        assert command.main([*SETTINGS, f"--out={out}"]) == 130
    before = out.with_name("tiny.samples.jsonl").read_text()
    assert before.count("\n") == 1 + 10
    assert command.main([*SETTINGS, f"--out={out}"]) == 0
    assert out.with_name("tiny.samples.jsonl").read_text().startswith(before)
    return out


def test_the_profile_loads_and_says_how_it_was_made(made: Path) -> None:
    profile = Profile.load(made)
    latency = profile.latency
    assert profile.measured
    assert (latency.num_ranks, latency.num_layers) == (2, profile.latency.num_layers)
    assert latency.gemm(1) > 0
    assert latency.decode.slope > 0
    assert latency.contention
    assert set(profile.rows) == {"gemm", "decode", "prefill", "comm", "transfer", "host", "iteration"}
    assert {"gemm", "iteration"} <= set(profile.held_out)
    assert profile.conditions["max_batch"] == 64
    assert profile.conditions["dtype"] == "float32"
    assert str(made.parent) not in made.read_text()


def test_measured_settings_are_not_mixed_with_others(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([*SETTINGS, "--seed=5", f"--out={made}"]) == 1
    assert "seed=0, now 5" in capsys.readouterr().err


def test_samples_are_fitted_again_without_a_measurement(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "workers", None)
    out, samples = made.with_name("again.json"), made.with_name("tiny.samples.jsonl")
    assert command.main([f"--samples={samples}", f"--out={out}", "--date=2026-01-02"]) == 0
    again, before = Profile.load(out), Profile.load(made)
    assert replace(again.latency, name="") == replace(before.latency, name="")
    assert again.date == "2026-01-02"
    assert again.rows == before.rows


def test_evaluation_measures_batches_that_were_not_fitted(made: Path) -> None:
    out = made.with_name("errors.json")
    assert command.main([f"--evaluate={made}", "--batches=9", "--repeats=1", f"--out={out}"]) == 0
    report = json.loads(out.read_text())
    assert report["profile"] == Profile.load(made).latency.name
    errors = report["overall"]
    assert errors["count"] == 9
    assert errors["p50"] <= errors["p95"] <= errors["max"]
    assert sum(kind["count"] for kind in report["by_kind"].values()) == 9
    again = made.with_name("errors-again.json")
    kept = made.with_name("errors.samples.jsonl")
    assert command.main([f"--evaluate={made}", "--batches=9", f"--samples={kept}", f"--out={again}"]) == 0
    assert json.loads(again.read_text())["overall"] == errors


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model=tiny-llama", "--max-context=4096"], "4096 needs 14337 positions, tiny-llama has 2048; lower them"),
        (["--model=tiny-llama", "--max-batch=2"], "max_batch=2 must be at least 4"),
        (
            ["--model=tiny-llama", "--sp-degree=3", "--max-tokens=64", "--max-context=64"],
            "sp_degree=3, instance.tensor_parallel=1",
        ),
        (["--evaluate=no-such-profile"], "'no-such-profile': neither a file nor shipped"),
    ],
)
def test_impossible_orders_are_refused_with_a_remedy(
    words: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(words) == 1
    assert named in capsys.readouterr().err


def test_a_model_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main([])
    assert "--model is needed" in capsys.readouterr().err


def test_on_a_gpu_the_host_s_time_shows_in_whole_iterations_alone() -> None:
    parts = {case.part for case in command.Settings("m", "cuda", sp_degree=2).profile_cases()}
    assert {case.part for case in command.Settings("m", "cpu", sp_degree=2).profile_cases()} - parts == {"host"}
    assert "" in parts
