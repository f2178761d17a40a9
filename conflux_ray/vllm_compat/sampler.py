"""Sampling with vLLM's sampler, with randomness derived from (seed, position) alone.

A token drawn twice, because a request was preempted or moved to another instance, comes out the same, and a discarded
token advances nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from conflux_ray.execution.noise import position_keys, sample_probabilities
from conflux_ray.wire import Feature, Logprobs, Sampling

SUPPORTED_FEATURES = frozenset({Feature.SEED, Feature.LOGPROBS})
"""What `TokenSampler` honours; a request that needs more is refused before it gets here."""

_GREEDY_BELOW = 1e-5  # vLLM's own threshold


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One token to sample."""

    sampling: Sampling
    seed: int
    position: int  # of the sampled token in prompt and output


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The rows of one iteration and vLLM's description of them, on the device."""

    rows: Sequence[SampleRow]
    metadata: SamplingMetadata


@dataclass(frozen=True, slots=True)
class Sampled:
    """Sampled tokens (rows,) int64 and, if any row asked, its alternatives' ids, log-probabilities and ranks."""

    tokens: torch.Tensor
    logprob_ids: torch.Tensor | None = None  # (rows, 1 + most alternatives)
    logprobs: torch.Tensor | None = None
    ranks: torch.Tensor | None = None  # (rows,)

    def to_host(self, fetch: Callable[[torch.Tensor], torch.Tensor]) -> Sampled:
        """The same through `fetch`."""
        parts = (self.tokens, self.logprob_ids, self.logprobs, self.ranks)
        return Sampled(*(None if part is None else fetch(part) for part in parts))

    def logprobs_of(self, batch: SamplingBatch) -> list[Logprobs | None]:
        """Log-probabilities of the rows that asked for them; the tensors are in the host's memory."""
        found: list[Logprobs | None] = [None] * len(batch.rows)
        if self.logprob_ids is None or self.logprobs is None or self.ranks is None:
            return found
        ids, values, ranks = self.logprob_ids.numpy(), self.logprobs.numpy(), self.ranks.numpy()
        for i, row in enumerate(batch.rows):
            if row.sampling.logprobs is not None:
                width = row.sampling.logprobs + 1
                found[i] = Logprobs.from_arrays(ids[i : i + 1, :width], values[i : i + 1, :width], ranks[i : i + 1])
        return found


class KeyedTopKTopPSampler(torch.nn.Module):
    """In the place of vLLM's `TopKTopPSampler`: the same truncation, but noise of all rows at once."""

    def forward(
        self, logits: torch.Tensor, keys: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, None]:
        """Tokens (rows,) of (rows, vocab) logits, which this overwrites; no log-probabilities after truncation.

        Args:
            logits: after temperature.
            keys: of the rows' noise, where vLLM hands on generators.
            k: most tokens of each row.
            p: least sum of their probabilities.
        """
        probabilities = apply_top_k_top_p(logits, k, p).softmax(dim=-1, dtype=torch.float32)
        return sample_probabilities(probabilities, keys), None


class TokenSampler:
    """Samples one token per row of logits.

    Args:
        device: of the logits.
        vocab_size: of the model.
        upload: copies an array to the device, in time for `sample`.
    """

    def __init__(
        self, device: torch.device, vocab_size: int, upload: Callable[[npt.NDArray[Any]], torch.Tensor]
    ) -> None:
        self.device = device
        self.vocab_size = vocab_size
        self._upload = upload
        self._sampler = Sampler()
        self._sampler.topk_topp_sampler = KeyedTopKTopPSampler()

    def prepare(self, rows: Sequence[SampleRow]) -> SamplingBatch:
        """Describe the rows of an iteration, before its forward pass."""
        return SamplingBatch(rows, self._metadata(rows))

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, batch: SamplingBatch) -> Sampled:
        """Sample from (rows, vocab) logits, which this overwrites; nothing waits for the device."""
        out = self._sampler(logits, batch.metadata)
        tokens = out.sampled_token_ids.view(-1).long()
        if out.logprobs_tensors is None:
            return Sampled(tokens)
        tensors = out.logprobs_tensors
        return Sampled(tokens, tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks)

    def _metadata(self, rows: Sequence[SampleRow]) -> SamplingMetadata:
        greedy = [row.sampling.temperature < _GREEDY_BELOW for row in rows]
        all_greedy, all_random = all(greedy), not any(greedy)
        keys: Any = {}
        if not all_greedy:
            keys = self._upload(position_keys([row.seed for row in rows], [row.position for row in rows]))
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
                self._upload(np.array(top_k, np.int32)) if not all_greedy and min(top_k) < self.vocab_size else None
            ),
            generators=keys,  # handed on unread to what takes the place of vLLM's TopKTopPSampler
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
        return self._upload(np.array(values, np.float32))
