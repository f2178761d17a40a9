"""Ulysses' two exchanges of heads around prefill attention, by collectives: what every device can do.

The other way, into the memory of the other GPUs, is `peer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from conflux_ray.execution.device import Device

SHARED_VARIABLE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""torch's: set to 1, workers on the same GPU may share memory (tests)."""


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """Attention heads of one worker (of one base-TP rank) and their Ulysses split over P ranks."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    sp_degree: int

    @property
    def shard_heads(self) -> int:
        """Query heads one rank attends for prefill."""
        return self.num_heads // self.sp_degree

    @property
    def shard_kv_heads(self) -> int:
        """KV heads one rank holds for prefill."""
        return self.num_kv_heads // self.sp_degree

    @property
    def packed_heads(self) -> int:
        """Heads a token sends to one rank: its Q, K and V shard."""
        return self.shard_heads + 2 * self.shard_kv_heads


class HeadExchange(Protocol):
    """Moves the heads of prefill tokens between the ranks; every rank calls it for every layer in the same order.

    n_p are this rank's tokens, T those of all ranks, in order of source rank; `shard_sizes[r]` are rank r's.
    """

    def scatter(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shard_sizes: Sequence[int], rank: int
    ) -> torch.Tensor:
        """From (n_p, all heads) here to (T, packed_heads, D): this rank's heads of all tokens, Q, K and V packed.

        Args:
            query, key, value: each token contiguous.

        Returns:
            Valid until the next call.
        """
        ...

    def gather(self, attended: torch.Tensor, shard_sizes: Sequence[int], rank: int, output: torch.Tensor) -> None:
        """From (T, shard_heads, D) back to `output`, (n_p, num_heads, D), each token contiguous."""
        ...


class CollectiveExchange:
    """Heads packed by destination, an all-to-all, and what came back put side by side (implements `HeadExchange`).

    Args:
        device: whose kernels and collectives to use.
        layout: heads of this worker.
        group: the SP group.
    """

    def __init__(self, device: Device, layout: HeadLayout, group: torch.distributed.ProcessGroup) -> None:
        self._device = device
        self._layout = layout
        self._group = group

    def scatter(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shard_sizes: Sequence[int], rank: int
    ) -> torch.Tensor:
        """See `HeadExchange`."""
        layout, n_p = self._layout, query.shape[0]
        p = layout.sp_degree
        send = self._device.pack_heads(query, key, value, p)
        received = send.new_empty(sum(shard_sizes), layout.packed_heads, layout.head_size)
        self._device.all_to_all(received, send, shard_sizes, [n_p] * p, self._group)
        return received

    def gather(self, attended: torch.Tensor, shard_sizes: Sequence[int], rank: int, output: torch.Tensor) -> None:
        """See `HeadExchange`."""
        layout, n_p = self._layout, output.shape[0]
        p = layout.sp_degree
        back = attended.new_empty(p * n_p, layout.shard_heads, layout.head_size)
        self._device.all_to_all(back, attended, [n_p] * p, shard_sizes, self._group)
        self._device.merge_heads(back, output)
