"""Noise of sampling: the numbers written down, their distribution and independence, nothing of the batch in them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

pytestmark = pytest.mark.heavy

torch = pytest.importorskip("torch")
from conflux_ray.execution import noise  # noqa: E402
from conflux_ray.execution.noise import (  # noqa: E402
    exponential_noise,
    noise_bits,
    position_keys,
    sample_probabilities,
)

WORD = 2**64 - 1
EXTREMES = [0, 1, -1, 2**31, 2**32, 2**63 - 1, -(2**63)]  # seeds
SEEDS = [0, 1, 5, -1, 2**63 - 1]


def keys(seeds: Sequence[int], positions: Sequence[int]) -> torch.Tensor:
    return torch.from_numpy(position_keys(seeds, positions))


def of_seed(seed: int, count: int, start: int = 0) -> torch.Tensor:
    """Keys of consecutive positions."""
    return keys([seed] * count, range(start, start + count))


def of_position(position: int, count: int) -> torch.Tensor:
    """Keys of consecutive seeds."""
    return keys(range(count), [position] * count)


def draw(probabilities: Sequence[float], drawn_with: torch.Tensor) -> np.ndarray:
    """One token for each key."""
    return sample_probabilities(torch.tensor(probabilities).repeat(len(drawn_with), 1), drawn_with).numpy()


def unusual(counts: np.ndarray, expected: np.ndarray | float) -> bool:
    """Whether a chi-square statistic is one of the largest in ten thousand (Wilson and Hilferty's approximation)."""
    freedom = counts.size - 1
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
    return bool(((counts - expected) ** 2 / expected).sum() > limit)


def kolmogorov(uniform: np.ndarray) -> float:
    """The distance from the uniform distribution times the root of the number; above 2.2 once in ten thousand."""
    ordered = np.sort(uniform.ravel().astype(np.float64))
    return float(np.abs(ordered - (np.arange(ordered.size) + 0.5) / ordered.size).max()) * math.sqrt(ordered.size)


class TestNumbers:
    """Tokens of a seed are part of the API: whatever changes a number here changes what clients were given."""

    def test_keys(self) -> None:
        found = position_keys([0, 1, -1, 2**63 - 1, -(2**63), 42], [0, 1, 2, 3, 2**62, 17])
        assert found.dtype == np.int64
        assert [key & WORD for key in found.tolist()] == [
            0xBF344FB889235D92,
            0x02224145BB68AFB7,
            0x173A6E8A77381497,
            0x1E87FCB109BE4797,
            0x611C4E3CDD648536,
            0x625A213957F037D0,
        ]

    def test_bits(self) -> None:
        bits = noise_bits(keys([0, 42], [0, 17]), 152064)[:, [0, 1, 152063]]
        assert [[word & WORD for word in row] for row in bits.tolist()] == [
            [0xB1F9E447F3B32B28, 0x0FC6AE1EAD9BFADA, 0x67EFFAA0B2486234],
            [0x587C3616BE86007B, 0xFF09D0AFF73AEDA0, 0x5FE464A8580ADF78],
        ]

    def test_noise(self) -> None:
        found = exponential_noise(keys([0, 42], [0, 17]), 3).tolist()
        expected = [[0.940480, 0.131534, 0.735851], [1.175355, 0.00754135, 0.161694]]
        for row, values in zip(found, expected, strict=True):
            assert row == pytest.approx(values, rel=1e-5)

    def test_tokens(self) -> None:
        tokens = draw([0.3, 0.25, 0.2, 0.15, 0.1], of_seed(42, 24)).tolist()
        assert tokens == [1, 0, 0, 1, 4, 4, 3, 0, 0, 1, 2, 3, 0, 2, 2, 1, 2, 1, 1, 0, 4, 3, 2, 0]

    def test_keys_and_bits_are_the_named_mixer_of_multiples_of_the_golden_ratio(self) -> None:
        golden, factor = 0x9E3779B97F4A7C15, 0xE9846AF9B1A615D

        def mix(x: int, last: bool = True) -> int:
            for _ in range(2):
                x = (x ^ x >> 32) * factor & WORD
            return x ^ x >> 28 if last else x

        positions = [0, 1, 77, 2**31, 2**32, 2**62, 2**63]
        for seed in EXTREMES:
            expected = [mix(mix(seed + golden & WORD) + position * golden & WORD) for position in positions]
            row_keys = keys([seed] * len(positions), positions)
            assert [key & WORD for key in row_keys.tolist()] == expected
            for key, row in zip(expected, noise_bits(row_keys, 9).tolist(), strict=True):
                words = [word & WORD for word in row]
                assert words == [mix(key + i * golden & WORD, last=False) for i in range(1, 10)]
                assert [word >> 36 for word in words] == [mix(key + i * golden & WORD) >> 36 for i in range(1, 10)]


class TestKeys:
    def test_no_two_positions_or_seeds_share_one(self) -> None:
        positions = [*range(500), 2**31, 2**32, 2**62, 2**63 - 1]
        found = [key for seed in EXTREMES for key in position_keys([seed] * len(positions), positions).tolist()]
        assert len(set(found)) == len(found)

    def test_seed_and_position_are_not_exchangeable(self) -> None:
        assert position_keys([5], [6]) != position_keys([6], [5])

    @pytest.mark.parametrize("of", ["seed", "position"])
    def test_every_bit_of_a_seed_or_position_turns_every_bit_of_noise_half_of_the_time(self, of: str) -> None:
        rng = np.random.default_rng(0)
        pairs = rng.integers(0, 2**63, (2, 2000)).tolist()
        places = np.arange(64, dtype=np.uint64)

        def bits(seeds: list[int], positions: list[int]) -> np.ndarray:
            words = noise_bits(keys(seeds, positions), 1).numpy().view(np.uint64)
            return words >> places & np.uint64(1)

        before = bits(*pairs)
        for bit in range(63):
            turned = [value ^ 1 << bit for value in pairs[of == "position"]]
            after = bits(turned, pairs[1]) if of == "seed" else bits(pairs[0], turned)
            share = (before != after).mean(axis=0)
            assert np.abs(share - 0.5).max() < 5.5 * 0.5 / math.sqrt(2000)


class TestDistribution:
    @pytest.mark.parametrize("seed", SEEDS)
    def test_noise_is_exponential(self, seed: int) -> None:
        drawn = exponential_noise(of_seed(seed, 100), 5000).double().numpy()
        assert kolmogorov(-np.expm1(-drawn)) < 2.2

    @pytest.mark.parametrize("seed", SEEDS)
    def test_so_is_the_least_of_many_which_decides_the_race(self, seed: int) -> None:
        vocab_size = 20000
        least = exponential_noise(of_seed(seed, 1000), vocab_size).double().amin(dim=1).numpy()
        assert kolmogorov(-np.expm1(-vocab_size * least)) < 2.2

    @pytest.mark.parametrize("shift", [0, 12, 24, 36, 48])
    def test_so_are_the_bits_below_the_leading_ones(self, shift: int) -> None:
        magnitudes = noise_bits(of_seed(3, 100), 5000).abs().numpy()
        counts = np.bincount((magnitudes >> (51 - shift) & 4095).ravel(), minlength=4096)
        assert not unusual(counts, magnitudes.size / 4096)

    @pytest.mark.parametrize("word", [0, 1, -1, 2**63 - 1, -(2**63), -(2**63) + 1, 2**62])
    def test_no_word_gives_zero_or_infinity(self, monkeypatch: pytest.MonkeyPatch, word: int) -> None:
        monkeypatch.setattr(noise, "noise_bits", lambda keys, vocab_size: torch.tensor([[word]]))
        value = float(exponential_noise(of_seed(0, 1), 1))
        assert 2.0**-64 < value < 17

    def test_small_noise_has_all_the_precision_of_float32(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(noise, "noise_bits", lambda keys, vocab_size: torch.tensor([[2**23 - 1, -(2**23)]]))
        first, second = exponential_noise(of_seed(0, 1), 2)[0].tolist()
        assert (first, second) == ((2**23 - 1) * 2.0**-63, 2.0**-40)

    @pytest.mark.parametrize("seed", [*SEEDS, -(2**63)])
    @pytest.mark.parametrize("start", [0, 2**40, 2**62])
    def test_tokens_follow_the_probabilities(self, seed: int, start: int) -> None:
        p = torch.tensor([2.0, 1.7, 1.1, 0.8, 0.0, -0.9, -2.6, -4.0]).softmax(0)
        tokens = draw(p.tolist(), of_seed(seed, 20000, start))
        assert not unusual(np.bincount(tokens, minlength=8), 20000 * p.numpy())

    def test_tokens_of_a_large_vocabulary_follow_them_too(self) -> None:
        vocab_size = 16384
        tokens = draw([1 / vocab_size] * vocab_size, of_seed(9, 4000))
        assert not unusual(np.bincount(tokens // 256, minlength=64), 4000 / 64)
        assert not unusual(np.bincount(tokens % 64, minlength=64), 4000 / 64)


class TestIndependence:
    @pytest.mark.parametrize("distance", [1, 2, 4, 16, 64, 256])
    def test_tokens_of_near_positions_and_seeds_come_in_all_pairs(self, distance: int) -> None:
        p = np.array([0.4, 0.3, 0.2, 0.1], np.float32)
        count = 40 * 1024
        for drawn_with in (of_seed(5, count), of_seed(-1, count, 2**32), of_position(7, count)):
            tokens = draw(p.tolist(), drawn_with)
            pairs = tokens.reshape(-1, 2, distance)  # each token once, so that pairs are independent
            counts = np.bincount((4 * pairs[:, 0] + pairs[:, 1]).ravel(), minlength=16)
            assert not unusual(counts, counts.sum() * np.outer(p, p).ravel())

    def test_noise_of_positions_seeds_and_indices_is_uncorrelated(self) -> None:
        for drawn_with in (of_seed(11, 400), of_position(11, 400)):
            uniform = torch.expm1(-exponential_noise(drawn_with, 3000).double()).numpy()
            for rows in (uniform, uniform.T):
                centred = rows - rows.mean(axis=1, keepdims=True)
                centred /= np.linalg.norm(centred, axis=1, keepdims=True)
                correlations = (centred @ centred.T)[np.triu_indices(len(rows), 1)]
                # The largest of n normal values is about sqrt(2 ln n); half a standard deviation more is rare.
                largest = np.abs(correlations).max() * math.sqrt(rows.shape[1])
                assert largest < math.sqrt(2 * math.log(correlations.size)) + 1
                assert abs(correlations.mean()) * math.sqrt(correlations.size * rows.shape[1]) < 4


class TestPurity:
    PROBABILITIES = torch.randn(40, 300, generator=torch.Generator().manual_seed(0)).softmax(1)

    def tokens(self, rows: Sequence[int]) -> list[int]:
        return sample_probabilities(self.PROBABILITIES[rows], keys([i % 7 - 3 for i in rows], rows)).tolist()

    def test_a_token_depends_on_neither_the_other_rows_nor_their_order_nor_their_number(self) -> None:
        together = self.tokens(range(40))
        assert [self.tokens([i])[0] for i in range(40)] == together
        order = np.random.default_rng(1).permutation(40).tolist()
        assert self.tokens(order) == [together[i] for i in order]
        assert self.tokens([8] * 5) == [together[8]] * 5

    def test_drawing_again_gives_the_same_and_disturbs_no_generator(self) -> None:
        state = torch.get_rng_state()
        assert self.tokens(range(40)) == self.tokens(range(40))
        assert torch.equal(torch.get_rng_state(), state)

    def test_noise_of_an_index_does_not_depend_on_the_size_of_the_vocabulary(self) -> None:
        row_keys = of_seed(4, 3)
        assert torch.equal(noise_bits(row_keys, 5), noise_bits(row_keys, 50000)[:, :5])

    @pytest.mark.parametrize("num_rows", [1, 3, 7, 39, 1000])
    def test_nor_on_how_many_rows_are_computed_at_a_time(self, monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
        together = self.tokens(range(40))
        largest = 0

        def recorded(row_keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
            nonlocal largest
            bits = noise_bits(row_keys, vocab_size)
            largest = max(largest, bits.nbytes)
            return bits

        monkeypatch.setattr(noise, "_MOST_BYTES", num_rows * 300 * 8)
        monkeypatch.setattr(noise, "noise_bits", recorded)
        assert self.tokens(range(40)) == together
        assert largest == min(num_rows, 40) * 300 * 8


class TestExtremes:
    def test_a_vocabulary_of_one(self) -> None:
        assert draw([1.0], of_seed(1, 50)).tolist() == [0] * 50

    def test_a_certain_token_is_always_taken(self) -> None:
        assert draw([0.0, 0.0, 1.0, 0.0], of_seed(1, 5000)).tolist() == [2] * 5000

    def test_a_certain_token_is_taken_with_the_largest_and_least_noise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        words = torch.tensor([[0, 2**63 - 1, 0], [0, -(2**63), 0], [2**63 - 1, 0, 2**63 - 1]])
        monkeypatch.setattr(noise, "noise_bits", lambda keys, vocab_size: words)
        assert draw([0.0, 1.0, 0.0], of_seed(1, 3)).tolist() == [1, 1, 1]

    def test_a_token_whose_probability_underflows_is_never_taken(self) -> None:
        p = torch.tensor([-200.0, 0.0, -float("inf"), 0.0, -120.0]).softmax(0).tolist()
        assert p[0] == p[2] == p[4] == 0
        assert set(draw(p, of_seed(1, 5000)).tolist()) == {1, 3}

    def test_denormal_probabilities_do_not_disturb_the_rest(self) -> None:
        tokens = draw([1e-40, 0.5, 1e-45, 0.5], of_seed(2, 10000))
        assert not unusual(np.bincount(tokens, minlength=4)[[1, 3]], 5000.0)


@pytest.mark.gpu
class TestGpu:
    def test_the_bits_are_those_of_the_cpu(self) -> None:
        row_keys = torch.cat([keys(EXTREMES, [2**62] * len(EXTREMES)), of_seed(5, 20)])
        assert torch.equal(noise_bits(row_keys.cuda(), 152064).cpu(), noise_bits(row_keys, 152064))

    def test_the_noise_differs_by_the_rounding_of_the_logarithm(self) -> None:
        row_keys = of_seed(5, 20)
        found = exponential_noise(row_keys.cuda(), 152064).cpu()
        torch.testing.assert_close(found, exponential_noise(row_keys, 152064), rtol=1e-6, atol=0)

    def test_tokens_are_those_of_the_cpu_and_nothing_waits_for_the_gpu(self) -> None:
        p = torch.randn(128, 152064, generator=torch.Generator().manual_seed(0)).softmax(1)
        row_keys = of_seed(6, 128)
        on_gpu, gpu_keys = p.cuda(), row_keys.cuda()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = sample_probabilities(on_gpu, gpu_keys)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        # Two scores as near as the logarithm's rounding may change places: far less than one row in a thousand.
        assert torch.equal(found.cpu(), sample_probabilities(p, row_keys))
