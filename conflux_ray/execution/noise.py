"""Noise of sampling: a pure function of seed, position and vocabulary index, the same numbers on every device.

Generators, one a row, are drawn from one after the other. A hash is computed for all rows at once: each has a key, and
the random bits of a token are a hash of the key and its index (a counter-based generator).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_MOST_BYTES = 64 << 20
"""Of a temporary, unless one row takes more. Smaller ones would be more launches."""

# Below, `mix` is the 64-bit mixer by Jon Maiga that Boost.ContainerHash uses (`hash_mix`), fed with multiples of the
# golden ratio as SplitMix64 is. What is sampled with a seed is part of the API: none of this may change.
_GOLDEN = 0x9E3779B97F4A7C15
_FACTOR = 0x0E9846AF9B1A615D
_WORD = 2**64 - 1


def position_keys(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.int64]:
    """Keys (rows,) of the tokens at `positions` of requests with `seeds`; both are taken modulo 2^64.

    Positions of one seed never share a key.
    """
    seed = np.array([value & _WORD for value in seeds], np.uint64)
    position = np.array([value & _WORD for value in positions], np.uint64)
    golden = np.uint64(_GOLDEN)
    return _mix(_mix(seed + golden) + position * golden).view(np.int64)


def noise_bits(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Random bits (rows, vocab) int64 of the keys (rows,) int64: `mix(key + (index + 1) * golden)`.

    Without the mixer's last step, `x ^= x >> 28`: it leaves the upper 28 bits alone, which decide the noise.
    """
    steps = torch.arange(1, vocab_size + 1, device=keys.device).mul_(_signed(_GOLDEN))
    bits = keys.unsqueeze(1) + steps
    # On the halves of each element (the low one first) `x ^= x >> 32` is one operation, in place. A shift would carry
    # the sign and would need a second tensor.
    low, high = bits.view(torch.int32).unflatten(1, (vocab_size, 2)).unbind(2)
    for _ in range(2):
        low.bitwise_xor_(high)
        bits.mul_(_FACTOR)
    return bits


def exponential_noise(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exponential noise (rows, vocab) float32 of the keys (rows,) int64, from 2^-63 to 17, never 0 or infinite.

    It has float32's relative precision where it is small, and the smallest wins: -log1p(-u) of a u in (0, 1) whose
    leading zeros come from 63 bits.
    """
    uniform = noise_bits(keys, vocab_size).to(torch.float32).abs_()
    uniform.clamp_(1.0, 2.0**63 - 2.0**39).mul_(-(2.0**-63))  # the largest float32 below 2^63
    return uniform.log1p_().neg_()


def sample_probabilities(probabilities: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """A token (rows,) int64 of each row of probabilities (rows, vocab) float32, which this overwrites.

    The token that comes first in a race of exponential clocks: argmax of p / q. Several rows at a time, so that
    temporaries stay small.
    """
    vocab_size = probabilities.shape[1]
    step = max(1, _MOST_BYTES // (8 * vocab_size))
    tokens = [
        some.div_(exponential_noise(some_keys, vocab_size)).argmax(dim=1)
        for some, some_keys in zip(probabilities.split(step), keys.split(step), strict=True)
    ]
    return tokens[0] if len(tokens) == 1 else torch.cat(tokens)


def _mix(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    factor = np.uint64(_FACTOR)
    words = (words ^ (words >> np.uint64(32))) * factor
    words = (words ^ (words >> np.uint64(32))) * factor
    return words ^ (words >> np.uint64(28))


def _signed(word: int) -> int:
    """The int64 with the same bits."""
    return word - 2**64 if word >= 2**63 else word
