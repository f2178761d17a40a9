"""Iteration logs as rows of a profile, and a profile refitted to them by the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conflux_ray.planning.fitting import IterationRow
from conflux_ray.planning.latency_model import IterationLoad
from conflux_ray.planning.profile import Profile
from conflux_ray.profiling import command
from conflux_ray.profiling.served import LogError, served_rows
from tests.planning.test_refit import MEASURED, TRUTH, served

LINE: dict[str, Any] = {
    "iteration": 7,
    "planned": 1000.0,
    "planning": 0.0002,
    "predicted": 0.09,
    "decodes": [2, 1],
    "context": [500, 40],
    "chunks": [[100, 164, [40, 24]], [0, 10, [0, 10]]],
    "overlap": True,
    "decode_sms": 96,
    "transfers": 0,
    "incoming": [0.0, 0.0],
    "pending": 1,
    "resident": 3,
    "collected": 1000.1,
    "elapsed": [0.08, 0.081],
}
LOAD = IterationLoad((2, 1), (500, 40), (40, 34), ((64, 100), (10, 0)))


def written(folder: Path, *lines: dict[str, Any], end: str = "") -> Path:
    path = folder / "iterations.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    return path


def as_lines(rows: list[IterationRow]) -> list[dict[str, Any]]:
    lines = []
    for number, row in enumerate(rows):
        load = row.load
        chunks = [[start, start + length, list(load.prefill_tokens)] for length, start in load.chunks]
        moved = {"transfers": int(any(load.incoming)), "incoming": list(load.incoming) or [0.0, 0.0]}
        computed = {"decodes": load.decode_tokens, "context": load.decode_context, "chunks": chunks}
        times = {"iteration": number, "elapsed": [row.seconds, 0.9 * row.seconds]}
        lines.append(LINE | computed | moved | times)
    return lines


def test_a_line_is_what_the_iteration_computed_and_the_slowest_worker_s_time(tmp_path: Path) -> None:
    moved = LINE | {"transfers": 1, "incoming": [0.0, 82.0]}
    serial = LINE | {"overlap": False}
    rows = served_rows(written(tmp_path, LINE, moved, serial, end='{"iteration": 9, "pla'), 2)
    assert rows[0] == IterationRow(LOAD, 0.081, True, 96)
    assert rows[1].load.incoming == (0.0, 82.0)
    assert (rows[2].overlap, rows[2].decode_sms) == (False, None)
    assert len(rows) == 3


def test_what_cannot_be_known_is_left_out(tmp_path: Path) -> None:
    old = {name: value for name, value in LINE.items() if name != "incoming"}
    idle = LINE | {"decodes": [0, 0], "context": [0, 0], "chunks": []}
    rows = served_rows(written(tmp_path, old | {"transfers": 1}, old, idle), 2)
    assert rows == [IterationRow(LOAD, 0.081, True, 96)]


def test_what_is_no_such_log_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(LogError, match=r"iterations.jsonl, line 1: not an iteration"):
        served_rows(written(tmp_path, {"step": 1}, LINE), 2)
    with pytest.raises(LogError, match="is of 2 ranks, the profile of 4"):
        served_rows(written(tmp_path, LINE), 4)
    with pytest.raises(LogError, match="no iteration in it"):
        served_rows(written(tmp_path), 2)
    partial = {name: value for name, value in LINE.items() if name != "overlap"}
    with pytest.raises(LogError, match=r"line 1: not an iteration .*overlap"):
        served_rows(written(tmp_path, partial, LINE), 2)
    silent = {name: value for name, value in LINE.items() if name != "context"}
    with pytest.raises(LogError, match="context"):
        served_rows(written(tmp_path, silent), 2)


def test_a_profile_is_refitted_to_logs_and_judged_by_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    Profile(MEASURED, True, "model", "2 x GPU", rows={"gemm": 9}, date="2026-11-01").save(old)
    log = written(tmp_path, *as_lines(served(TRUTH, 1200)))
    assert command.main(["--refit", str(old), "--log", str(log), "--date", "2026-12-01", "--out", str(new)]) == 0
    profile = Profile.load(new)
    assert (profile.model, profile.machine, profile.date) == ("model", "2 x GPU", "2026-12-01")
    assert profile.latency.name == "measured:served:2026-12-01"
    assert profile.rows == {"gemm": 9, "served": 600}
    assert profile.held_out["served"].mape < 0.5 < 5 < profile.held_out["served, before"].mape
    capsys.readouterr()
    assert command.main(["--evaluate", str(new), "--log", str(log)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["profile"] == "measured:served:2026-12-01"
    assert report["overall"]["count"] == 1200
    assert set(report["by_kind"]) == {"decode", "mixed overlap"}
    assert report["overall"]["mape"] < 0.5


def test_refitting_again_names_one_refit_and_overwrites_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    old = tmp_path / "some.h200.sp2.json"
    Profile(MEASURED, True, "model", "2 x GPU").save(old)
    log = written(tmp_path, *as_lines(served(TRUTH, 1200)))
    before = old.read_text()
    assert command.main(["--refit", str(old), "--log", str(log), "--date", "2026-12-01"]) == 0
    new = tmp_path / "some.h200.sp2.served.json"
    assert command.main(["--refit", str(new), "--log", str(log), "--date", "2026-12-02", "--out", "again.json"]) == 0
    assert old.read_text() == before
    assert Profile.load(tmp_path / "again.json").latency.name == "measured:served:2026-12-02"


def test_what_cannot_be_read_or_judged_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "old.json"
    Profile(MEASURED, True, "model", "2 x GPU").save(profile)
    unknown = written(tmp_path, LINE | {"decode_sms": 48})
    for log, words in ((tmp_path / "none.jsonl", "none.jsonl"), (unknown, "give the profile that was served")):
        assert command.main(["--evaluate", str(profile), "--log", str(log)]) == 1
        assert words in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--refit some", "--log a.jsonl", "--model m --log a.jsonl", "--model m --refit p"])
def test_a_refit_needs_logs_and_logs_a_profile(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(words.split())
    assert "--log needs --refit or --evaluate" in capsys.readouterr().err
