"""The shape of one rank's KV pool and the arithmetic of its two views (design, section 5; paper, section 5).

A pool is, per layer, a tensor `(num_blocks, 2, block_size, H_kv, D)` whose blocks are contiguous. The *decode view*
is that tensor: a block holds `block_size` tokens of every KV head. The *prefill view* reads the same bytes as
`(num_blocks, 2, block_size * P, H_kv / P, D)`: a block is a *page* of P times as many tokens of one P-th of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NULL_BLOCK = 0
"""The block that no allocation ever holds: writes of padded tokens go there, in either view."""


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


@dataclass(frozen=True, slots=True)
class KVGeometry:
    """Sizes of the pool that every logical rank of an instance has.

    Attributes:
        block_size: tokens of one block in the decode view.
        sp_degree: P, the number of logical ranks that share the KV heads of a prefill.
        num_blocks: blocks of one rank's pool, the null block included.

    Raises:
        ValueError: a size is out of range.
    """

    block_size: int
    sp_degree: int
    num_blocks: int

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size={self.block_size} must be at least 1 token")
        if self.sp_degree < 1:
            raise ValueError(f"sp_degree={self.sp_degree} must be at least 1")
        if self.num_blocks < 2:
            raise ValueError(
                f"num_blocks={self.num_blocks} leaves no usable block beside the null block; give the KV pool more "
                f"memory"
            )

    @property
    def prefill_page(self) -> int:
        """Tokens of one block in the prefill view."""
        return self.block_size * self.sp_degree

    @property
    def usable_blocks(self) -> int:
        """Blocks of one rank that allocations can hold."""
        return self.num_blocks - 1

    def prefill_blocks(self, tokens: int) -> int:
        """Blocks that `tokens` prefilled tokens hold on EVERY rank."""
        return _ceil_div(tokens, self.prefill_page)

    def decode_blocks(self, tokens: int) -> int:
        """Blocks that `tokens` decode tokens hold on ONE rank."""
        return _ceil_div(tokens, self.block_size)

    def min_blocks(self, max_model_len: int, headroom: int = 0) -> int:
        """Blocks of the smallest pool in which a request of `max_model_len` tokens can make its transition.

        While its KV moves, the target rank holds the request in both views.

        Args:
            max_model_len: longest request, prompt and output, tokens.
            headroom: blocks that a placement leaves free on its rank (paper, Algorithm 3, h).
        """
        return self.decode_blocks(max_model_len) + self.prefill_blocks(max_model_len) + headroom + 1

    def check_pool(self, max_model_len: int, headroom: int = 0) -> None:
        """Refuse a pool in which the longest request could never make its transition.

        Raises:
            ValueError: `num_blocks` is below `min_blocks(max_model_len, headroom)`.
        """
        needed = self.min_blocks(max_model_len, headroom)
        if self.num_blocks < needed:
            raise ValueError(
                f"num_blocks={self.num_blocks} per rank is too few for max_model_len={max_model_len}: with "
                f"block_size={self.block_size}, sp_degree={self.sp_degree} and headroom={headroom} a request of that "
                f"length needs {needed} blocks during its transition; give the KV pool more memory or lower "
                f"max_model_len"
            )

    def prefill_slot(self, table: Sequence[int], position: int) -> int:
        """Where the prefill view of a rank holds its heads of the token at `position`.

        Args:
            table: the request's prefill block table on that rank.
            position: of the token in the request, from 0.

        Returns:
            `block * prefill_page + offset`: an index over the prefill view's blocks and the tokens in them.

        Raises:
            IndexError: the table does not reach `position`.
        """
        page, offset = divmod(position, self.prefill_page)
        return table[page] * self.prefill_page + offset

    def decode_slot(self, table: Sequence[int], position: int) -> int:
        """Where the decode view holds all heads of the token at `position`.

        Args:
            table: the request's decode block table on its rank.
            position: of the token in the request, from 0.

        Returns:
            `block * block_size + offset`: an index over the decode view's blocks and the tokens in them.

        Raises:
            IndexError: the table does not reach `position`.
        """
        block, offset = divmod(position, self.block_size)
        return table[block] * self.block_size + offset
