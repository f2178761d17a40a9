"""`conflux serve` and `conflux drain` where nothing can be served or drained; tests/e2e has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from conflux_ray import launch
from conflux_ray.config import ConfigError

DEPLOYMENTS = Path(__file__).parents[1] / "deployments"


def test_the_models_of_a_deployment_are_found_by_the_name_in_the_api() -> None:
    assert launch.served_names(DEPLOYMENTS / "conflux.yaml") == ["smollm2-135m-instruct"]
    assert launch.served_names(DEPLOYMENTS / "qwen3-14b-2gpu.yaml") == ["qwen3-14b"]


@pytest.mark.parametrize("text", ["", "[]", "applications: 3", "applications: [{name: x}]", "a: b: c", None])
def test_what_is_no_deployment_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "other.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"other\.yaml"):
        launch.served_names(path)


@pytest.mark.parametrize(("command", "status"), [(launch.serve_main, 2), (launch.drain_main, 1)])
def test_a_wrong_configuration_ends_the_command_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command, status: int
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text("applications: [{args: {model: {path: m}, instance: {sp_degre: 2}}}]")
    assert command([str(path)]) == status
    assert "sp_degre" in capsys.readouterr().err


@pytest.mark.heavy
def test_without_a_server_there_is_nothing_to_drain(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    def refuse(**_: object) -> None:
        raise ConnectionError("no cluster")

    monkeypatch.setattr(ray, "init", refuse)  # another test's server may be up on this machine
    assert launch.drain_main([str(DEPLOYMENTS / "conflux.yaml")]) == 1
    assert "no cluster" in capsys.readouterr().err
