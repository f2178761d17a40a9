from __future__ import annotations

import json

import pytest

from conflux_ray.models import heads, store


def test_each_group_of_three_is_spread_over_two_copies_of_its_kv_head():
    queries, kv = heads.head_sources(9, 3, 12, 6)
    assert queries == [0, 1, 2, -1, 3, 4, 5, -1, 6, 7, 8, -1]
    assert kv == [0, 0, 1, 1, 2, 2]


def test_asking_for_the_same_heads_changes_nothing():
    assert heads.head_sources(8, 4, 8, 4) == ([0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3])


def test_copying_kv_heads_alone_needs_no_padding():
    assert heads.head_sources(4, 2, 4, 4) == ([0, 1, 2, 3], [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "message"),
    [
        (12, 4, "num_kv_heads=4 is not a multiple of the model's 3"),
        (12, 0, "num_kv_heads=0 is not a multiple of the model's 3"),
        (15, 6, "num_heads=15 is not a multiple of num_kv_heads=6"),
        (6, 6, "num_heads=6 is too few: .* use at least 12 with num_kv_heads=6"),
    ],
)
def test_impossible_form_is_refused_with_its_remedy(num_heads, num_kv_heads, message):
    with pytest.raises(ValueError, match=message):
        heads.head_sources(9, 3, num_heads, num_kv_heads)


def test_heads_that_transformers_would_refuse_are_refused_first():
    config = {"model_type": "llama", "hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    with pytest.raises(ValueError, match="num_heads=15 does not divide hidden_size=576"):
        heads.pad_heads(config, {}, 15, 3)


@pytest.mark.heavy
def test_biases_follow_their_heads():
    import torch

    config = {"hidden_size": 6, "num_attention_heads": 3, "num_key_value_heads": 1}
    name = "model.layers.0.self_attn.{}_proj.bias"
    state = {
        name.format("q"): torch.arange(6.0),
        name.format("k"): torch.tensor([7.0, 8.0]),
        name.format("o"): torch.arange(6.0),
    }
    padded, result = heads.pad_heads(config, state, 4, 2)
    assert padded["head_dim"] == 2
    assert sorted(result[name.format("q")].tolist()) == [0, 0, 0, 1, 2, 3, 4, 5]
    assert result[name.format("k")].tolist() == [7, 8, 7, 8]
    assert result[name.format("o")].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.heavy
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 8), (16, 4), (16, 8)])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_padded_tiny_model_computes_the_same(name, num_heads, num_kv_heads, tmp_path, reference):
    original = store.model_dir(name)
    heads.convert(original, tmp_path, num_heads, num_kv_heads)
    tokens = list(range(3, 512, 7))
    difference = (reference(tmp_path).logits(tokens) - reference(original).logits(tokens)).abs().max()
    assert difference < 1e-4


@pytest.mark.heavy
def test_12_6_form_of_smollm2_computes_the_same(smollm2_dir, smollm2_12_6_dir, reference):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_12_6_dir)
    config = json.loads((smollm2_12_6_dir / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (12, 6, 64)
    for text in ("What is the capital of France?", "def fibonacci(n):\n    ", "Once upon a time, " * 20):
        tokens = tokenizer.encode(text)
        difference = (reference(smollm2_12_6_dir).logits(tokens) - reference(smollm2_dir).logits(tokens)).abs().max()
        assert difference < 1e-4, text
