"""What the profiler measures: a grid for each component, and random heterogeneous batches (section 8.5).

The paper's ranges are the defaults: 32-10K prefill tokens, 1-128 decodes of a rank, contexts of 1K-16K tokens, ranks
even and skewed. Where the upper ends are lowered, the lower ends follow. Everything here is a function of `Ranges` and
a seed, so an interrupted run knows what is left.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from conflux_ray.planning.latency_model import IterationLoad

PARTS = ("gemm", "decode", "prefill", "comm", "transfer", "host")
"""Components that are measured alone."""

MIN_PREFILL = 32
CONTEXT_RATIO = 16
"""The largest context is this many times the smallest."""
NUM_MIXES = 3
"""How the attention paths of a mixed batch compare: either, the decodes' longer, the prefill's longer."""


@dataclass(frozen=True, slots=True)
class Ranges:
    """The largest batch.

    Args:
        num_ranks: N.
        max_tokens: prefill tokens of an iteration, all ranks together.
        max_batch: decodes of a rank.
        max_context: tokens of a decode, or before a chunk.

    Raises:
        ValueError: a range is too small to tell a slope from an intercept.
    """

    num_ranks: int
    max_tokens: int = 10240
    max_batch: int = 128
    max_context: int = 16384

    def __post_init__(self) -> None:
        least = {"num_ranks": 1, "max_tokens": 16 * self.num_ranks, "max_batch": 4, "max_context": CONTEXT_RATIO}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {bound}")

    @property
    def min_tokens(self) -> int:
        """Least prefill tokens of an iteration."""
        return max(self.num_ranks, min(MIN_PREFILL, self.max_tokens // 8))

    @property
    def min_context(self) -> int:
        """Least context, tokens."""
        return self.max_context // CONTEXT_RATIO

    @property
    def max_length(self) -> int:
        """Positions that the batches need: a chunk after a context."""
        return self.max_tokens + max(self.max_context, self.max_batch)


@dataclass(frozen=True, slots=True)
class BatchChunk:
    """A prefill chunk.

    Args:
        context: tokens computed before it.
        shard: tokens per rank.
        handed_to: the rank that receives the request's whole KV in this iteration; None if it stays.
    """

    context: int
    shard: tuple[int, ...]
    handed_to: int | None = None

    @property
    def length(self) -> int:
        """Tokens of the chunk."""
        return sum(self.shard)


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration's work.

    Args:
        decodes: context of every decode, per rank.
        chunks: of prefills.
        overlap: run decode attention beside prefill attention.
        decode_sms: multiprocessors of decode attention where it does; None is no partition.
    """

    decodes: tuple[tuple[int, ...], ...]
    chunks: tuple[BatchChunk, ...] = ()
    overlap: bool = True
    decode_sms: int | None = None

    @property
    def load(self) -> IterationLoad:
        """The batch as the latency model sees it."""
        n = len(self.decodes)
        incoming = [0.0] * n
        for chunk in self.chunks:
            if chunk.handed_to is not None:
                incoming[chunk.handed_to] += (chunk.context + chunk.length) * (n - 1) / n
        return IterationLoad(
            decode_tokens=tuple(len(rank) for rank in self.decodes),
            decode_context=tuple(sum(rank) for rank in self.decodes),
            prefill_tokens=tuple(sum(c.shard[r] for c in self.chunks) for r in range(n)) if self.chunks else (),
            chunks=tuple((c.length, c.context) for c in self.chunks),
            incoming=tuple(incoming) if any(incoming) else (),
        )

    @property
    def kind(self) -> str:
        """`decode`, `prefill`, or `mixed overlap` and `mixed serial` where the two meet."""
        if not self.chunks:
            return "decode"
        if not any(self.decodes):
            return "prefill"
        return "mixed overlap" if self.overlap else "mixed serial"


