"""The simulator runs on a laptop: it imports no torch, ray or vllm, and nothing above planning and kv."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import conflux_ray.simulator


def _modules() -> list[str]:
    root = Path(conflux_ray.simulator.__path__[0])
    paths = [p for p in root.rglob("*.py") if p.stem != "__init__"]
    if not find_spec("matplotlib"):  # needed by `conflux figures` alone
        paths = [p for p in paths if p.stem != "plots"]
    return [".".join(("conflux_ray", "simulator", *p.relative_to(root).with_suffix("").parts)) for p in paths]


def _loaded_after_import(expression: str) -> str:
    code = f"import sys, {', '.join(_modules())}; print({expression})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def test_simulator_imports_no_torch_ray_or_vllm():
    assert len(_modules()) > 10
    assert _loaded_after_import("sorted({'torch', 'ray', 'vllm'} & set(sys.modules))") == "[]"


def test_simulator_imports_only_planning_and_kv_of_the_package():
    packages = "sorted({m.split('.')[1] for m in sys.modules if m.startswith('conflux_ray.')})"
    assert _loaded_after_import(packages) == "['kv', 'planning', 'simulator']"
