"""Waterfill dispatch: how many prefill tokens an iteration may hold and on which ranks (section 6.3, Algorithm 2).

Eq. 3 depends on the largest combined load only, so tokens are poured onto the least loaded ranks up to a common water
level; the largest level that keeps the predicted latency within tau gives the TBT-safe budget. Latency depends on an
assignment through its largest load and its largest shard alone, which leaves one thing to gain over pure waterfill:
below a level that costs nothing (the flat part of f_GEMM, or a rank that is fuller anyway), shards are evened out
among themselves, which shortens the all-to-alls. `docs/planner.md` gives the gap to the best assignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import add, sub

from conflux_ray.planning.latency_model import IterationEstimator, chunk_work


def water_level(heights: Sequence[int], tokens: int) -> int:
    """The smallest n with sum_r max(0, n - heights[r]) >= tokens."""
    level = -(-(sum(heights) + tokens) // len(heights))
    if level > max(heights):  # the usual case: the water covers every rank
        return level
    below = sorted(heights)
    total = tokens
    for k, height in enumerate(below, start=1):
        total += height
        level = -(-total // k)
        if k == len(below) or level <= below[k]:
            return level
    raise AssertionError("the last rank always returns")


def capped_level(heights: Sequence[int], room: Sequence[int], tokens: int) -> int:
    """The smallest n with sum_r min(room[r], max(0, n - heights[r])) >= tokens.

    Raises:
        ValueError: the ranks have not that much room.
    """
    starts = [(h, 1) for h, free in zip(heights, room, strict=True) if free > 0]
    ends = [(h + free, -1) for h, free in zip(heights, room, strict=True) if free > 0]
    filled, rising, level = 0, 0, 0
    for height, change in sorted(starts + ends):
        if rising and filled + rising * (height - level) >= tokens:
            return level + -(-(tokens - filled) // rising)
        filled += rising * (height - level)
        level, rising = height, rising + change
    raise ValueError(f"{tokens} tokens do not fit into the room {list(room)}")


def pour(heights: Sequence[int], room: Sequence[int] | None, level: int, tokens: int) -> list[int]:
    """WaterfillAssign: `tokens` poured onto `heights` up to `level`; the last ranks at the level take what is short.

    Args:
        heights: tokens already on each rank.
        room: the most each rank may take; None is no limit.
        level: from `water_level` or `capped_level` for the same arguments, so that less than a layer is in excess.
        tokens: how many to pour.

    Returns:
        Tokens for each rank; they add up to `tokens`.
    """
    if room is None:
        poured = [level - h if h < level else 0 for h in heights]
    else:
        poured = [min(free, level - h) if h < level else 0 for h, free in zip(heights, room, strict=True)]
    excess = sum(poured) - tokens
    for r in range(len(poured) - 1, -1, -1):
        if not excess:
            break
        if poured[r] and heights[r] + poured[r] == level:
            poured[r] -= 1
            excess -= 1
    return poured


def waterfill(heights: Sequence[int], tokens: int) -> list[int]:
    """`tokens` poured onto ranks that already hold `heights`, so that the largest result is smallest."""
    return pour(heights, None, water_level(heights, tokens), tokens)


def ensure_token(shard: Sequence[int], rank: int, loads: Sequence[int] | None = None) -> list[int]:
    """`shard` with at least one token on `rank`, which samples the first output token after the last shard.

    Args:
        shard: tokens of the chunk on each rank; not all zero.
        rank: the request's new decode rank.
        loads: tokens already on each rank; the token is taken where load and shard add up highest.
    """
    shard = list(shard)
    if shard[rank] == 0:
        loads = loads or [0] * len(shard)
        donors = [r for r in range(len(shard)) if shard[r]]
        shard[max(donors, key=lambda r: (loads[r] + shard[r], shard[r], r))] -= 1
        shard[rank] = 1
    return shard


def largest_within(
    seconds: Callable[[int], float], limit: float, low: int, high: int, at_low: float, at_high: float
) -> int:
    """The largest x in [low, high) with seconds(x) <= limit, for a `seconds` that does not decrease.

    Latency is nearly linear in the water level, so a probe where the chord crosses the limit lands next to the answer;
    after two probes on the same side comes one by halving, which keeps the worst case at O(log(high - low)).

    Args:
        seconds: latency at x.
        limit: tau.
        low: known to be within the limit, at `at_low` seconds.
        high: known to be beyond it, at `at_high` seconds.
        at_low: seconds(low).
        at_high: seconds(high).
    """
    streak, last_fits = 0, False
    while high - low > 1:
        if streak < 2:
            middle = low + int((limit - at_low) / (at_high - at_low) * (high - low))
            middle = min(max(middle, low + 1), high - 1)
        else:
            middle, streak = (low + high) // 2, 0
        at_middle = seconds(middle)
        fits = at_middle <= limit
        streak = streak + 1 if fits == last_fits else 1
        last_fits = fits
        if fits:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
    return low


def tokens_per_pair(estimator: IterationEstimator, budget: int, tau: float, alone: float) -> float:
    """How many tokens of the budget, which leaves attention out, take as long as one token pair of attention.

    As if the attention paths never overlapped, and the budget took at least half of tau: where decodes leave next to
    nothing, a few tokens may cost no time at all, and no prompt would be short enough.

    Args:
        estimator: the latency model with the resident decodes filled in.
        budget: B_0, tokens.
        tau: seconds of an iteration.
        alone: of one without prefill.
    """
    return budget * estimator.seconds_per_pair / max(tau - alone, tau / 2)


@dataclass(slots=True)
class Assignment:
    """A chunk's assignment A_i, and what A_p would be with it.

    Attributes:
        shard: A_i, tokens on each rank.
        length: l_i, their sum.
        loads: n_r^d + n_r^p with it.
        max_load: the largest n_r^d + n_r^p.
        max_shard: the largest n_r^p with it.
        work: prefill attention work with it, token pairs.
        incoming: tokens whose KV arrives at each rank, with those of this chunk's request.
        seconds: predicted T_iter with it.
    """

    shard: list[int]
    length: int
    loads: list[int]
    max_load: int
    max_shard: int
    work: float
    incoming: list[float]
    seconds: float


class Dispatcher:
    """Algorithm 2 over the course of one scheduling step: `assigned` is A_p, what has been accepted so far.

    Args:
        estimator: the latency model with the resident decodes D filled in.
        decode_tokens: n_r^d per rank.
        tau: the iteration's limit, seconds.
        quantum: q; water levels are multiples of it.
        max_tokens: the most prefill tokens one iteration may hold, over all ranks.
    """

    def __init__(
        self, estimator: IterationEstimator, decode_tokens: Sequence[int], tau: float, quantum: int, max_tokens: int
    ) -> None:
        self.estimator = estimator
        self.tau = tau
        self.quantum = quantum
        self.room = max_tokens
        nothing = [0] * len(decode_tokens)
        most_decodes = max(decode_tokens)
        self._alone = alone = estimator.seconds(most_decodes, 0, 0.0)
        self._decode_tokens = decode_tokens
        self._fewest_decodes = min(decode_tokens)
        self._free_level = estimator.model.free_level
        self._even_shards = estimator.model.comm.slope > 0
        self._ceiling = math.inf  # a level that no candidate reaches
        no_kv = [0.0] * len(decode_tokens)
        self.commit(Assignment(nothing, 0, list(decode_tokens), most_decodes, 0, 0.0, no_kv, alone))

    def commit(self, assignment: Assignment) -> None:
        """Accept a chunk into A_p (Algorithm 1, line 13)."""
        self.assigned = assignment
        self.room -= assignment.length
        self._total = sum(assignment.loads)
        self._max_incoming = max(assignment.incoming)
        # Up to here the ranks can be filled at no cost in the shared linear region.
        self._free = max(self._free_level, assignment.max_load)

    def capacity(self, level: int) -> int:
        """B(n) = sum_r max(0, n - n_r^d - n_r^p(A_p)), tokens (line 3)."""
        loads = self.assigned.loads
        if level >= self._free:
            return level * len(loads) - self._total
        return sum([level - load for load in loads if load < level])

    def budget(self) -> int:
        """B with no candidate: the residual TBT-safe budget, prefill attention left out (lines 2-4), tokens."""
        if self.assigned.seconds > self.tau:
            return 0
        enough = self._level_of(self.room)
        if self.seconds_at(enough, self.room, None) <= self.tau:
            return self.room
        level = self._search(enough, self.room, None)
        # A candidate's attention only adds, and A_p only grows.
        self._ceiling = level + self.quantum
        return min(self.capacity(level), self.room)

    def seconds_of(self, budget: int) -> float:
        """Predicted T_iter with B_0 filled, attention left out: tau, or less where `max_tokens` ends the budget."""
        return min(self.tau, self.seconds_at(self._level_of(budget), budget, None)) if budget else self.tau

    def tokens_per_pair(self, budget: int) -> float:
        """`tokens_per_pair` of B_0, what fits within tau beside the decodes."""
        return tokens_per_pair(self.estimator, budget, self.tau, self._alone)

    def dispatch(self, remaining: int, context: int, limit: int | None = None) -> Assignment | None:
        """The largest TBT-safe chunk of a request (lines 2-7).

        Args:
            remaining: m_i, tokens.
            context: c_i, tokens computed before.
            limit: the most tokens this chunk may have.

        Returns:
            Its assignment; None when no token fits.
        """
        wanted = min(remaining, self.room) if limit is None else min(remaining, self.room, limit)
        if wanted <= 0 or self.assigned.seconds > self.tau:
            return None
        enough = self._level_of(wanted)
        if enough <= self._ceiling:
            whole = self.assign(wanted, context)
            if whole.seconds <= self.tau:
                return whole
        level = self._search(min(enough, self._ceiling), wanted, context)
        tokens = min(self.capacity(level), wanted)
        return self.assign(tokens, context) if tokens else None

    def assign(self, tokens: int, context: int) -> Assignment:
        """WaterfillAssign: `tokens` of a request with `context` computed ones on top of A_p, whatever the latency."""
        return self.with_shard(self._pour(tokens), tokens, context)

    def with_shard(self, shard: list[int], length: int, context: int) -> Assignment:
        """A given cut of a chunk on top of A_p.

        Args:
            shard: tokens of the chunk on each rank.
            length: l_i, their sum.
            context: c_i, tokens.
        """
        assigned = self.assigned
        loads = list(map(add, assigned.loads, shard))
        load, most = max(loads), max(map(sub, loads, self._decode_tokens))
        work = assigned.work + chunk_work(length, context)
        seconds = self.estimator.seconds(load, most, work, self._max_incoming)
        return Assignment(shard, length, loads, load, most, work, assigned.incoming, seconds)

    def with_arrival(self, chunk: Assignment, rank: int, incoming: float) -> Assignment:
        """`chunk`, which completes its request, with `incoming` tokens of the request's KV that arrive at `rank`."""
        arriving = self.assigned.incoming.copy()
        arriving[rank] += incoming
        load, most, work = chunk.max_load, chunk.max_shard, chunk.work
        seconds = self.estimator.seconds(load, most, work, max(self._max_incoming, arriving[rank]))
        return Assignment(chunk.shard, chunk.length, chunk.loads, load, most, work, arriving, seconds)

    def seconds_at(self, level: int, wanted: int, context: int | None) -> float:
        """Predicted T_iter when the candidate's tokens fill the ranks to `level`, `wanted` tokens at most.

        It does not decrease as the level rises. With `context` None the candidate's attention is left out. It is that
        of the assignment, except that the last, incomplete layer of `wanted` tokens counts as complete.
        """
        assigned = self.assigned
        tokens = min(self.capacity(level), wanted)
        if not tokens:
            return assigned.seconds
        load = min(level, -(-(self._total + tokens) // len(assigned.loads)))
        if load > self._free:
            # Every rank is at the level, so the one with the fewest decodes has the largest shard.
            shard = load - self._fewest_decodes
        else:
            loads = list(map(add, assigned.loads, self._pour(tokens)))
            load, shard = max(loads), max(map(sub, loads, self._decode_tokens))
        work = assigned.work if context is None else assigned.work + chunk_work(tokens, context)
        return self.estimator.seconds(load, shard, work, self._max_incoming)

    def _level(self, tokens: int) -> int:
        """`water_level` on the loads of A_p, whose sum and maximum are known."""
        level = -(-(self._total + tokens) // len(self.assigned.loads))
        return level if level > self.assigned.max_load else water_level(self.assigned.loads, tokens)

    def _level_of(self, tokens: int) -> int:
        """The smallest multiple of q below which `tokens` fit."""
        return -(-self._level(tokens) // self.quantum) * self.quantum

    def _search(self, beyond: float, wanted: int, context: int | None) -> int:
        """n_target, the largest feasible multiple of q (line 2), below the infeasible level `beyond`."""
        q = self.quantum
        low, high = min(self.assigned.loads) // q, int(beyond) // q
        if high - low <= 1:
            return low * q
        return q * largest_within(
            lambda k: self.seconds_at(k * q, wanted, context),
            self.tau,
            low,
            high,
            at_low=self.assigned.seconds,
            at_high=self.seconds_at(high * q, wanted, context),
        )

    def _pour(self, tokens: int) -> list[int]:
        """Tokens for each rank: water on the loads, or, where that costs nothing, on the shards."""
        loads = self.assigned.loads
        if not tokens:
            return [0] * len(loads)
        level = self._level(tokens)
        if level > self._free or not self._even_shards:
            return pour(loads, None, level, tokens)
        shards = list(map(sub, loads, self._decode_tokens))
        room = [int(min(self._free - load, tokens)) for load in loads]
        return pour(shards, room, capped_level(shards, room, tokens), tokens)
