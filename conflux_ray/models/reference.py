"""What a model should answer: Hugging Face transformers in float32 on the CPU, one sequence at a time.

The execution tests compare Conflux Parallelism with this, never with another run of the engine.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


class Reference:
    """A model folder loaded in float32.

    Args:
        folder: The model folder.
        attention: transformers' attention implementation, `eager` or `sdpa`.
        num_threads: Threads to compute with. One is best for small models: torch's threads wait for each other by
            spinning, which beside another busy process takes tens of times as long.
    """

    def __init__(self, folder: Path | str, attention: str = "eager", num_threads: int = 1) -> None:
        self._num_threads = num_threads
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=attention, local_files_only=True
        ).eval()
        # `generate` fills in what a call leaves out from here: the folder's end tokens, if they stayed.
        self._model.generation_config = GenerationConfig()
        self._double: Any = None
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    @torch.inference_mode()
    def greedy(self, prompt_ids: Sequence[int], max_tokens: int, eos_ids: Collection[int] = ()) -> list[int]:
        """Return the greedy continuation of `prompt_ids`, without the prompt.

        The longest continuation of each prompt is kept, so asking again costs nothing.

        Args:
            prompt_ids: The prompt, at least one token.
            max_tokens: The most tokens to return.
            eos_ids: Tokens that end the continuation; the ending token is returned, as vLLM does.
        """
        key = tuple(prompt_ids)
        known = self._until_eos(self._greedy.get(key, [])[:max_tokens], eos_ids)
        if len(known) == max_tokens or (known and known[-1] in eos_ids):
            return known
        prompt = torch.tensor([key])
        settings = GenerationConfig(
            do_sample=False, max_new_tokens=max_tokens, eos_token_id=sorted(eos_ids) or None, pad_token_id=0
        )
        with _threads(self._num_threads):
            output = self._model.generate(prompt, attention_mask=torch.ones_like(prompt), generation_config=settings)
        tokens = output[0, len(key) :].tolist()
        self._greedy[key] = tokens
        return list(tokens)

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], lost_positions: Iterable[int] = ()) -> torch.Tensor:
        """Return the teacher-forced logits, float32 [tokens, vocabulary]; row i predicts token i + 1.

        Args:
            token_ids: The tokens.
            lost_positions: Positions whose keys and values no query sees, as if their KV block had been lost; the rows
                behind them tell what that would have changed. Their own rows mean nothing.
        """
        mask = torch.ones(1, len(token_ids), dtype=torch.long)
        mask[:, list(lost_positions)] = 0
        # Given explicitly, since the default would count only the positions that the mask leaves.
        positions = torch.arange(len(token_ids))[None]
        ids = torch.tensor([list(token_ids)])
        with _threads(self._num_threads):
            return self._model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits[0]

    def rounding(self, token_ids: Sequence[int]) -> float:
        """Return the largest difference of `logits` from the same model in float64: the reference's own rounding.

        It is some 1e-5 for most prompts and 1e-3 for a few, where a deep model's activations grow very large.
        """
        if self._double is None:
            self._double = copy.deepcopy(self._model).double()
        ids = torch.tensor([list(token_ids)])
        with torch.inference_mode(), _threads(self._num_threads):
            exact = self._double(ids, use_cache=False).logits[0]
        return float((exact - self.logits(token_ids)).abs().max())

    @torch.inference_mode()
    def margin(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> torch.Tensor:
        """Return by how much the best logit exceeds the second where each of `output_ids` was chosen, [outputs].

        Below 1e-3 the choice is within reach of rounding: compare `logits` there instead of tokens.
        """
        rows = self.logits([*prompt_ids, *output_ids])[len(prompt_ids) - 1 : -1]
        best = rows.topk(2, dim=-1).values
        return best[:, 0] - best[:, 1]

    @staticmethod
    def _until_eos(tokens: list[int], eos_ids: Collection[int]) -> list[int]:
        for index, token in enumerate(tokens):
            if token in eos_ids:
                return tokens[: index + 1]
        return tokens


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
