"""Shapes without weights are those of the models that they stand for, and load as model folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conflux_ray.config import check_model, parse
from conflux_ray.models import shapes, store

PARAMETERS = {"qwen3-14b-shape": 14.8e9, "qwen3-32b-shape": 32.8e9, "llama-3.1-8b-shape": 8.03e9}  # as published


@pytest.mark.parametrize("name", sorted(shapes.SHAPES))
def test_a_shape_has_the_published_number_of_parameters(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CONFLUX_MODEL_DIR", str(tmp_path))
    folder = store.model_dir(name)
    hf = json.loads((folder / "config.json").read_text())
    g = check_model(parse({"model": {"path": name}, "instance": {"sp_degree": 2}}), hf)
    attention = g.hidden_size * g.head_size * (2 * g.num_heads + 2 * g.num_kv_heads)
    layers = g.num_layers * (attention + 3 * g.hidden_size * g.intermediate_size)
    assert layers + 2 * g.vocab_size * g.hidden_size == pytest.approx(PARAMETERS[name], rel=0.01)
    assert (folder / "tokenizer.json").exists()
    assert not list(folder.glob("*.safetensors"))
