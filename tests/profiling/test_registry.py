"""Which shipped profile a model on a machine gets."""

from __future__ import annotations

import pytest

from conflux_ray.planning.profile import Profile, ProfileError
from conflux_ray.profiling import machine
from conflux_ray.profiling.registry import (
    SHIPPED,
    find_profile,
    gpu_slug,
    list_profiles,
    profile_name,
    shipped_profile,
)


@pytest.mark.parametrize(
    ("name", "slug"),
    [("NVIDIA H200", "h200"), ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"), ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb")],
)
def test_a_gpu_is_named_as_a_whole(name: str, slug: str) -> None:
    assert gpu_slug(name) == slug


@pytest.mark.parametrize(
    ("model", "machine", "num_ranks", "base_tp", "found"),
    [
        ("Qwen/Qwen3-14B", "h200", 2, 1, "qwen3-14b.h200.sp2"),
        ("qwen3-14b-shape", "h200", 2, 1, "qwen3-14b.h200.sp2"),
        ("meta-llama/Llama-3.1-8B-Instruct", "h200", 2, 1, "llama-3.1-8b.h200.sp2"),
        ("/models/Qwen3-32B", "h200", 1, 2, "qwen3-32b.h200.sp1.tp2"),
        ("/models/smollm2-135m-instruct", "cpu", 3, 1, "smollm2-135m-instruct.cpu.sp3"),
    ],
)
def test_a_shipped_profile_is_found_by_model_and_machine(model, machine, num_ranks, base_tp, found) -> None:
    path = shipped_profile(model, machine, num_ranks, base_tp)
    assert path is not None
    assert path.stem == found


@pytest.mark.parametrize(
    ("model", "machine", "num_ranks", "base_tp"),
    [
        ("Qwen/Qwen3-14B", "h200-nvl", 2, 1),
        ("Qwen/Qwen3-14B", "h200", 4, 1),
        ("Qwen/Qwen3-14B", "h200", 2, 2),
        ("Qwen/Qwen3-8B", "h200", 2, 1),
    ],
)
def test_another_machine_or_shape_gets_none(model, machine, num_ranks, base_tp) -> None:
    assert shipped_profile(model, machine, num_ranks, base_tp) is None


def test_what_is_shipped_is_measured_and_named_after_what_it_holds() -> None:
    names = list_profiles()
    assert len(names) >= 4
    for name in names:
        profile = Profile.load(SHIPPED / f"{name}.json")
        assert profile.measured
        machine = name.split(".sp")[0].rpartition(".")[2]
        assert profile_name(profile.model, machine, profile.latency.num_ranks, profile.base_tp) == name
        if machine != "cpu":
            assert profile.machine.endswith(f"x NVIDIA {machine.upper()}")
            assert profile.conditions["attention_graphs"] is True


def test_an_unknown_profile_is_refused_with_those_there_are() -> None:
    with pytest.raises(ProfileError, match=r"neither a file nor shipped.*qwen3-14b\.h200\.sp2"):
        find_profile("no-such-profile")


def test_a_gpu_that_cannot_be_named_gets_no_profile_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def unnamed() -> str:
        raise RuntimeError("no NVML here")

    monkeypatch.setattr(machine, "gpu_name", unnamed)
    assert machine.machine_slug("cuda") == "cuda"
    assert machine.machine_slug("cpu") == "cpu"
    assert shipped_profile("Qwen/Qwen3-14B", "cuda", 2) is None
