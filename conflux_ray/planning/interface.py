"""What passes between an instance and its planner, and the interface every scheduling policy implements.

The planner sees small immutable values and one tentative `KVState`; it never sees tensors, clocks or transports.
Times are seconds on the instance's monotonic clock, lengths are tokens, KV is counted in blocks. Names follow
the paper: a *pending prefill* i has remaining length m_i, context c_i and deadline d_i; rank r holds the
resident decodes D_r; a *chunk* of length l_i is cut into one contiguous *shard* per rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol


@dataclass(frozen=True, slots=True)
class PendingPrefill:
    """A request with prompt tokens left to compute (paper, section 6.4: an element of R).

    `deadline` is when its *next* token is due: arrival + TTFT for a new request; for one that was preempted or
    migrated after j tokens, the deadline of token j + 1.
    """

    request_id: str
    arrival: float
    deadline: float
    total_tokens: int
    computed_tokens: int = 0
    priority: int = 0  # smaller is more urgent, as in vLLM
    tbt: float = 0.1
    prefill_blocks: int = 0  # blocks to reserve on EVERY rank before the first chunk; 0 once reserved
    decode_blocks: int = 0  # blocks to reserve on ONE rank before the completing chunk; 0 if it needs no placement
    needs_placement: bool = True  # False for a request that ends with its first token
    remaining: int = field(init=False)  # m_i, tokens

    def __post_init__(self) -> None:
        if not 0 <= self.computed_tokens < self.total_tokens:
            raise ValueError(
                f"{self.request_id}: computed_tokens={self.computed_tokens} must be in [0, {self.total_tokens})"
            )
        object.__setattr__(self, "remaining", self.total_tokens - self.computed_tokens)


@dataclass(frozen=True, slots=True)
class ResidentDecode:
    """A request that decodes on one rank (an element of D_r); it takes one token in every iteration."""

    request_id: str
    context_tokens: int  # c_i: tokens attended, the one being computed included
    tbt: float = 0.1
    deadline: float = float("inf")  # of its next token


@dataclass(frozen=True)
class DecodeState:
    """The resident decodes of every rank, D = (D_0, ..., D_{N-1}).

    Planning reads their sums only. They are computed once, when first asked for; a caller that keeps them itself gives
    them to `summed` and spares building a `ResidentDecode` for each decode in each iteration.
    """

    ranks: tuple[tuple[ResidentDecode, ...], ...]

    @classmethod
    def summed(cls, tokens: Sequence[int], context: Sequence[int], tightest_tbt: float = float("inf")) -> DecodeState:
        """A state known by its sums; `ranks` stays empty.

        Args:
            tokens: n_r^d of each rank.
            context: aggregate decode context of each rank, tokens.
            tightest_tbt: the smallest TBT of all resident decodes, seconds; infinity if there are none.
        """
        state = cls(())
        vars(state).update(tokens=tuple(tokens), context=tuple(context), tightest_tbt=tightest_tbt)
        return state

    @property
    def num_ranks(self) -> int:
        return len(self.tokens)

    @cached_property
    def tokens(self) -> tuple[int, ...]:
        """n_r^d per rank, tokens."""
        return tuple([len(rank) for rank in self.ranks])

    @cached_property
    def context(self) -> tuple[int, ...]:
        """Aggregate decode context per rank, tokens (the argument of f_D in Eq. 5)."""
        return tuple([sum([d.context_tokens for d in rank]) for rank in self.ranks])

    @cached_property
    def tightest_tbt(self) -> float:
        """The smallest TBT of all resident decodes, seconds (tau of Algorithm 1); infinity if there are none."""
        return min([min([d.tbt for d in rank]) for rank in self.ranks if rank], default=float("inf"))


@dataclass(slots=True)
class KVState:
    """Free KV blocks per rank, changed tentatively while one iteration is planned.

    `partial_prefills` lists (prefill_blocks on every rank, decode_blocks it will need on one) of the prefills that
    already hold blocks. A new prefill starts only if, after it, a rank emptied of decodes could still take any of
    them: sum of prefill blocks + the largest decode need <= capacity. Without this, partial prefills could hold
    all memory on all ranks and none could ever finish.
    """

    capacity: int  # usable blocks of one rank
    free: list[int]
    partial_prefills: list[tuple[int, int]] = field(default_factory=list)

    def can_start(self, request: PendingPrefill) -> bool:
        """Whether `request` may take its prefill blocks on every rank now."""
        if request.prefill_blocks == 0:
            return True
        if min(self.free) < request.prefill_blocks:
            return False
        held, largest = request.prefill_blocks, request.decode_blocks
        for prefill_blocks, decode_blocks in self.partial_prefills:
            held += prefill_blocks
            if decode_blocks > largest:
                largest = decode_blocks
        return held + largest <= self.capacity

    def start(self, request: PendingPrefill) -> None:
        """Take the prefill blocks of `request` on every rank."""
        if request.prefill_blocks:
            self.free = [f - request.prefill_blocks for f in self.free]
            self.partial_prefills.append((request.prefill_blocks, request.decode_blocks))

    def fits(self, request: PendingPrefill, rank: int, headroom: int = 0) -> bool:
        """Whether `rank` can take the decode residency of `request` and keep `headroom` blocks free (Alg. 3, h)."""
        return self.free[rank] >= request.decode_blocks + headroom

    def place(self, request: PendingPrefill, rank: int) -> None:
        """Take the decode blocks of `request` on `rank`."""
        self.free[rank] -= request.decode_blocks

    def utilization(self, rank: int) -> float:
        """Share of the rank's blocks in use, 0..1."""
        return 1.0 - self.free[rank] / self.capacity


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """A scheduled chunk: the next `length` tokens of a request, `shard[r]` of them on rank r (A_i)."""

    request_id: str
    start: int
    length: int
    shard: tuple[int, ...]
    completes: bool

    def __post_init__(self) -> None:
        if sum(self.shard) != self.length or min(self.shard) < 0 or self.length <= 0:
            raise ValueError(f"{self.request_id}: shard {self.shard} does not cut {self.length} tokens")


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of one scheduling step: A_p and A_d of Algorithm 1, with what explains them."""

    chunks: tuple[PrefillChunk, ...] = ()
    placements: Mapping[str, int] = field(default_factory=dict)  # request -> decode rank
    budget: int = 0  # B_0, tokens
    predicted: float = 0.0  # seconds; 0 when the policy has no latency model
    rejected: int = 0  # requests not expected to meet their deadline
    tbt_violation: bool = False  # the iteration is predicted to miss a resident decode's TBT
    overlap: bool = True  # run decode attention beside prefill attention
    decode_sms: int | None = None  # SM share of the decode stream; None: no partition


class Policy(Protocol):
    """A scheduling policy: which pending prefills run in the next iteration, how they are cut, where they land."""

    def schedule(self, pending: Sequence[PendingPrefill], decodes: DecodeState, kv: KVState, now: float) -> Decision:
        """Plan one iteration. `kv` is the caller's copy, to change freely. Every resident decode runs anyway.

        A chunk that starts a request needs `kv.can_start`; one that completes a request with `needs_placement`
        must come with a placement that `kv.fits`, and its decode rank's shard must hold at least one token.
        """
        ...

    def observe(self, decision: Decision, measured: float) -> None:
        """Learn from an iteration that took `measured` seconds."""
        ...
