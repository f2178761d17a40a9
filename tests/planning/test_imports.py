"""Planning knows nobody: the simulator runs it on a laptop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import conflux_ray.planning


def test_planning_imports_no_torch_ray_or_vllm():
    modules = [f"conflux_ray.planning.{path.stem}" for path in Path(conflux_ray.planning.__path__[0]).glob("[!_]*.py")]
    assert len(modules) > 8
    code = f"import sys, {', '.join(modules)}; print(sorted({{'torch', 'ray', 'vllm'}} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "[]"
