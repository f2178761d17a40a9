"""A model folder that is either complete or absent, however many processes build it at once.

Every helper of this package writes its model through `build_once`: the build happens in a scratch folder beside the
destination, under a file lock, and a rename publishes it. An interrupted build leaves nothing at the destination.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

RECIPE_FILE = "conflux-model.json"


def build_once(dest: Path, recipe: str, build: Callable[[Path], None]) -> Path:
    """Make sure that `dest` holds the finished result of `recipe`, building it if it does not.

    Args:
        dest: The model folder. Its parent is created.
        recipe: What identifies the content: a folder finished under another recipe, or whose files have since changed
            size, is built again.
        build: Fills the empty scratch folder that it is given.

    Returns:
        `dest`, absolute.

    Raises:
        FileExistsError: `dest` exists, is not empty, and was not written by this function.
    """
    dest = dest.expanduser().absolute()
    if _is_finished(dest, recipe):
        return dest
    dest.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(dest.with_name(f".{dest.name}.lock")):
        if _is_finished(dest, recipe):
            return dest
        if dest.exists() and not (dest / RECIPE_FILE).exists() and (not dest.is_dir() or any(dest.iterdir())):
            raise FileExistsError(f"{dest} exists and is not a finished model of this package: move it or name another")
        scratch = dest.with_name(f".{dest.name}.partial")
        if scratch.exists():
            shutil.rmtree(scratch)
        scratch.mkdir()
        build(scratch)
        for path in _files(scratch):
            # safetensors writes for its own user alone; a store may be shared by several.
            path.chmod(0o644)
        sizes = {str(path.relative_to(scratch)): path.stat().st_size for path in _files(scratch)}
        (scratch / RECIPE_FILE).write_text(json.dumps({"recipe": recipe, "bytes": sizes}, indent=2) + "\n")
        if dest.exists():
            shutil.rmtree(dest)
        scratch.rename(dest)
    return dest


def write_json(path: Path, value: object) -> None:
    """Write `value` as indented JSON."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _is_finished(dest: Path, recipe: str) -> bool:
    try:
        record = json.loads((dest / RECIPE_FILE).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return False
    return record["recipe"] == recipe and all(
        (dest / name).is_file() and (dest / name).stat().st_size == size for name, size in record["bytes"].items()
    )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    with lock.open("w") as handle:
        # The kernel drops the lock with the process, so a killed build never blocks the next one.
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
