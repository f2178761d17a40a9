"""Prompts as token ids: random ones, or ones that share prefixes where the trace's `hash_ids` say so.

The ids of a request depend on the point's key and its place in the trace alone, those of a shared block on the key and
the block's identity: every server gets the same prompts, in whichever process they are made. Two points share none, so
that what a server's prefix cache remembers of one is of no use in the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

LOWEST_ID = 3
"""Smaller ids are padding and the ends of sequences in most vocabularies."""
_OWN, _SHARED = 0, 1


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Makes prompts.

    Args:
        vocab_size: ids are below it.
        key: of all of them, none negative.
        block_tokens: prompt tokens that one hash id stands for: 512 in Mooncake's traces.
        shared: whether prompts with equal hash ids get equal tokens.

    Raises:
        ValueError: there is no id to choose, or no block.
    """

    vocab_size: int
    key: tuple[int, ...]
    block_tokens: int = 512
    shared: bool = True

    def __post_init__(self) -> None:
        if self.vocab_size <= LOWEST_ID + 1:
            raise ValueError(f"vocab_size={self.vocab_size} must exceed {LOWEST_ID + 1}; take the model's")
        if self.block_tokens < 1:
            raise ValueError(f"block_tokens={self.block_tokens} must be at least 1; Mooncake's traces have 512")

    def tokens(self, index: int, length: int, hash_ids: Sequence[int] = ()) -> list[int]:
        """The prompt of the trace's request `index`, `length` tokens."""
        blocks = hash_ids[: -(-length // self.block_tokens)] if self.shared else ()
        parts = [self._draw(_SHARED, hash_id, self.block_tokens) for hash_id in blocks]
        missing = length - sum(map(len, parts))
        if missing > 0:
            parts.append(self._draw(_OWN, index, missing))
        return np.concatenate(parts)[:length].tolist()

    def _draw(self, kind: int, name: int, count: int) -> np.ndarray:
        rng = np.random.default_rng([*self.key, kind, name & (1 << 63) - 1])
        return rng.integers(LOWEST_ID, self.vocab_size, count)


def completion_body(model: str, prompt: list[int], max_tokens: int, priority: int | None = None) -> bytes:
    """A streaming `/v1/completions` request for exactly `max_tokens` greedy tokens.

    Every chunk reports the tokens so far (`continuous_usage_stats`), so that tokens that come together are counted
    without sending their ids, and the prompt's with them, back.

    Args:
        model: name in the API.
        prompt: token ids.
        max_tokens: of the answer.
        priority: smaller is served first; only for servers that schedule by it.
    """
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    return msgspec.json.encode(body if priority is None else body | {"priority": priority})
