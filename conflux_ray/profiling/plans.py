"""From a batch to the plans that run it: block tables laid out directly, without the engine's bookkeeping.

Prompts are random token ids. With one id for all, the rows of every matrix product are alike, which seems to keep a GPU
below its power limit: it is faster than it is for real prompts (docs/profiling.md).
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import msgspec
import numpy as np

from conflux_ray.execution.plan import (
    Chunk,
    Decode,
    IterationPlan,
    NewPrefill,
    NewResident,
    Transfer,
    order_shards,
)
from conflux_ray.profiling.batches import Case
from conflux_ray.wire import Sampling

GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class CasePlans:
    """A case for the workers.

    Args:
        setup: makes the block tables known; computes nothing.
        step: the measured iteration; can be run any number of times after `setup`.
    """

    setup: IterationPlan
    step: IterationPlan

    def numbered(self, iteration: int) -> IterationPlan:
        """The step as iteration `iteration`, which is not 0: that one begins anew."""
        assert iteration > 0
        return msgspec.structs.replace(self.step, iteration=iteration)


class TableLayout:
    """What plans need of an instance: block tables of one pool, the same on every rank, and the vocabulary.

    Block tables begin again where the pool ends.

    What KV holds does not matter for timing, so requests beyond the pool's size share blocks.

    Args:
        num_blocks: of the pool, the null block included.
        block_size: tokens of a decode block.
        num_ranks: N; a prefill block holds N times as many tokens.
        vocab_size: of the model.
    """

    def __init__(self, num_blocks: int, block_size: int, num_ranks: int, vocab_size: int) -> None:
        self.block_size = block_size
        self.num_ranks = num_ranks
        self.vocab_size = vocab_size
        self._blocks = itertools.cycle(range(1, num_blocks))

    def decode(self, tokens: int) -> list[int]:
        """Blocks of a decode with `tokens` tokens on its rank."""
        return self._take(-(-tokens // self.block_size))

    def prefill(self, tokens: int) -> list[int]:
        """Blocks of a prefill of `tokens` tokens on each rank."""
        return self._take(-(-tokens // (self.block_size * self.num_ranks)))

    def _take(self, count: int) -> list[int]:
        return list(itertools.islice(self._blocks, count))


def make_plans(case: Case, layout: TableLayout) -> CasePlans:
    """Plans of a case."""
    batch = case.batch
    n = len(batch.decodes)
    ids = itertools.count()
    draw = np.random.default_rng(random.Random(case.name).getrandbits(64))
    residents: list[NewResident] = []
    decodes: list[tuple[Decode, ...]] = []
    for rank, contexts in enumerate(batch.decodes):
        steps = []
        for context in contexts:
            alloc_id = next(ids)
            residents.append(_resident(alloc_id, rank, layout.decode(context + 1)))
            steps.append(Decode(alloc_id, max(context - 1, 0)))
        decodes.append(tuple(steps))
    prefills: list[NewPrefill] = []
    chunks: list[Chunk] = []
    transfers: list[Transfer] = []
    for chunk in batch.chunks:
        alloc_id, end = next(ids), chunk.context + chunk.length
        prefills.append(NewPrefill(alloc_id, (layout.prefill(end),) * n))
        last = chunk.handed_to if chunk.handed_to is not None and chunk.shard[chunk.handed_to] else None
        tokens = draw.integers(layout.vocab_size, size=chunk.length, dtype="<i4").tobytes()
        chunks.append(Chunk(alloc_id, tokens, order_shards(chunk.context, chunk.shard, last)))
        if chunk.handed_to is not None:
            transfers.append(Transfer(len(transfers), alloc_id, 0, end, chunk.handed_to))
            residents.append(_resident(alloc_id, chunk.handed_to, layout.decode(end + 1)))
    idle: tuple[tuple[Decode, ...], ...] = ((),) * n
    step = IterationPlan(
        1,
        tuple(decodes),
        chunks=tuple(chunks),
        transfers=tuple(transfers),
        overlap=batch.overlap,
        decode_sms=batch.decode_sms,
        wait_transfers=bool(transfers),
        part=case.part,
    )
    setup = IterationPlan(0, idle, new_prefills=tuple(prefills), new_residents=tuple(residents))
    return CasePlans(setup, step)


def _resident(alloc_id: int, rank: int, table: list[int]) -> NewResident:
    return NewResident(alloc_id, rank, table, GREEDY, alloc_id, b"", 1)
