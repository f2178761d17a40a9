"""vLLM stays behind one package, at one version, on a platform that is asked for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from conflux_ray.vllm_compat import plugin, version

PACKAGE = Path(version.__file__).resolve().parents[1]


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module.split(".")[0])
    return found


def test_vllm_is_imported_in_one_package_only() -> None:
    others = [p for p in PACKAGE.rglob("*.py") if "vllm_compat" not in p.parts]
    assert len(others) > 30
    assert [str(p) for p in others if "vllm" in imports(p)] == []


@pytest.mark.parametrize("part", ["planning", "kv", "wire.py", "config.py"])
def test_the_plain_parts_import_no_heavy_library(part: str) -> None:
    path = PACKAGE / part
    files = list(path.rglob("*.py")) if path.is_dir() else [path]
    assert files
    assert [str(p) for p in files if imports(p) & {"torch", "ray", "vllm"}] == []


def test_another_version_of_vllm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "version", lambda name: "0.27.1")
    with pytest.raises(version.VersionError, match=r"vllm==0\.27\.1 is installed; .* exactly vllm==0\.26\.0"):
        version.require_version()


def test_the_installed_vllm_is_the_one_written_against() -> None:
    version.require_version()


def test_the_cpu_platform_is_active_only_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.PLATFORM_VARIABLE, raising=False)
    assert plugin.activate() is None
    monkeypatch.setenv(plugin.PLATFORM_VARIABLE, "cpu")
    assert plugin.activate() == "conflux_ray.vllm_compat.platform.ConfluxCpuPlatform"
