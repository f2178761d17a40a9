from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_dir)


def test_it_answers_a_question_through_its_chat_template_and_stops(smollm2_dir, tokenizer, reference):
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    end_ids = json.loads((smollm2_dir / "generation_config.json").read_text())["eos_token_id"]
    answer = reference(smollm2_dir).greedy(prompt, 32, eos_ids=end_ids)
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_folder_says_where_a_chat_turn_ends(smollm2_dir, tokenizer):
    end_ids = json.loads((smollm2_dir / "generation_config.json").read_text())["eos_token_id"]
    assert tokenizer.convert_ids_to_tokens(end_ids) == ["<|im_end|>", "<|endoftext|>"]
    assert tokenizer.eos_token == "<|im_end|>"


def test_folder_is_an_unquantised_llama(smollm2_dir):
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["tie_word_embeddings"]
    assert "quantization_config" not in config


def test_digits_are_split_from_the_spaces_before_them(tokenizer):
    assert tokenizer.tokenize("in  2024") == ["in", "ĠĠ", "2", "0", "2", "4"]


@pytest.mark.parametrize("text", ["naïve 日本", "def f(x):\n\treturn x", "  two  spaces "])
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text
