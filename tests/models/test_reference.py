from __future__ import annotations

import json

import pytest

from conflux_ray.models import store, tiny

pytestmark = pytest.mark.heavy

PROMPT = list(range(10, 50))


@pytest.fixture(scope="module")
def model(reference):
    return reference(store.model_dir("tiny-llama"))


def test_cached_decoding_follows_the_teacher_forced_logits(model):
    output = model.greedy(PROMPT, 24)
    assert model.logits(PROMPT + output)[len(PROMPT) - 1 : -1].argmax(-1).tolist() == output


def test_shorter_and_longer_continuations_agree(model):
    assert model.greedy(PROMPT, 8) == model.greedy(PROMPT, 32)[:8] == model.greedy(PROMPT, 8)


def test_end_token_ends_the_continuation_and_is_returned(model):
    output = model.greedy(PROMPT, 16)
    end = output[9]
    assert model.greedy(PROMPT, 16, eos_ids=[end]) == output[: output.index(end) + 1]


def test_continuation_cut_at_an_end_token_goes_on_without_it(tmp_path, model):
    from conflux_ray.models.reference import Reference

    output = model.greedy(PROMPT, 16)
    fresh = Reference(store.model_dir("tiny-llama"))
    fresh.greedy(PROMPT, 16, eos_ids=[output[3]])
    assert fresh.greedy(PROMPT, 16) == output


def test_end_tokens_of_the_folder_do_not_count(tmp_path, model):
    from conflux_ray.models.reference import Reference

    output = model.greedy(PROMPT, 16)
    folder = tiny.write(tmp_path / "model", tiny.TinyModel())
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": output[0]}))
    assert Reference(folder).greedy(PROMPT, 16) == output


def test_margin_is_the_lead_of_the_chosen_logit(model):
    output = model.greedy(PROMPT, 4)
    row = model.logits(PROMPT + output)[len(PROMPT) - 1].sort(descending=True).values
    assert model.margin(PROMPT, output)[0] == row[0] - row[1]


def test_lost_positions_change_nothing_before_them(model):
    full, lossy = model.logits(PROMPT), model.logits(PROMPT, range(16, 32))
    assert (full[:16] - lossy[:16]).abs().max() < 1e-4
    assert (full[32:] - lossy[32:]).abs().max() > 0.1
