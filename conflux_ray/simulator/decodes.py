"""The resident decodes of one engine, advanced together at the cost of the ranks, not of the decodes.

All residents get one token in every iteration (a *tick*). A resident that joined at tick a and asks for k tokens
therefore finishes at tick a + k - 1, its token times are that slice of the list of ticks, and it needs a new KV block
at every tick of one residue modulo the block size. So a tick touches counts per rank, and requests only as they end.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

from conflux_ray.simulator.request import Phase, Request


@dataclass(slots=True)
class _Resident:
    request: Request
    rank: int
    joined: int  # tick
    context: int  # c_i at that tick
    active: bool = True
    fresh: bool = True  # no tick yet: its blocks are those it joined with

    def residue(self, block_size: int) -> int:
        """Ticks at which its context has just filled its last block, modulo the block size."""
        return (self.joined + 1 - self.context) % block_size


class DecodePool:
    """D = (D_0, ..., D_{N-1}) with the KV blocks that its members hold.

    The blocks of a member are taken by the caller when it joins (`blocks(c)` for its first context c), by `grow` later,
    and are reported when it leaves.

    Args:
        num_ranks: N.
        block_size: tokens of a KV block.
    """

    def __init__(self, num_ranks: int, block_size: int) -> None:
        self.block_size = block_size
        self.tokens = [0] * num_ranks  # n_r^d
        self.context = [0] * num_ranks  # sum of c_i in the coming iteration
        self.count = 0
        self._ticks: list[float] = []
        self._residents: list[dict[int, _Resident]] = [{} for _ in range(num_ranks)]
        self._growing = [[0] * block_size for _ in range(num_ranks)]
        self._fresh: list[_Resident] = []  # joined since the last tick
        self._ends: list[tuple[int, int, _Resident]] = []
        self._order = count()

    def blocks(self, context: int) -> int:
        """Blocks that `context` tokens hold."""
        return -(-context // self.block_size)

    def join(self, request: Request, rank: int) -> None:
        """`request` decodes on `rank` from the next tick on; it must have tokens left and a state that permits it."""
        request.to(Phase.DECODING)
        self._enter(request, rank)

    def growth(self, rank: int) -> int:
        """Blocks that the residents of `rank` need in addition for the coming tick."""
        return self._growing[rank][len(self._ticks) % self.block_size]

    def newest(self, rank: int) -> Request | None:
        """The resident of `rank` that joined last, the first to be preempted."""
        residents = self._residents[rank]
        return residents[next(reversed(residents))].request if residents else None

    def members(self, rank: int) -> list[Request]:
        """The residents of `rank`, oldest first."""
        return [resident.request for resident in self._residents[rank].values()]

    def generated(self, request: Request, rank: int) -> int:
        """Output tokens of a resident so far."""
        return request.generated + len(self._ticks) - self._residents[rank][request.index].joined

    def preempt(self, rank: int) -> tuple[Request, int]:
        """Take the newest resident of `rank` out, between ticks.

        Returns:
            The request, waiting again with its tokens so far, and the blocks that it held.
        """
        request = self.newest(rank)
        assert request is not None
        resident = self._residents[rank][request.index]
        held = self._leave(resident)
        request.preempt()
        return request, held

    def leave(self, request: Request, rank: int) -> int:
        """A resident goes on elsewhere, between ticks.

        Returns:
            The blocks that it held.
        """
        return self._leave(self._residents[rank][request.index])

    def enter(self, request: Request, rank: int) -> None:
        """A resident of another pool goes on here; the caller took `blocks` for its tokens so far."""
        self._enter(request, rank)

    def tick(self, now: float) -> list[tuple[Request, int, int]]:
        """Every resident gets its next token at `now`.

        Returns:
            (request, rank, blocks it held) of those that have finished.
        """
        tick = len(self._ticks)
        self._ticks.append(now)
        for resident in self._fresh:
            resident.fresh = False
            if resident.active:
                self._growing[resident.rank][resident.residue(self.block_size)] += 1
        self._fresh.clear()
        for rank, tokens in enumerate(self.tokens):
            self.context[rank] += tokens
        finished = []
        while self._ends and self._ends[0][0] <= tick:
            _, _, resident = heapq.heappop(self._ends)
            if resident.active:
                held = self._leave(resident)
                resident.request.to(Phase.FINISHED)
                finished.append((resident.request, resident.rank, held))
        return finished

    def _enter(self, request: Request, rank: int) -> None:
        resident = _Resident(request, rank, len(self._ticks), request.total_tokens)
        self._residents[rank][request.index] = resident
        self._fresh.append(resident)
        self.tokens[rank] += 1
        self.context[rank] += resident.context
        self.count += 1
        heapq.heappush(self._ends, (resident.joined + request.left - 1, next(self._order), resident))

    def _leave(self, resident: _Resident) -> int:
        request, rank = resident.request, resident.rank
        request.emit(self._ticks[resident.joined :])
        if not resident.fresh:
            self._growing[rank][resident.residue(self.block_size)] -= 1
        resident.active = False
        del self._residents[rank][request.index]
        self.tokens[rank] -= 1
        self.context[rank] -= request.total_tokens
        self.count -= 1
        return self.blocks(max(request.total_tokens - 1, resident.context))
