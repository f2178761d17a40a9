"""What the instance sends to every worker for one iteration, and what each worker answers (design, section 4).

All workers get the same `IterationPlan`; each derives its own part. The sizes of every collective follow from the
plan alone. Allocations are named by `alloc_id`, new for each admission of a request (see `kv.manager`).
"""

from __future__ import annotations

import msgspec

from conflux_ray.wire import Logprobs, Sampling


class Shard(msgspec.Struct, frozen=True, array_like=True):
    """Tokens [start, end) of a request, computed by logical rank `rank`."""

    rank: int
    start: int
    end: int


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """The next tokens of a prefill: contiguous shards in order of position, none empty.

    When the chunk completes its prefill and the request samples, `samples` is true and the request's `Resident` names
    the rank of the last shard, where the first output token is drawn.
    """

    alloc_id: int
    token_ids: bytes  # int32, little-endian, of [shards[0].start, shards[-1].end)
    shards: tuple[Shard, ...]
    samples: bool = False

    @property
    def start(self) -> int:
        return self.shards[0].start

    @property
    def end(self) -> int:
        return self.shards[-1].end


class NewPrefill(msgspec.Struct, frozen=True, array_like=True):
    """Prefill block table of a request for each logical rank; sent with its first chunk."""

    alloc_id: int
    block_tables: tuple[list[int], ...]


class NewResident(msgspec.Struct, frozen=True, array_like=True):
    """A request that samples on `rank` from this iteration on: its decode block table and how to sample.

    `block_table` is empty for a request that ends with its first token. `output_token_ids` are the tokens that an
    earlier admission produced; they are the tail of `token_ids`.
    """

    alloc_id: int
    rank: int
    block_table: list[int]
    sampling: Sampling
    seed: int
    token_ids: bytes  # int32: prompt and output so far
    num_prompt_tokens: int


class Growth(msgspec.Struct, frozen=True, array_like=True):
    """Blocks appended to a resident's decode block table."""

    alloc_id: int
    blocks: list[int]


class Decode(msgspec.Struct, frozen=True, array_like=True):
    """One decode step: computes the token at `position`, the last one sampled, and samples the next."""

    alloc_id: int
    position: int


class Transfer(msgspec.Struct, frozen=True, array_like=True):
    """KV of tokens [start, end) goes from the head shards on every rank to `target`, layer by layer."""

    transfer_id: int
    alloc_id: int
    start: int
    end: int
    target: int


class IterationPlan(msgspec.Struct, frozen=True, array_like=True):
    """One iteration. An iteration with neither decodes nor chunks runs no forward pass."""

    iteration: int
    decodes: tuple[tuple[Decode, ...], ...]  # per logical rank
    chunks: tuple[Chunk, ...] = ()
    new_prefills: tuple[NewPrefill, ...] = ()
    new_residents: tuple[NewResident, ...] = ()
    growths: tuple[Growth, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    drop: tuple[int, ...] = ()  # allocations to forget before this iteration
    poison: tuple[tuple[int, int], ...] = ()  # (rank, block) freed: overwrite before anything else (tests)
    overlap: bool = True  # decode attention beside prefill attention
    decode_sms: int | None = None
    wait_transfers: bool = False  # answer only when all transfers so far are done
    part: str = ""  # time this part alone (`profiling.runner`); other runners ignore it


class WorkerResult(msgspec.Struct, array_like=True, gc=False, tag="result"):
    """What one worker reports for one iteration.

    `alloc_ids` and `tokens` come from the first worker of each logical rank. Times are seconds.
    """

    iteration: int
    worker: int
    alloc_ids: list[int] = []
    tokens: list[int] = []
    logprobs: list[Logprobs | None] = []
    acknowledged: list[int] = []  # transfers this worker has done with
    elapsed: float = 0.0
    logits: list[bytes] = []  # float32 rows beside `tokens`, when the worker is asked for them (tests)


class WorkerError(msgspec.Struct, frozen=True, array_like=True, tag="error"):
    """A worker's iteration raised; the instance is lost as a whole."""

    worker: int
    message: str


_plan_decoder: msgspec.msgpack.Decoder[IterationPlan] = msgspec.msgpack.Decoder(IterationPlan)
_result_decoder: msgspec.msgpack.Decoder[WorkerResult | WorkerError] = msgspec.msgpack.Decoder(
    WorkerResult | WorkerError
)
_encoder = msgspec.msgpack.Encoder()


def encode(message: IterationPlan | WorkerResult | WorkerError) -> bytes:
    """Serialise for the plan channel."""
    return _encoder.encode(message)


def decode_plan(data: bytes | memoryview) -> IterationPlan:
    """Parse a plan; raises msgspec.DecodeError."""
    return _plan_decoder.decode(data)


def decode_result(data: bytes | memoryview) -> WorkerResult | WorkerError:
    """Parse a result; raises msgspec.DecodeError."""
    return _result_decoder.decode(data)


def order_shards(start: int, counts: tuple[int, ...], last_rank: int | None) -> tuple[Shard, ...]:
    """Contiguous shards of `counts[r]` tokens from `start`, in rank order rotated so that `last_rank` comes last.

    Which rank computes which range is free, so the completing chunk ends on the request's decode rank, where its first
    token is needed (design, section 4).

    Raises:
        ValueError: `last_rank` has no token.
    """
    num_ranks = len(counts)
    if last_rank is not None and counts[last_rank] == 0:
        raise ValueError(f"rank {last_rank} must compute the last token but its shard of {counts} is empty")
    first = 0 if last_rank is None else last_rank + 1
    shards, position = [], start
    for rank in ((first + i) % num_ranks for i in range(num_ranks)):
        if counts[rank]:
            shards.append(Shard(rank, position, position + counts[rank]))
            position += counts[rank]
    return tuple(shards)
