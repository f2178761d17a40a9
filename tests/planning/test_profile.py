"""Profile files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from conflux_ray.planning.fallback import MACHINES, fallback_profile
from conflux_ray.planning.latency_model import Curve, IterationLoad
from conflux_ray.planning.profile import SCHEMA_VERSION, Profile, ProfileError
from conflux_ray.planning.scheduler import Scheduler
from tests.planning.build import request, resident, roomy_kv
from tests.planning.test_fitting import component_rows, fit, iteration_rows

SHAPE = {
    "num_layers": 40,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_heads": 40,
    "num_kv_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}


@pytest.fixture
def profile():
    rows = component_rows() + iteration_rows() + iteration_rows(30, seed=1, held_out=True)
    return fit(rows, versions={"torch": "2.11.0"})


def test_a_file_gives_back_the_profile(profile, tmp_path):
    path = tmp_path / "profile.json"
    profile.save(path)
    assert Profile.load(path) == profile


def test_a_file_says_what_a_reader_needs_to_trust_it(profile, tmp_path):
    path = tmp_path / "profile.json"
    profile.save(path)
    document = json.loads(path.read_text())
    assert document["schema_version"] == SCHEMA_VERSION
    assert document["measured"] is True
    assert document["rows"] == {
        "comm": 5, "decode": 6, "gemm": 11, "host": 4, "iteration": 90, "prefill": 5, "transfer": 4
    }  # fmt: skip
    for errors in (document["in_sample"], document["held_out"]):
        assert set(errors) == {"gemm", "decode", "prefill", "comm", "transfer", "host", "iteration"}
        assert set(errors["iteration"]) == {"count", "mape", "p50", "p95", "max"}
    assert set(document["gemm_forms"]) == {"affine", "floor", "piecewise"}


def test_components_that_bend_and_iterations_without_a_barrier_are_kept(profile, tmp_path):
    path = tmp_path / "profile.json"
    bent = Curve.through((0.0, 100.0, 5000.0), (1e-5, 1e-5, 4e-4), 7e-8)
    changed = replace(profile, latency=replace(profile.latency, comm=bent, prefill=bent, barrier=False))
    changed.save(path)
    assert Profile.load(path) == changed


def test_a_file_of_the_version_before_is_read(profile, tmp_path):
    path = tmp_path / "profile.json"
    profile.save(path)
    document = json.loads(path.read_text())
    document["schema_version"] = 1
    del document["latency"]["barrier"]
    path.write_text(json.dumps(document))
    assert Profile.load(path) == profile


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.update(schema_version=99), "schema_version=99"),
        (lambda d: d.pop("machine"), "'machine' is missing"),
        (lambda d: d["latency"].pop("decode"), "'decode' is missing"),
        (lambda d: d["latency"].update(num_layers="40"), "'num_layers' is '40', expected int"),
        (lambda d: d["latency"]["decode"].update(slope=-1.0), "'decode' is not valid"),
        (lambda d: d["latency"]["gemm"].update(tokens=[3]), "'gemm' is not valid"),
        (lambda d: d["latency"]["contention"][0].update(alpha=0.5), "alpha=0.5"),
        (lambda d: d["held_out"]["gemm"].pop("mape"), r"'held_out\.gemm' is not valid"),
    ],
)
def test_a_wrong_field_is_named(profile, tmp_path, change, message):
    path = tmp_path / "profile.json"
    profile.save(path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ProfileError, match=message) as caught:
        Profile.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_a_file_that_is_no_profile_is_named(tmp_path, content):
    path = tmp_path / "profile.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ProfileError, match=r"profile\.json"):
        Profile.load(path)


@pytest.mark.parametrize("machine", sorted(MACHINES))
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_the_fallback_is_marked_and_can_schedule(machine, num_ranks, tmp_path):
    profile = fallback_profile(**SHAPE, num_ranks=num_ranks, machine=machine)
    profile.save(tmp_path / "fallback.json")
    loaded = Profile.load(tmp_path / "fallback.json")
    assert loaded == profile
    assert not loaded.measured
    assert "fallback" in loaded.latency.name
    decision = Scheduler(loaded.latency).schedule(
        [request("r", 20_000)], resident(*[0] * num_ranks), roomy_kv(num_ranks), 0.0
    )
    assert decision.chunks


def test_the_fallback_is_conservative_on_the_machine_that_was_measured():
    # shared/facts/measurements.md, Qwen3-14B on two H200: 24 x 8K decodes a rank, chunks at 8K context.
    latency = fallback_profile(**SHAPE, num_ranks=2, machine="h200").latency
    for chunk, milliseconds in ((512, 27.6), (1024, 43.3), (4096, 126.8)):
        load = IterationLoad((24, 24), (24 * 8192,) * 2, (chunk // 2,) * 2, ((chunk, 8192),))
        assert milliseconds * 1e-3 < latency.predict(load).seconds < 3 * milliseconds * 1e-3


def test_a_machine_without_stated_figures_is_refused():
    with pytest.raises(ValueError, match="abacus"):
        fallback_profile(**SHAPE, num_ranks=1, machine="abacus")
