"""Where the models that tests and demonstrations use live, built on first use and shared by all processes.

The store is `$CONFLUX_MODEL_DIR`, by default `.models/` at the root of a checkout and `~/.cache/conflux-ray/models` of
an installed package.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from conflux_ray.models import shapes, smollm2, tiny

SMOLLM2 = "smollm2-135m-instruct"
SMOLLM2_12_6 = "smollm2-135m-instruct-12-6"
SMOLLM2_12_12 = "smollm2-135m-instruct-12-12"
NAMES = (
    SMOLLM2,
    SMOLLM2_12_6,
    SMOLLM2_12_12,
    *(f"tiny-{architecture}" for architecture in tiny.ARCHITECTURES),
    *shapes.SHAPES,
)


def root() -> Path:
    """Return the folder that holds the models; it need not exist yet."""
    chosen = os.environ.get("CONFLUX_MODEL_DIR")
    if chosen:
        return Path(chosen).expanduser().absolute()
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").exists():
        return checkout / ".models"
    return Path("~/.cache/conflux-ray/models").expanduser()


def model_dir(name: str, **shape: Any) -> Path:
    """Return the folder of the model `name`, building it first if need be.

    SmolLM2 takes a download of 93 MB and some tens of seconds the first time, a tiny model takes milliseconds. A
    `-shape` has no weights: serve it with `load_format: dummy`.

    Args:
        name: One of `NAMES`.
        **shape: For a tiny model, fields of `tiny.TinyModel`; each shape has its own folder.

    Raises:
        ValueError: An unknown name, a shape for a model that has none, or an impossible shape.
        RuntimeError: SmolLM2 cannot be fetched.
    """
    if name not in NAMES:
        raise ValueError(f"model {name!r} is not one of {', '.join(NAMES)}")
    if name.startswith("tiny-"):
        model = tiny.TinyModel(architecture=name.removeprefix("tiny-"), **shape)
        return tiny.write(root() / model.name, model)
    if shape:
        raise ValueError(f"{name} has one shape, it does not take {', '.join(shape)}")
    if name in shapes.SHAPES:
        return shapes.write(root() / name, name)
    original = smollm2.fetch(root() / SMOLLM2)
    if name == SMOLLM2:
        return original
    return smollm2.fetch_padded(root() / name, original, 12, 6 if name == SMOLLM2_12_6 else 12)