@dataclass(frozen=True, slots=True)
class Case:
    """One measurement.

    Args:
        name: unique in a run, and the same in every run with the same settings.
        batch: what runs.
        part: a member of `PARTS`; empty measures the whole iteration.
        held_out: set aside for evaluation.
    """

    name: str
    batch: Batch
    part: str = ""
    held_out: bool = False

    @property
    def workload(self) -> float:
        """The argument of the part's component function (`fitting.COMPONENTS`)."""
        load = self.batch.load
        n = len(self.batch.decodes)
        return {
            "gemm": lambda: load.max_load,
            "decode": lambda: max(load.decode_context),
            "prefill": lambda: load.work / n,
            "comm": lambda: load.max_shard,
            "transfer": lambda: max(load.incoming),
            "host": lambda: max(load.decode_tokens),
        }[self.part]()


def geometric(least: int, most: int, count: int) -> list[int]:
    """At most `count` different integers from `least` to `most`, evenly spaced in their logarithm."""
    steps = max(count - 1, 1)
    return sorted({round(least * (most / least) ** (i / steps)) for i in range(count)})


def split_evenly(tokens: int, n: int) -> tuple[int, ...]:
    """`tokens` over n ranks; the first ranks take what is left over."""
    return tuple(tokens // n + (r < tokens % n) for r in range(n))


def component_cases(ranges: Ranges, density: int = 1) -> list[Case]:
    """The grid of every component. Even ranks and one busy rank, where the component depends on the busiest.

    Args:
        ranges: the largest batch.
        density: multiplies the number of points in each direction.
    """
    n = ranges.num_ranks
    idle: tuple[tuple[int, ...], ...] = ((),) * n
    cases = [Case(f"gemm-{x}", _linear(x, n), "gemm") for x in _linear_loads(ranges, density)]
    for batch in geometric(1, ranges.max_batch, 4 * density):
        for context in geometric(ranges.min_context, ranges.max_context, 4 * density):
            contexts = (context,) * batch
            cases.append(Case(f"decode-{batch}x{context}-even", Batch((contexts,) * n), "decode"))
            if n > 1 and context == ranges.max_context:
                cases.append(Case(f"decode-{batch}x{context}-busy", Batch((contexts, *idle[1:])), "decode"))
    cases += [
        Case(f"host-{batch}", Batch(((ranges.min_context,) * batch,) * n), "host")
        for batch in geometric(1, ranges.max_batch, 6 * density)
    ]
    contexts = (0, *geometric(ranges.min_context, ranges.max_context, 3 * density))
    for length in geometric(ranges.min_tokens, ranges.max_tokens, 5 * density):
        for context in contexts:
            chunk = BatchChunk(context, split_evenly(length, n))
            cases.append(Case(f"prefill-{length}@{context}", Batch(idle, (chunk,)), "prefill"))
    if n == 1:
        return cases
    for length in geometric(ranges.min_tokens, ranges.max_tokens, 7 * density):
        for where, shard in (("even", split_evenly(length, n)), ("busy", (length, *(0,) * (n - 1)))):
            cases.append(Case(f"comm-{length}-{where}", Batch(idle, (BatchChunk(0, shard),)), "comm"))
    for length in geometric(ranges.min_context, ranges.max_length, 6 * density):
        # Only the handing over is timed: the chunk says how long the request is.
        chunk = BatchChunk(0, split_evenly(length, n), handed_to=0)
        cases.append(Case(f"transfer-{length}", Batch(idle, (chunk,)), "transfer"))
    return cases


def _linear_loads(ranges: Ranges, density: int) -> list[int]:
    return geometric(1, ranges.max_tokens + ranges.max_batch, 28 * density)


def _linear(load: int, n: int) -> Batch:
    """`load` tokens on every rank: where ranks share cores or power, the even case is the one to plan for."""
    return Batch(((),) * n, tuple(BatchChunk(0, tuple(load * (r == rank) for r in range(n))) for rank in range(n)))


def iteration_cases(
    ranges: Ranges,
    count: int,
    seed: int,
    held_out: float = 0.0,
    name: str = "iteration",
    splits: Sequence[int] = (),
) -> list[Case]:
    """Random whole iterations.

    Args:
        ranges: the largest batch.
        count: how many.
        seed: of the batches.
        held_out: share that is set aside.
        name: of the cases, with a number behind it.
        splits: `decode_sms` that overlapped batches have in turn, beside none.
    """
    rng = random.Random(seed)
    batches = _batches(rng, ranges, (None, *splits))
    cases = []
    for i in range(count):
        aside = int((i + 1) * held_out) > int(i * held_out)
        cases.append(Case(f"{name}-{i}", next(batches), held_out=aside))
    return cases


def _batches(rng: random.Random, ranges: Ranges, splits: Sequence[int | None]) -> Iterator[Batch]:
    """Mixed batches, overlapped and not, of all three mixes; every third batch has one phase only.

    Each mix meets every split, two thirds of the mixed batches overlap where there are several.
    """
    number = turn = 0
    while True:
        for mix in range(NUM_MIXES):
            for overlap in (True, True, False) if len(splits) > 1 else (True, False):
                batch = _mixed(rng, ranges, mix, overlap)
                if overlap:
                    batch = replace(batch, decode_sms=splits[turn % len(splits)])
                    turn += 1
                yield batch
            number += 1
            if number % 2:
                yield Batch(_random_decodes(rng, ranges))
            else:
                yield Batch(((),) * ranges.num_ranks, _random_chunks(rng, ranges))


def _mixed(rng: random.Random, ranges: Ranges, mix: int, overlap: bool) -> Batch:
    if mix == 1:
        few = Ranges(ranges.num_ranks, max(16 * ranges.num_ranks, ranges.max_tokens // 8), 4, ranges.max_context)
        return Batch(_random_decodes(rng, ranges, ranges.max_batch // 2), _random_chunks(rng, few), overlap)
    if mix == 2:
        few = Ranges(ranges.num_ranks, ranges.max_tokens, max(4, ranges.max_batch // 8), ranges.max_context)
        return Batch(_random_decodes(rng, few), _random_chunks(rng, ranges, ranges.max_tokens // 2), overlap)
    return Batch(_random_decodes(rng, ranges), _random_chunks(rng, ranges), overlap)


def _random_decodes(rng: random.Random, ranges: Ranges, least: int = 1) -> tuple[tuple[int, ...], ...]:
    """The busiest rank has between `least` and `max_batch` decodes; the others as many, fewer, or none."""
    busiest = _log_uniform(rng, least, ranges.max_batch)
    shape = rng.random()
    counts = [busiest] * ranges.num_ranks
    if shape >= 0.5:
        counts[1:] = [rng.randint(0, busiest) if shape < 0.85 else 0 for _ in counts[1:]]
        rng.shuffle(counts)
    return tuple(
        tuple(_log_uniform(rng, ranges.min_context, ranges.max_context) for _ in range(count)) for count in counts
    )


def _random_chunks(rng: random.Random, ranges: Ranges, least: int = 0) -> tuple[BatchChunk, ...]:
    """One to three chunks; each split evenly, at random, or on one rank; one in six iterations hands a request over."""
    n = ranges.num_ranks
    tokens = _log_uniform(rng, max(least, ranges.min_tokens), ranges.max_tokens)
    cuts = sorted(rng.sample(range(1, tokens), min(rng.choice([0, 0, 1, 2]), tokens - 1)))
    lengths = [b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True)]
    handed = rng.randrange(len(lengths)) if n > 1 and rng.random() < 1 / 6 else None
    chunks = []
    for i, length in enumerate(lengths):
        context = 0 if rng.random() < 0.3 else _log_uniform(rng, ranges.min_context, ranges.max_context)
        chunks.append(BatchChunk(context, _random_split(rng, length, n), rng.randrange(n) if i == handed else None))
    return tuple(chunks)


def _random_split(rng: random.Random, tokens: int, n: int) -> tuple[int, ...]:
    shape = rng.random()
    if shape < 0.6:
        return split_evenly(tokens, n)
    if shape < 0.7:
        busy = rng.randrange(n)
        return tuple(tokens * (r == busy) for r in range(n))
    cuts = sorted(rng.randint(0, tokens) for _ in range(n - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, tokens], strict=True))


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    least = max(min(least, most), 1)
    return min(most, round(least * (most / least) ** rng.random()))
