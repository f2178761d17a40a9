"""Sampling: the distribution asked for, the same token for the same (seed, position), and the log-probabilities."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from conflux_ray.wire import Sampling

pytestmark = pytest.mark.heavy

VOCAB = 12
LOGITS = np.array([2.0, 1.7, 1.5, 1.1, 0.8, 0.3, 0.0, -0.4, -0.9, -1.3, -2.0, -2.6], np.float32)
DRAWS = 3000


@pytest.fixture(scope="module")
def sampler() -> Any:
    import torch

    from conflux_ray.vllm_compat.sampler import TokenSampler

    return TokenSampler(torch.device("cpu"), VOCAB, lambda array: torch.from_numpy(array.copy()))


def draw(sampler: Any, rows: list[tuple[Sampling, int, int]], logits: np.ndarray | None = None) -> Any:
    """Sample `(sampling, seed, position)` rows from LOGITS; returns the batch and what was sampled."""
    import torch

    from conflux_ray.vllm_compat.sampler import SampleRow

    batch = sampler.prepare([SampleRow(*row) for row in rows])
    values = np.tile(LOGITS, (len(rows), 1)) if logits is None else logits
    return batch, sampler.sample(torch.from_numpy(values.copy()), batch)


def tokens(sampler: Any, rows: list[tuple[Sampling, int, int]]) -> list[int]:
    return draw(sampler, rows)[1].tokens.tolist()


def probabilities(temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """What is asked for: temperature, then the k likeliest, then the fewest whose sum reaches p."""
    scaled = LOGITS.astype(np.float64) / temperature
    kept = np.exp(scaled - scaled.max())
    order = np.argsort(-kept)
    kept[order[top_k or VOCAB :]] = 0
    kept /= kept.sum()
    before = np.cumsum(kept[order]) - kept[order]
    kept[order[before >= top_p]] = 0
    return kept / kept.sum()


def chi_square_limit(freedom: int) -> float:
    """Exceeded once in ten thousand (Wilson and Hilferty's approximation); the seeds are fixed, so never by chance."""
    return freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 0, 1.0), (1.0, 4, 1.0), (1.0, 0, 0.7), (0.8, 6, 0.9), (1.5, 3, 0.5)],
)
def test_tokens_follow_the_distribution_asked_for(sampler: Any, temperature: float, top_k: int, top_p: float) -> None:
    sampling = Sampling(1, temperature=temperature, top_k=top_k, top_p=top_p)
    counts = np.bincount(tokens(sampler, [(sampling, 5, i) for i in range(DRAWS)]), minlength=VOCAB)
    expected = DRAWS * probabilities(temperature, top_k, top_p)
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert statistic < chi_square_limit(int(possible.sum()) - 1)


def test_tokens_of_neighbouring_positions_and_seeds_are_independent(sampler: Any) -> None:
    sampling = Sampling(1, top_k=2)
    by_position = tokens(sampler, [(sampling, 5, i) for i in range(DRAWS)])
    by_seed = tokens(sampler, [(sampling, i, 5) for i in range(DRAWS)])
    p = probabilities(1.0, 2, 1.0)[:2]
    for drawn in (by_position, by_seed):
        pairs = Counter(pairwise(drawn))
        expected = {(a, b): (DRAWS - 1) * p[a] * p[b] for a in range(2) for b in range(2)}
        assert sum((pairs[pair] - e) ** 2 / e for pair, e in expected.items()) < chi_square_limit(3)


def test_a_token_depends_on_seed_and_position_not_on_the_batch(sampler: Any) -> None:
    row = (Sampling(1, temperature=0.9, top_k=8), 42, 17)
    alone = tokens(sampler, [row])
    others = [
        (Sampling(1, temperature=0.0), 1, 1),
        (Sampling(1, top_p=0.4), 42, 18),
        (Sampling(1, temperature=1.7), 43, 17),
        (Sampling(1, top_k=1, logprobs=3), 42, 17),
    ]
    for at in range(len(others) + 1):
        assert tokens(sampler, [*others[:at], row, *others[at:]])[at] == alone[0]
    assert tokens(sampler, [row] * 3) == alone * 3


def test_drawing_again_advances_nothing(sampler: Any) -> None:
    rows = [(Sampling(1), 7, position) for position in range(20)]
    first = tokens(sampler, rows)
    tokens(sampler, [(Sampling(1), 7, 20)])  # a token that is discarded
    assert tokens(sampler, rows) == first


def test_greedy_rows_take_the_best_token_in_any_batch(sampler: Any) -> None:
    greedy = (Sampling(1, temperature=0.0, top_k=5, top_p=0.1), 3, 3)
    assert tokens(sampler, [greedy]) == [0]
    mixed = tokens(sampler, [(Sampling(1, temperature=3.0), 1, i) if i % 2 else greedy for i in range(40)])
    assert mixed[::2] == [0] * 20
    assert len(set(mixed[1::2])) > 3


def test_a_temperature_below_vllms_threshold_is_greedy(sampler: Any) -> None:
    assert tokens(sampler, [(Sampling(1, temperature=9e-6), 1, i) for i in range(5)]) == [0] * 5


