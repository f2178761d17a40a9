"""The best assignment of prefill tokens to ranks, by exhaustion, and how far waterfill dispatch is from it.

`python -m tests.planning.assignments` prints the gaps quoted in docs/planner.md.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Sequence

from conflux_ray.planning.dispatch import Dispatcher, waterfill
from conflux_ray.planning.latency_model import (
    Affine,
    Contention,
    GemmCurve,
    IterationEstimator,
    LatencyModel,
    chunk_work,
)


def splits(tokens: int, num_ranks: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut `tokens` into one shard for each rank."""
    if num_ranks == 1:
        yield (tokens,)
        return
    for first in range(tokens + 1):
        for rest in splits(tokens - first, num_ranks - 1):
            yield (first, *rest)


def seconds_of(
    estimator: IterationEstimator, decode_tokens: Sequence[int], shard: Sequence[int], context: int
) -> float:
    load = max(d + p for d, p in zip(decode_tokens, shard, strict=True))
    return estimator.seconds(load, max(shard), chunk_work(sum(shard), context))


def fastest_by_exhaustion(
    estimator: IterationEstimator, decode_tokens: Sequence[int], tokens: int, context: int
) -> float:
    """The least T_iter over all assignments of `tokens`."""
    return min(seconds_of(estimator, decode_tokens, shard, context) for shard in splits(tokens, len(decode_tokens)))


def fastest_by_caps(estimator: IterationEstimator, decode_tokens: Sequence[int], tokens: int, context: int) -> float:
    """The same, in polynomial time: T depends on an assignment through its largest load M and largest shard S only.

    For every S the least M with sum_r min(S, max(0, M - n_r^d)) >= tokens is best.
    """
    best = float("inf")
    work = chunk_work(tokens, context)
    most_decodes = max(decode_tokens)
    for shard in range(-(-tokens // len(decode_tokens)), tokens + 1):
        low, high = 0, most_decodes + tokens
        while low < high:
            load = (low + high) // 2
            if sum(min(shard, max(0, load - d)) for d in decode_tokens) >= tokens:
                high = load
            else:
                low = load + 1
        best = min(best, estimator.seconds(max(low, most_decodes), shard, work))
        if low <= most_decodes:
            break  # a larger shard can no longer lower the load
    return best


def random_model(rng: random.Random, num_ranks: int) -> LatencyModel:
    """A model of the shape measured on H200 (shared/facts/measurements.md), every coefficient within a factor of 3."""

    def around(value: float) -> float:
        return value * 3 ** rng.uniform(-1, 1)

    return LatencyModel(
        name="random",
        num_layers=40,
        num_ranks=num_ranks,
        gemm=GemmCurve.floor(around(180e-6), around(128), around(1e-6)),
        decode=Affine(around(1e-9), 20e-6),
        prefill=Affine(around(5e-11), 20e-6),
        comm=Affine(around(4e-8), around(80e-6)),
        contention=(Contention(1 + rng.random(), 1 + rng.random()),),
    )


def gaps(seed: int, cases: int, num_ranks: int) -> tuple[list[float], list[float]]:
    """Percent by which pure waterfill and the dispatcher's assignment are slower than the best one."""
    rng = random.Random(seed)
    pure, ours = [], []
    for _ in range(cases):
        model = random_model(rng, num_ranks)
        decodes = [rng.choice((0, rng.randint(1, 128))) for _ in range(num_ranks)]
        estimator = model.given(decodes, [2000 * d for d in decodes])
        tokens, context = rng.randint(16, 1200), rng.randint(0, 8000)
        best = fastest_by_caps(estimator, decodes, tokens, context)
        pure.append(100 * (seconds_of(estimator, decodes, waterfill(decodes, tokens), context) / best - 1))
        dispatched = Dispatcher(estimator, decodes, 1e9, 1, 100_000).assign(tokens, context)
        ours.append(100 * (dispatched.seconds / best - 1))
    return pure, ours


def main() -> None:
    print("slower than the best assignment, percent: mean / worst (share of cases with any gap)")
    for num_ranks in (2, 3, 4, 8):
        pure, ours = gaps(0, 1000, num_ranks)
        cells = [
            f"{name} {statistics.mean(g):.3f} / {max(g):.2f} ({sum(x > 1e-9 for x in g) / len(g):.0%})"
            for name, g in (("pure waterfill", pure), ("with evened shards", ours))
        ]
        print(f"N={num_ranks}: " + ", ".join(cells))


if __name__ == "__main__":
    main()
