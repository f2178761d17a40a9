"""The block pool of one rank (design, section 5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from conflux_ray.kv.geometry import NULL_BLOCK


class OutOfBlocksError(RuntimeError):
    """A pool has fewer free blocks than were asked for. Callers ask `num_free` first."""


class BlockOwnershipError(RuntimeError):
    """A block was freed or handed over by someone who does not hold it: a bug in the bookkeeping, never load."""


class BlockPool:
    """Free list of one rank; every block has at most one owner.

    First in, first out: deterministic, and a freed block rests as long as possible before it is reused, which
    gives prefix reuse and poisoning of freed blocks the most time.
    """

    def __init__(self, num_blocks: int) -> None:
        """Create a pool of blocks 1 .. num_blocks - 1; block 0 is the null block."""
        self._num_blocks = num_blocks
        self._free: deque[int] = deque(range(NULL_BLOCK + 1, num_blocks))
        self._owner: dict[int, int] = {}
        self._recently_freed: dict[int, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._owner)

    def allocate(self, count: int, owner: int) -> list[int]:
        """Hand `count` blocks to `owner`, in the order in which they became free.

        Raises:
            ValueError: `count` is negative.
            OutOfBlocksError: fewer than `count` blocks are free; nothing is handed out.
        """
        if count < 0:
            raise ValueError(f"count={count} must not be negative")
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks asked for, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._owner[block] = owner
            self._recently_freed.pop(block, None)
        return blocks

    def free(self, blocks: Sequence[int], owner: int) -> None:
        """Take back `blocks` from `owner`.

        Raises:
            BlockOwnershipError: a block is not held by `owner` (double free, foreign block, null block), or occurs
                twice. Nothing is taken back then.
        """
        self._require_owner(blocks, owner)
        for block in blocks:
            del self._owner[block]
            self._recently_freed[block] = None
        self._free.extend(blocks)

    def hand_over(self, blocks: Sequence[int], owner: int, new_owner: int) -> None:
        """Make `new_owner` the owner of `blocks`.

        Raises:
            BlockOwnershipError: as in `free`.
        """
        self._require_owner(blocks, owner)
        for block in blocks:
            self._owner[block] = new_owner

    def drain_freed(self) -> list[int]:
        """Blocks freed since the last call that are free now, in the order in which they were freed."""
        freed = list(self._recently_freed)
        self._recently_freed.clear()
        return freed

    def owned_by(self, owner: int) -> list[int]:
        """Blocks that `owner` holds. Visits all used blocks: for checks and tests."""
        return [block for block, holder in self._owner.items() if holder == owner]

    def check(self) -> None:
        """Verify that every usable block is either free or owned, once. Visits all blocks.

        Raises:
            BlockOwnershipError: a block is lost, or held twice.
        """
        seen = sorted([*self._free, *self._owner])
        if seen != list(range(NULL_BLOCK + 1, self._num_blocks)):
            lost = sorted(set(range(NULL_BLOCK + 1, self._num_blocks)) - set(seen))
            raise BlockOwnershipError(f"free and owned blocks are not the pool: lost {lost}, have {seen}")
        if not self._recently_freed.keys() <= set(self._free):
            raise BlockOwnershipError("a block is listed for poisoning that is in use")

    def _require_owner(self, blocks: Iterable[int], owner: int) -> None:
        seen: set[int] = set()
        for block in blocks:
            if self._owner.get(block) != owner or block in seen:
                raise BlockOwnershipError(
                    f"block {block} is not (or no longer) held by {owner}; its owner is {self._owner.get(block)}"
                )
            seen.add(block)
