from __future__ import annotations

from itertools import pairwise
from statistics import mean

import numpy as np
import pytest

from conflux_ray.models import store, tiny

BLOCK = 16
PROMPT_LEN = 6 * BLOCK
OUTPUT_LEN = 48
ARCHITECTURES = pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])


def prompts(count: int) -> list[list[int]]:
    return np.random.default_rng(1).integers(0, 512, (count, PROMPT_LEN)).tolist()


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_weights_depend_on_the_seed_alone(architecture):
    first, again, other = (tiny.TinyModel(architecture=architecture, seed=seed).weights() for seed in (5, 5, 6))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not any(np.array_equal(first[name], other[name]) for name in first)


def test_more_layers_leave_the_other_weights_alone():
    few, many = tiny.TinyModel(num_layers=2).weights(), tiny.TinyModel(num_layers=4).weights()
    assert all(np.array_equal(few[name], many[name]) for name in few)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"architecture": "mamba"}, "architecture='mamba' is not one of llama, qwen3"),
        ({"num_kv_heads": 3}, "num_heads=8 is not a multiple of num_kv_heads=3"),
        ({"num_heads": 12}, "hidden_size=64 is not a multiple of num_heads=12"),
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"head_dim": 15}, "head_dim=15 must be even"),
        ({"seed": -1}, "seed=-1 must not be negative"),
    ],
)
def test_impossible_shape_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        tiny.TinyModel(**shape)


def test_vocabulary_that_the_byte_tokenizer_cannot_fill_is_refused(tmp_path):
    with pytest.raises(ValueError, match="vocab_size=100 is outside 259 to 9095"):
        tiny.write(tmp_path / "model", tiny.TinyModel(vocab_size=100))


def test_vocabulary_smaller_than_the_given_tokenizer_is_refused(tmp_path):
    other = tiny.write(tmp_path / "other", tiny.TinyModel(vocab_size=1000))
    with pytest.raises(ValueError, match="use vocab_size=1000"):
        tiny.write(tmp_path / "model", tiny.TinyModel(), tokenizer_from=other)


def test_given_tokenizer_is_used(tmp_path):
    other = tiny.write(tmp_path / "other", tiny.TinyModel(vocab_size=300))
    folder = tiny.write(tmp_path / "model", tiny.TinyModel(), tokenizer_from=other)
    assert (folder / "tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()


@pytest.mark.heavy
@ARCHITECTURES
def test_losing_any_block_changes_most_greedy_tokens(name, reference):
    model = reference(store.model_dir(name))
    rows = slice(PROMPT_LEN - 1, PROMPT_LEN + OUTPUT_LEN - 1)
    changed: dict[int, list[float]] = {start: [] for start in range(0, PROMPT_LEN, BLOCK)}
    for prompt in prompts(3):
        output = model.greedy(prompt, OUTPUT_LEN)
        for start, fractions in changed.items():
            tokens = model.logits(prompt + output, range(start, start + BLOCK))[rows].argmax(-1).tolist()
            fractions.append(mean(a != b for a, b in zip(tokens, output, strict=True)))
    assert min(mean(fractions) for fractions in changed.values()) > 0.5


@pytest.mark.heavy
@ARCHITECTURES
def test_greedy_continuations_are_varied(name, reference):
    model = reference(store.model_dir(name))
    outputs = [model.greedy(prompt, OUTPUT_LEN) for prompt in prompts(3)]
    for output in outputs:
        assert mean(a == b for a, b in pairwise(output)) < 0.1
        assert len(set(output)) > OUTPUT_LEN / 2
    assert len(set(map(tuple, outputs))) == len(outputs)


@pytest.mark.heavy
@ARCHITECTURES
def test_greedy_choices_are_clear_of_rounding(name, reference):
    model = reference(store.model_dir(name))
    margins = [float(margin) for p in prompts(3) for margin in model.margin(p, model.greedy(p, OUTPUT_LEN))]
    assert mean(margin > 1e-3 for margin in margins) > 0.97


@pytest.mark.heavy
@ARCHITECTURES
def test_attention_implementations_agree_far_below_the_tolerance(name, reference):
    from conflux_ray.models.reference import Reference

    folder = store.model_dir(name)
    tokens = prompts(1)[0]
    difference = (reference(folder).logits(tokens) - Reference(folder, attention="sdpa").logits(tokens)).abs().max()
    assert difference < 5e-5


@pytest.mark.heavy
def test_every_token_decodes_and_text_survives():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(store.model_dir("tiny-llama"))
    assert None not in tokenizer.convert_ids_to_tokens(range(512))
    assert tokenizer.decode(tokenizer.encode("Hello the world, é\n  12")) == "Hello the world, é\n  12"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
