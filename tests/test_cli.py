"""The `conflux` command: finding its subcommands, and what it says where there is none."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

import conflux_ray
from conflux_ray import cli

WORDS = [command.words for command in cli.COMMANDS]


@pytest.mark.heavy
@pytest.mark.parametrize("words", WORDS)
def test_every_command_exists_and_explains_itself(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*words.split(), "--help"])
    assert ended.value.code == 0
    assert "usage:" in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert all(word in printed for words in WORDS for word in words.split())


@pytest.mark.parametrize("words", [[], ["nonsense"], ["bench"], ["bench", "nonsense"], ["--nonsense"]])
def test_a_missing_or_unknown_command_is_an_error(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert "nonsense" in printed if "nonsense" in words else "required" in printed


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"conflux {conflux_ray.__version__}\n"


def test_the_rest_of_the_command_line_and_the_exit_status_are_the_subcommands(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[list[str]] = []

    def main(words: list[str]) -> int:
        taken.append(words)
        return 7

    monkeypatch.setattr(importlib.import_module("conflux_ray.bench.scheduler"), "main", main)
    assert cli.main(["bench", "scheduler", "--ranks", "2", "--version"]) == 7
    assert taken == [["--ranks", "2", "--version"]]


def test_no_subcommand_is_imported_before_it_is_called() -> None:
    script = "import sys; from conflux_ray import cli; print([m for m in sys.modules if m.startswith('conflux_ray.')])"
    printed = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert printed == "['conflux_ray.cli']\n"
