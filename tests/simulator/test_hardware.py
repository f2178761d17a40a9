"""Stated figures against what was measured, memory against the published capacities, profiles in their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from conflux_ray.planning.fallback import fallback_profile
from conflux_ray.planning.latency_model import IterationLoad
from conflux_ray.profiling.registry import find_profile
from conflux_ray.simulator.hardware import (
    DEVICES,
    MODELS,
    MeasuredHardware,
    SlowedHardware,
    StatedHardware,
    kv_tokens,
    sm_slowdown,
)
from tests.simulator.build import h200

CONTEXT = 8192


@pytest.mark.parametrize(
    ("decodes", "chunk", "milliseconds"),
    # Measured, 2x H200, the Qwen3-14B shape, 40 layers, 8K of context, attention paths one after the other.
    [(0, 4096, 119.7), (24, 0, 15.7), (24, 512, 30.3), (24, 1024, 44.0), (24, 2048, 72.4), (24, 4096, 129.3)],
)
def test_stated_xp_iterations_are_near_the_measured_ones(decodes: int, chunk: int, milliseconds: float):
    model = h200().latency(2, 1)
    load = IterationLoad(
        (decodes, decodes),
        (decodes * CONTEXT,) * 2,
        (chunk // 2,) * 2 if chunk else (),
        ((chunk, CONTEXT),) if chunk else (),
    )
    predicted = model.predict(load, overlap=False)
    assert 1e3 * (predicted.seconds - predicted.host) == pytest.approx(milliseconds, rel=0.12)


@pytest.mark.parametrize(
    ("decodes", "chunk", "milliseconds"),
    # The same machine, tensor parallelism with NCCL all-reduces; without the host's time.
    [(0, 4096, 125.0), (48, 0, 13.7), (48, 512, 29.3), (48, 1024, 45.5), (48, 2048, 74.3), (48, 4096, 132.4)],
)
def test_stated_tp2_iterations_are_near_the_measured_ones(decodes: int, chunk: int, milliseconds: float):
    model = h200().latency(1, 2)
    load = IterationLoad(
        (decodes,), (decodes * CONTEXT,), (chunk,) if chunk else (), ((chunk, CONTEXT),) if chunk else ()
    )
    predicted = model.predict(load)
    assert 1e3 * (predicted.seconds - predicted.host) == pytest.approx(milliseconds, rel=0.12)


@pytest.mark.parametrize(
    ("model", "base_tp", "thousands"),
    [("llama-8b", 1, 440), ("llama-8b", 4, 2130), ("qwen-14b", 1, 270), ("qwen-14b", 4, 1620), ("qwen-32b", 2, 313)],
)
def test_kv_capacity_of_h100(model: str, base_tp: int, thousands: int):
    assert kv_tokens(MODELS[model], DEVICES["h100"], base_tp) / 1000 == pytest.approx(thousands, rel=0.01)


def test_a_model_that_does_not_fit_is_refused():
    small = StatedHardware(MODELS["qwen-32b"], DEVICES["h100"])
    assert small.kv_tokens(1) < 0.15 * small.kv_tokens(2)
    with pytest.raises(ValueError, match="does not divide"):
        small.latency(16, 1)


def test_every_figure_has_a_source():
    for device in DEVICES.values():
        rows = device.describe()
        assert len(rows) > 25
        assert all(source for _, _, source in rows)


def test_h200_differs_from_h100_in_memory_alone():
    h100, h200_rows = ({n: v for n, v, _ in DEVICES[name].describe()} for name in ("h100", "h200"))
    assert {name for name in h100 if h100[name] != h200_rows[name]} == {"memory", "memory_bandwidth"}


def test_sm_slowdown_meets_the_table_and_falls_with_sms():
    table = DEVICES["h100"].prefill_sms
    assert sm_slowdown(table, 64) == pytest.approx(table[64].value)
    values = [sm_slowdown(table, sms) for sms in range(8, 133, 4)]
    assert values == sorted(values, reverse=True)


def test_a_measured_profile_replaces_the_stated_one(tmp_path: Path):
    profile = fallback_profile(
        num_layers=40,
        hidden_size=5120,
        intermediate_size=17408,
        num_heads=40,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=151936,
        num_ranks=2,
    )
    path = tmp_path / "p.json"
    profile.save(path)
    hardware = MeasuredHardware.load(h200(), [path])
    assert hardware.latency(2, 1) == profile.latency
    assert hardware.latency(1, 2).name.startswith("stated:")
    with pytest.raises(ValueError, match="given before"):
        MeasuredHardware.load(h200(), [path, path])


@pytest.mark.parametrize("profile", ["llama-3.1-8b.h200.sp1", "qwen3-14b.h200.sp2"])
def test_a_slower_machine_takes_that_much_longer_whatever_the_iteration(profile):
    measured = find_profile(profile).latency

    class Machine:
        def latency(self, num_ranks, base_tp):
            return measured

    slow = SlowedHardware(Machine(), 3.0).latency(measured.num_ranks, 1)
    for tokens in (0, 40, 700, 5000):
        shards = (tokens,) * measured.num_ranks
        load = IterationLoad(
            (8,) * measured.num_ranks, (9000,) * measured.num_ranks, shards, ((sum(shards), 5000),) if tokens else ()
        )
        assert slow.predict(load).seconds == pytest.approx(3 * measured.predict(load).seconds, rel=1e-6)
