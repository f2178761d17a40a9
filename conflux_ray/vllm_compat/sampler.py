"""Sampling with vLLM's sampler, with randomness derived from (seed, position) alone.

A token drawn twice, because a request was preempted or moved to another instance, comes out the same, and a discarded
token advances nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from conflux_ray.wire import Feature, Logprobs, Sampling

SUPPORTED_FEATURES = frozenset({Feature.SEED, Feature.LOGPROBS})
"""What `SampleBatch` honours; a request that needs more is refused before it gets here."""

_GREEDY_BELOW = 1e-5  # vLLM's own threshold


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to sample."""

    sampling: Sampling
    seed: int
    position: int  # of the sampled token in prompt and output


class TokenSampler:
    """Samples one token per row of logits."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self._sampler = Sampler()

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, rows: Sequence[SampleRow]
    ) -> tuple[torch.Tensor, list[Logprobs | None]]:
        """Sample from (rows, vocab) logits.

        Returns:
            Token ids (rows,) int64 on the device, and the log-probabilities of the rows that asked for them.
        """
        metadata = self._metadata(rows)
        out = self._sampler(logits, metadata)
        tokens = out.sampled_token_ids.view(-1).long()
        logprobs: list[Logprobs | None] = [None] * len(rows)
        if out.logprobs_tensors is not None:
            ids = out.logprobs_tensors.logprob_token_ids.cpu().numpy()
            values = out.logprobs_tensors.logprobs.cpu().numpy()
            ranks = out.logprobs_tensors.selected_token_ranks.cpu().numpy()
            for i, row in enumerate(rows):
                if row.sampling.logprobs is not None:
                    width = row.sampling.logprobs + 1
                    logprobs[i] = Logprobs.from_arrays(ids[i : i + 1, :width], values[i : i + 1, :width], ranks[i : i + 1])
        return tokens, logprobs

    def _metadata(self, rows: Sequence[SampleRow]) -> SamplingMetadata:
        greedy = [row.sampling.temperature < _GREEDY_BELOW for row in rows]
        all_greedy, all_random = all(greedy), not any(greedy)
        generators = {}
        for i, row in enumerate(rows):
            if not greedy[i]:
                generators[i] = torch.Generator(self.device).manual_seed(position_seed(row.seed, row.position))
        top_p = [row.sampling.top_p for row in rows]
        top_k = [row.sampling.top_k if 0 < row.sampling.top_k < self.vocab_size else self.vocab_size for row in rows]
        wanted = [row.sampling.logprobs for row in rows if row.sampling.logprobs is not None]
        empty = torch.empty(0, device=self.device)
        return SamplingMetadata(
            temperature=None if all_greedy else self._tensor([row.sampling.temperature for row in rows]),
            all_greedy=all_greedy,
            all_random=all_random,
            top_p=self._tensor(top_p) if not all_greedy and min(top_p) < 1 else None,
            top_k=(
                torch.tensor(top_k, dtype=torch.int32, device=self.device)
                if not all_greedy and min(top_k) < self.vocab_size
                else None
            ),
            generators=generators,
            max_num_logprobs=max(wanted) if wanted else None,
            no_penalties=True,
            prompt_token_ids=None,
            frequency_penalties=empty,
            presence_penalties=empty,
            repetition_penalties=empty,
            output_token_ids=[],
            allowed_token_ids_mask=None,
            bad_words_token_ids={},
            logitsprocs=LogitsProcessors(),
        )

    def _tensor(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device)


def position_seed(seed: int, position: int) -> int:
    """A 63-bit seed for the token at `position` of a request with `seed`."""
    return int(np.random.SeedSequence([seed & (2**64 - 1), position]).generate_state(1, np.uint64)[0]) >> 1
