"""`conflux bench gpu decode` and `scaling`: what they set beside each other, and a run with the tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conflux_ray.bench import gpu
from conflux_ray.bench.gpu_decode import Decodes, Timings, run_conflux
from conflux_ray.bench.gpu_scaling import cases_of, prefill_of
from conflux_ray.profiling.samples import SampleFile


def test_timings_are_the_median_and_the_tails_in_milliseconds() -> None:
    assert Timings.of([k / 1000 for k in range(1, 102)]) == Timings(51.0, 6.0, 96.0)


def test_every_degree_takes_the_same_tokens_a_rank_and_iteration() -> None:
    one = cases_of(100, 1, 16, decodes=3, context=50, splits=())
    two = cases_of(100, 2, 16, decodes=3, context=50, splits=(48,))
    assert [c.batch.chunks[0].shard for c in one if c.batch.overlap] == [(16,)] * 6 + [(4,)]
    assert [c.batch.chunks[0].shard for c in two if c.batch.decode_sms] == [(16, 16)] * 3 + [(2, 2)]
    assert [c.batch.chunks[0].context for c in two if not c.batch.overlap] == [0, 32, 64, 96]
    assert all(c.batch.decodes == ((50,) * 3,) * 2 for c in two)


def test_an_iteration_counts_in_its_fastest_way(tmp_path: Path) -> None:
    cases = cases_of(32, 1, 16, decodes=1, context=8, splits=(48,))
    samples = SampleFile(tmp_path / "samples", {})
    seconds = {"1@0-overlap": 3.0, "1@0-serial": 2.0, "1@0-48": 4.0}
    seconds |= {"1@16-overlap": 5.0, "1@16-serial": 6.0, "1@16-48": 1.0}
    for case in cases:
        for number, factor in enumerate((1.0, 9.0, 1.0)):
            samples.add(case.name, number, factor * seconds[case.name])
    prefill = prefill_of(cases, samples, 1)
    assert prefill.iterations == [2000.0, 1000.0]
    assert prefill.serial == [2000.0, 6000.0]
    assert prefill.total == 3000.0


@pytest.mark.heavy
def test_decodes_alone_are_timed_in_the_whole_engine() -> None:
    found = run_conflux(Decodes("tiny-llama", "cpu", "auto", decodes=3, context=20, iterations=8))
    assert set(found) == {"iteration", "device", "exposed", "planning"}
    assert 0 < found["planning"].median < found["exposed"].median
    assert all(0 < t.p5 <= t.median <= t.p95 for t in found.values())


@pytest.mark.heavy
def test_scaling_reports_every_degree(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "scaling.json"
    # The prompt and another iteration's tokens are more than the model's 2048 positions, and need not fit.
    words = "--model tiny-llama --device cpu --load-format auto --prompt 1536 --tokens 256 --decodes 2 --context 20"
    assert gpu.main(["scaling", *words.split(), "--repeats", "1", "--out", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [one["degree"] for one in report["degrees"]] == [1, 2]
    assert [len(one["iterations"]) for one in report["degrees"]] == [6, 3]
    assert report["degrees"][0]["speed_up"] == 1.0
    assert capsys.readouterr().out.count("\n| ") >= 2
