from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from conflux_ray.models import store

if TYPE_CHECKING:
    from conflux_ray.models.reference import Reference


@pytest.fixture(scope="session")
def reference() -> Callable[[Path], Reference]:
    """Load the Hugging Face reference of a model folder, once a session."""
    from conflux_ray.models.reference import Reference

    loaded: dict[Path, Reference] = {}

    def load(folder: Path) -> Reference:
        if folder not in loaded:
            loaded[folder] = Reference(folder)
        return loaded[folder]

    return load


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    return store.model_dir(store.SMOLLM2)


@pytest.fixture(scope="session")
def smollm2_12_6_dir() -> Path:
    return store.model_dir(store.SMOLLM2_12_6)
