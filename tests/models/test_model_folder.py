from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from conflux_ray.models.folder import build_once


class Builder:
    """Writes a fixed weight file and counts how often it was asked to."""

    def __init__(self) -> None:
        self.builds = 0

    def __call__(self, folder: Path) -> None:
        self.builds += 1
        (folder / "weights").write_bytes(b"0123456789")


def fail_half_way(folder: Path) -> None:
    (folder / "weights").write_bytes(b"01234")
    raise RuntimeError("connection lost")


def test_finished_model_is_not_built_again(tmp_path):
    build = Builder()
    build_once(tmp_path / "model", "recipe", build)
    build_once(tmp_path / "model", "recipe", build)
    assert build.builds == 1


def test_interrupted_build_leaves_nothing_at_the_destination(tmp_path):
    with pytest.raises(RuntimeError, match="connection lost"):
        build_once(tmp_path / "model", "recipe", fail_half_way)
    assert not (tmp_path / "model").exists()


def test_interrupted_build_is_redone(tmp_path):
    with pytest.raises(RuntimeError):
        build_once(tmp_path / "model", "recipe", fail_half_way)
    build_once(tmp_path / "model", "recipe", Builder())
    assert (tmp_path / "model" / "weights").read_bytes() == b"0123456789"


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"0123"), lambda path: path.unlink()])
def test_damaged_model_is_built_again(tmp_path, damage):
    folder = build_once(tmp_path / "model", "recipe", Builder())
    damage(folder / "weights")
    build_once(folder, "recipe", Builder())
    assert (folder / "weights").read_bytes() == b"0123456789"


def test_other_recipe_replaces_the_model(tmp_path):
    folder = build_once(tmp_path / "model", "recipe", Builder())
    build_once(folder, "another", lambda scratch: (scratch / "other").touch())
    assert not (folder / "weights").exists()


def test_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match="not a finished model"):
        build_once(tmp_path, "recipe", Builder())
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_concurrent_builders_share_one_build(tmp_path):
    build, barrier = Builder(), Barrier(4)

    def user(_: int) -> Path:
        barrier.wait()
        return build_once(tmp_path / "model", "recipe", build)

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(user, range(4))) == {tmp_path / "model"}
    assert build.builds == 1


def test_folder_records_its_recipe(tmp_path):
    folder = build_once(tmp_path / "model", "recipe", Builder())
    assert json.loads((folder / "conflux-model.json").read_text()) == {"recipe": "recipe", "bytes": {"weights": 10}}