def test_logprobs_are_those_of_the_model_before_temperature_and_truncation(sampler: Any) -> None:
    rows = [
        (Sampling(1, temperature=0.0, logprobs=2), 0, 0),
        (Sampling(1), 0, 1),
        (Sampling(1, temperature=2.0, top_k=6, logprobs=0), 9, 2),
    ]
    batch, sampled = draw(sampler, rows)
    best, unasked, only = sampled.logprobs_of(batch)
    want = LOGITS - np.log(np.exp(LOGITS.astype(np.float64)).sum())
    assert unasked is None
    ids, values, ranks = best.arrays()
    assert ids.tolist() == [[0, 0, 1]]  # the sampled token, then the two best
    np.testing.assert_allclose(values[0], want[[0, 0, 1]], atol=1e-6)
    assert ranks.tolist() == [1]
    ids, values, ranks = only.arrays()
    token = int(sampled.tokens[2])
    assert ids.tolist() == [[token]]
    np.testing.assert_allclose(values[0], want[[token]], atol=1e-6)
    assert ranks.tolist() == [token + 1]  # LOGITS fall with the token id


def test_alternatives_and_ranks_are_those_of_each_rows_own_logits(sampler: Any) -> None:
    logits = np.random.default_rng(3).normal(size=(50, VOCAB)).astype(np.float32)
    widths = [i % 5 for i in range(50)]
    rows = [(Sampling(1, temperature=1.5, logprobs=width), 11, i) for i, width in enumerate(widths)]
    batch, sampled = draw(sampler, rows, logits)
    want = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    for row, token, width, found in zip(want, sampled.tokens.tolist(), widths, sampled.logprobs_of(batch), strict=True):
        best = np.argsort(-row)
        ids, values, ranks = found.arrays()
        assert ids.tolist() == [[token, *best[:width]]]
        np.testing.assert_allclose(values[0], row[ids[0]], atol=1e-5)
        assert ranks.tolist() == [best.tolist().index(token) + 1]


def test_without_a_request_for_them_there_are_no_logprobs(sampler: Any) -> None:
    batch, sampled = draw(sampler, [(Sampling(1), 0, 0)] * 2)
    assert sampled.logprobs_of(batch) == [None, None]
    assert sampled.logprobs is None


def test_tokens_of_a_seed_stay_what_they_are(sampler: Any) -> None:
    """The same seed gives the same text: a change here changes what clients were given."""
    plain = tokens(sampler, [(Sampling(1), 42, i) for i in range(16)])
    truncated = tokens(sampler, [(Sampling(1, temperature=0.8, top_k=6, top_p=0.9), -1, 2**40 + i) for i in range(16)])
    assert plain == [1, 0, 0, 1, 4, 4, 3, 0, 0, 1, 6, 3, 0, 7, 2, 1]
    assert truncated == [1, 2, 0, 0, 1, 0, 1, 1, 1, 0, 4, 0, 2, 1, 2, 1]


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("start", [0, 2**31, 2**62])
def test_any_seed_and_position_is_sampled_with(sampler: Any, seed: int, start: int) -> None:
    counts = np.bincount(tokens(sampler, [(Sampling(1), seed, start + i) for i in range(DRAWS)]), minlength=VOCAB)
    expected = DRAWS * probabilities(1.0, 0, 1.0)
    assert ((counts - expected) ** 2 / expected).sum() < chi_square_limit(VOCAB - 1)


def test_truncation_does_not_change_the_noise(sampler: Any) -> None:
    free = tokens(sampler, [(Sampling(1), 8, i) for i in range(200)])
    few = tokens(sampler, [(Sampling(1, top_k=4), 8, i) for i in range(200)])
    assert [b for a, b in zip(free, few, strict=True) if a < 4] == [a for a in free if a < 4]
    assert max(few) == 3 < max(free)


def test_a_batch_of_greedy_rows_uploads_nothing_and_makes_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from conflux_ray.execution import noise
    from conflux_ray.vllm_compat.sampler import TokenSampler

    def refused(*_: Any) -> Any:
        raise AssertionError

    monkeypatch.setattr(noise, "noise_bits", refused)
    greedy = TokenSampler(torch.device("cpu"), VOCAB, refused)
    assert tokens(greedy, [(Sampling(1, temperature=0.0), i, i) for i in range(9)]) == [0] * 9


def test_a_vocabulary_of_one() -> None:
    import torch

    from conflux_ray.vllm_compat.sampler import TokenSampler

    single = TokenSampler(torch.device("cpu"), 1, lambda array: torch.from_numpy(array.copy()))
    rows = [(Sampling(1, temperature=temperature, top_k=1), 3, 4) for temperature in (0.0, 1.0, 2.0)]
    assert draw(single, rows, np.zeros((3, 1), np.float32))[1].tokens.tolist() == [0] * 3


def test_logits_of_which_only_one_is_finite_or_by_far_the_largest_leave_no_choice(sampler: Any) -> None:
    logits = np.full((2, VOCAB), -np.inf, np.float32)
    logits[0, 7] = 0.0
    logits[1] = LOGITS - 1e4
    logits[1, 5] = 1e4
    for position in range(50):
        assert draw(sampler, [(Sampling(1), 1, position)] * 2, logits)[1].tokens.tolist() == [7, 5]
