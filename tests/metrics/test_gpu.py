"""GPU metrics where there is a GPU, and silence where there is none."""

from __future__ import annotations

import pytest

from conflux_ray.metrics import definitions as m
from conflux_ray.metrics.gpu import GpuSampler, load_nvml
from conflux_ray.metrics.store import Store


def store_of(gpus: list[str], **options: object) -> Store:
    store = Store({"model": "tiny", "replica": "i"})
    GpuSampler(store, gpus, **options).sample()  # type: ignore[arg-type]
    return store


def test_an_instance_without_gpus_has_no_gpu_series() -> None:
    assert list(store_of([]).values()) == []


def test_a_machine_without_nvml_is_no_error() -> None:
    assert list(store_of(["0"], load=lambda: None).values()) == []


@pytest.mark.gpu
def test_a_gpu_tells_its_use_memory_and_power() -> None:
    assert load_nvml() is not None
    store = store_of(["0"])
    assert 0 <= store.value(m.GPU_USE, "0").value <= 1
    assert 0 < store.value(m.GPU_MEMORY_USED, "0").value <= store.value(m.GPU_MEMORY, "0").value
    assert store.value(m.GPU_MEMORY, "0").value > 2**30
    assert 0 < store.value(m.GPU_POWER, "0").value <= 1.5 * store.value(m.GPU_POWER_LIMIT, "0").value
