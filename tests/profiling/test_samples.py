"""The file of samples: what a run that goes on finds, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from conflux_ray.profiling.samples import SampleFile, SampleFileError

SETTINGS = {"model": "m", "max_tokens": 64}


def test_another_run_finds_what_was_added(tmp_path: Path) -> None:
    first = SampleFile(tmp_path / "samples.jsonl", SETTINGS)
    for number, seconds in enumerate((3.0, 1.0, 2.0)):
        first.add("gemm-1", number, seconds)
    second = SampleFile(tmp_path / "samples.jsonl", SETTINGS)
    assert ("gemm-1", 2) in second
    assert ("gemm-1", 3) not in second
    assert ("gemm-2", 0) not in second
    assert second.median("gemm-1") == 2.0
    second.add("gemm-2", 0, 1.0)
    assert second.counts() == (1, 3)


def test_half_a_line_is_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    SampleFile(path, SETTINGS).add("gemm-1", 0, 1.0)
    whole = path.read_text()
    path.write_text(whole + '{"case": "gemm-1", "rou')
    samples = SampleFile(path, SETTINGS)
    assert ("gemm-1", 1) not in samples
    samples.add("gemm-1", 1, 3.0)
    assert SampleFile(path, SETTINGS).median("gemm-1") == 2.0


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    SampleFile(path, SETTINGS)
    with pytest.raises(SampleFileError, match="max_tokens=64, now 128; remove the file"):
        SampleFile(path, {**SETTINGS, "max_tokens": 128})


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("hello\n")
    with pytest.raises(SampleFileError, match="no file of samples"):
        SampleFile(path, SETTINGS)


def test_noise_is_the_typical_distance_from_the_median(tmp_path: Path) -> None:
    samples = SampleFile(tmp_path / "samples.jsonl", SETTINGS)
    assert samples.noise() is None
    for number, seconds in enumerate((0.9, 1.0, 1.1)):
        samples.add("gemm-1", number, seconds)
    samples.add("once", 0, 5.0)
    assert samples.noise() == pytest.approx(10.0)
