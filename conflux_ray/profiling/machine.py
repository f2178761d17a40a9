"""What a profile says of where it was measured. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from pathlib import Path

from conflux_ray import __version__
from conflux_ray.profiling.registry import gpu_slug

PACKAGES = ("torch", "vllm")

logger = logging.getLogger(__name__)


def describe_machine(device: str, num_workers: int) -> str:
    """The device in words: CPU model and cores of this machine, or the GPUs that the workers use.

    Args:
        device: `cpu` or `cuda`.
        num_workers: of the instance.

    Raises:
        RuntimeError: NVIDIA's management library does not answer.
    """
    if device == "cpu":
        return f"{_cpu_model()}, {len(os.sched_getaffinity(0))} cores for {num_workers} workers"
    return f"{num_workers} x {gpu_name()}"


def gpu_name() -> str:
    """The first GPU's name.

    Raises:
        RuntimeError: NVIDIA's management library does not answer.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        raise RuntimeError(f"the GPU's name cannot be read ({error}); check the driver with nvidia-smi") from error
    return str(name)


def machine_slug(device: str) -> str:
    """The machine in a profile's name: `cpu`, or the GPU; `cuda`, which no profile has, where NVML does not tell it."""
    if device != "cuda":
        return device
    try:
        return gpu_slug(gpu_name())
    except (ImportError, RuntimeError) as error:
        logger.warning("no latency profile can be chosen by GPU: %s", error)
        return device


def software_versions() -> dict[str, str]:
    """Versions of what was measured, by package."""
    versions = {"conflux-ray": __version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return versions


def load_average() -> float:
    """Processes that wanted a core in the last minute."""
    return round(os.getloadavg()[0], 2)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
