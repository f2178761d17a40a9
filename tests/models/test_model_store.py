from __future__ import annotations

import json
import subprocess
import sys

import pytest

from conflux_ray.models import store
from conflux_ray.models.__main__ import main


@pytest.fixture
def empty_store(tmp_path, monkeypatch):
    monkeypatch.setenv("CONFLUX_MODEL_DIR", str(tmp_path / "models"))
    return tmp_path / "models"


def test_checkout_keeps_its_models_at_its_root(monkeypatch):
    monkeypatch.delenv("CONFLUX_MODEL_DIR", raising=False)
    assert (store.root().parent / "pyproject.toml").exists()
    assert store.root().name == ".models"


def test_tiny_model_is_built_on_first_use(empty_store):
    folder = store.model_dir("tiny-llama")
    assert folder == empty_store / "tiny-llama"
    assert (folder / "model.safetensors").exists()


def test_each_tiny_shape_has_its_own_folder(empty_store):
    folder = store.model_dir("tiny-qwen3", num_kv_heads=2, seed=7)
    assert folder == empty_store / "tiny-qwen3-num_kv_heads2-seed7"
    assert json.loads((folder / "config.json").read_text())["num_key_value_heads"] == 2


def test_unknown_name_lists_the_known_ones(empty_store):
    with pytest.raises(ValueError, match=r"'gpt-5' is not one of smollm2-135m-instruct, .*tiny-qwen3"):
        store.model_dir("gpt-5")


def test_smollm2_takes_no_shape(empty_store):
    with pytest.raises(ValueError, match="does not take num_kv_heads"):
        store.model_dir(store.SMOLLM2, num_kv_heads=6)


def test_command_line_writes_a_tiny_model(tmp_path, capsys):
    main(["tiny-qwen3", str(tmp_path / "model"), "--kv-heads", "2", "--layers", "1"])
    assert capsys.readouterr().out.strip() == str(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (config["model_type"], config["num_key_value_heads"], config["num_hidden_layers"]) == ("qwen3", 2, 1)


def test_command_line_reports_an_impossible_shape(tmp_path):
    with pytest.raises(SystemExit, match="num_heads=8 is not a multiple of num_kv_heads=3"):
        main(["tiny-llama", str(tmp_path / "model"), "--kv-heads", "3"])


def test_the_store_imports_no_torch():
    program = "import sys; from conflux_ray.models import store; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
