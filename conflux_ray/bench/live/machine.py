"""The machine and the versions that a measurement was made with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from conflux_ray import __version__

PACKAGES = ("vllm", "torch", "ray", "transformers", "numpy", "httptools")


def gpus() -> list[dict[str, str]]:
    """Name, driver and memory of each GPU, by nvidia-smi; empty where there is none."""
    if shutil.which("nvidia-smi") is None:
        return []
    fields = ("name", "driver_version", "memory.total")
    try:
        lines = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        ).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return []
    return [dict(zip(fields, (cell.strip() for cell in line.split(",")), strict=False)) for line in lines if line]


def machine() -> dict[str, Any]:
    """Processors, memory, GPUs and load."""
    return {
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "gpus": gpus(),
        "load_average": os.getloadavg(),
        "system": f"{platform.system()} {platform.release()}",
    }


def versions() -> dict[str, str]:
    """Of Python, this project and what decides about speed; the commit where there is one."""
    found = {"python": platform.python_version(), "conflux-ray": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    commit = _commit(Path(__file__).resolve().parents[3])
    return found | ({"commit": commit} if commit else {})


def _commit(root: Path) -> str:
    """Of the checkout, with a mark where files differ from it; empty outside of one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
