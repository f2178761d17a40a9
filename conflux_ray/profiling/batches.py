"""What the profiler measures: a grid for each component, and random heterogeneous batches (section 8.5).

The paper's ranges are the defaults: 32-10K prefill tokens, 1-128 decodes of a rank, contexts of 1K-16K tokens, ranks
even and skewed. Where the upper ends are lowered, the lower ends follow. Everything here is a function of `Ranges` and
a seed, so an interrupted run knows what is left.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from conflux_ray.planning.latency_model import IterationLoad

PARTS = ("gemm", "decode", "prefill", "comm", "transfer", "host")
"""Components that are measured alone."""

MIN_PREFILL = 32
CONTEXT_RATIO = 16
"""The largest context is this many times the smallest."""
TILE = 128
"""Rows of a matrix product that a GPU computes together: between multiples of it the linear region costs the same."""
FINE, COARSE = 2048, 256
"""Up to FINE tokens, half tiles are measured, beyond what ranks have when they share evenly, steps of COARSE."""
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
        """See `kind_of`."""
        return kind_of(self.load, self.overlap)


def kind_of(load: IterationLoad, overlap: bool) -> str:
    """`decode`, `prefill`, or `mixed overlap` and `mixed serial` where the two meet."""
    if not load.chunks:
        return "decode"
    if not any(load.decode_tokens):
        return "prefill"
    return "mixed overlap" if overlap else "mixed serial"


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


def captured_sizes() -> tuple[int, ...]:
    """Tokens that a GPU's linear regions run at up to 1024: those of its CUDA graphs (`vllm_compat.graphs`)."""
    return (1, 2, 4, *range(8, 128, 8), *range(128, 256, 16), *range(256, 512, 32), *range(512, 1025, 64))


def linear_sizes(ranges: Ranges) -> tuple[int, ...]:
    """Tokens of a rank at which a GPU's linear region is measured.

    Its time has steps: at the sizes it is padded to, and beyond those where one more row of tiles makes one more wave
    over the multiprocessors. A step is worth a tenth of the time and lies where no smooth curve expects it.
    """
    most = ranges.max_tokens + ranges.max_batch
    even = -(-(ranges.max_tokens // ranges.num_ranks + ranges.max_batch) // TILE) * TILE
    captured = captured_sizes()
    sizes = {
        *captured,
        *range(captured[-1], FINE, TILE // 2),
        *range(FINE, even + 1, TILE),
        *range(max(FINE, even), most, COARSE),
        most,
    }
    return tuple(sorted(size for size in sizes if size <= most))


def padded_sizes(cases: Iterable[Case]) -> tuple[int, ...]:
    """Tokens of a rank at which a GPU's linear region costs what it costs down to the next smaller one of them.

    Args:
        cases: what is measured; whole tiles are steps as far as each of them is.
    """
    captured = captured_sizes()
    measured = {case.workload for case in cases if case.part == "gemm"}
    tiles = itertools.takewhile(measured.__contains__, itertools.count(captured[-1] + TILE, TILE))
    return (*captured, *tiles)


def component_cases(ranges: Ranges, density: int = 1, linear: Sequence[int] = ()) -> list[Case]:
    """The grid of every component. Even ranks and one busy rank, where the component depends on the busiest.

    Args:
        ranges: the largest batch.
        density: multiplies the number of points in each direction.
        linear: tokens of a rank at which the linear region is measured; empty takes a geometric grid.
    """
    names = [f"gemm-{x}" for x in linear or _linear_loads(ranges, density)]
    for batch in geometric(1, ranges.max_batch, 4 * density):
        for context in geometric(ranges.min_context, ranges.max_context, 4 * density):
            names.append(f"decode-{batch}x{context}-even")
            if ranges.num_ranks > 1 and context == ranges.max_context:
                names.append(f"decode-{batch}x{context}-busy")
    names += [f"host-{batch}" for batch in geometric(1, ranges.max_batch, 6 * density)]
    # Round contexts fit the kernels' tiles; a request's seldom does.
    contexts = (0, *(context - 1 for context in geometric(ranges.min_context, ranges.max_context, 3 * density)))
    for length in geometric(ranges.min_tokens, ranges.max_tokens, 7 * density):
        names += [f"prefill-{length}@{context}" for context in contexts]
    if ranges.num_ranks > 1:
        for length in geometric(ranges.min_tokens, ranges.max_tokens, 9 * density):
            names += [f"comm-{length}-even", f"comm-{length}-busy"]
        names += [f"transfer-{length}" for length in geometric(ranges.min_context, ranges.max_length, 6 * density)]
    return [component_case(name, ranges) for name in dict.fromkeys(names)]


def component_case(name: str, ranges: Ranges) -> Case:
    """The case that a name of `component_cases` stands for.

    Raises:
        ValueError: it stands for none.
    """
    n = ranges.num_ranks
    idle: tuple[tuple[int, ...], ...] = ((),) * n
    part, *words = re.split("[-x@]", name)
    try:
        size, where = int(words[0]), words[-1]
        if part == "gemm":
            # On every rank: where ranks share cores or power, the even case is the one to plan for.
            shards = [tuple(size * (r == rank) for r in range(n)) for rank in range(n)]
            batch = Batch(idle, tuple(BatchChunk(0, shard) for shard in shards))
        elif part == "decode":
            contexts = (int(words[1]),) * size
            batch = Batch((contexts, *(idle[1:] if where == "busy" else (contexts,) * (n - 1))))
        elif part == "host":
            batch = Batch(((ranges.min_context,) * size,) * n)
        elif part == "prefill":
            batch = Batch(idle, (BatchChunk(int(words[1]), split_evenly(size, n)),))
        elif part == "comm":
            shard = split_evenly(size, n) if where == "even" else (size, *(0,) * (n - 1))
            batch = Batch(idle, (BatchChunk(0, shard),))
        elif part == "transfer":
            # Only the handing over is timed: the chunk says how long the request is.
            batch = Batch(idle, (BatchChunk(0, split_evenly(size, n), handed_to=0),))
        else:
            raise ValueError(f"part={part!r}")
    except (ValueError, IndexError) as error:
        raise ValueError(f"{name!r} names no measurement of a component ({error})") from error
    return Case(name, batch, part)


def _linear_loads(ranges: Ranges, density: int) -> list[int]:
    return geometric(1, ranges.max_tokens + ranges.max_batch, 28 * density)


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
