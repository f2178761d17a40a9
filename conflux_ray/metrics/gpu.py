"""GPU use, memory and power through NVML (`nvidia-ml-py`). Without the package, the driver or a GPU: nothing, no error.

NVML takes milliseconds and releases the interpreter meanwhile; call it from the exporting thread, not the engine's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from conflux_ray.metrics.definitions import GPU_MEMORY, GPU_MEMORY_USED, GPU_POWER, GPU_POWER_LIMIT, GPU_USE, Metric
from conflux_ray.metrics.store import Store

logger = logging.getLogger(__name__)

SAMPLE_SECONDS = 5.0


def load_nvml() -> ModuleType | None:
    """The NVML bindings, ready for use; None where there are none, or no driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


class GpuSampler:
    """Keeps the GPU gauges of a store true.

    Args:
        store: takes the values.
        gpus: of this instance, as CUDA_VISIBLE_DEVICES names them: indices or UUIDs.
        load: finds the NVML bindings.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        store: Store,
        gpus: Sequence[str],
        load: Callable[[], Any | None] = load_nvml,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._clock = clock
        self._next = 0.0
        self._nvml = load() if gpus else None
        self._handles: dict[str, Any] = {}
        if self._nvml is None:
            return
        for gpu in gpus:
            try:
                self._handles[gpu] = (
                    self._nvml.nvmlDeviceGetHandleByIndex(int(gpu))
                    if gpu.isdecimal()
                    else self._nvml.nvmlDeviceGetHandleByUUID(gpu)
                )
            except self._nvml.NVMLError as error:
                logger.warning("no metrics of GPU %s: %s", gpu, error)

    def sample(self) -> None:
        """Read all GPUs, at most every `SAMPLE_SECONDS`. A value that a GPU does not have has no series."""
        now = self._clock()
        if not self._handles or now < self._next:
            return
        self._next = now + SAMPLE_SECONDS
        values: dict[Metric, dict[tuple[str, ...], float]] = {m: {} for m in self._readings(None)}
        for gpu, handle in self._handles.items():
            for metric, read in self._readings(handle).items():
                try:
                    values[metric][gpu,] = read()
                except self._nvml.NVMLError:  # type: ignore[union-attr]
                    continue  # some virtual GPUs tell no power
        for metric, series in values.items():
            self._store.replace(metric, series)

    def _readings(self, handle: Any) -> Mapping[Metric, Callable[[], float]]:
        nvml: Any = self._nvml
        return {
            GPU_USE: lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            GPU_MEMORY_USED: lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            GPU_MEMORY: lambda: float(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            GPU_POWER: lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            GPU_POWER_LIMIT: lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
        }
