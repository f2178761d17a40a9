"""The exchange of heads by writing into the other GPUs' memory, over NVLink, without a collective.

Every rank has two buffers that all others may write (torch's symmetric memory): one for the heads it attends, one for
what its own tokens' heads have become. A kernel per destination reads Q, K and V where they lie and writes the shard to
its final place there, so nothing is packed or merged on the way; a barrier of all ranks ends each exchange.

Two barriers a layer are enough. Who has passed the second barrier knows that the others have attended, hence read the
first buffer; who has passed the first barrier of the next layer knows that they have read the second one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
import torch.distributed._symmetric_memory as symmetric_memory

from conflux_ray.execution import kernels
from conflux_ray.execution.exchange import SHARED_VARIABLE, CollectiveExchange, HeadExchange, HeadLayout

logger = logging.getLogger(__name__)

_SCATTER, _GATHER = 0, 1  # channels of the barriers


class PeerExchange:
    """Implements `HeadExchange` on GPUs that reach each other's memory.

    Args:
        layout: heads of this worker.
        group: the SP group; all its workers come here together.
        most_received: prefill tokens of all ranks together in one iteration, at most.
        most_tokens: of one rank, likewise.
        dtype: of heads.
        device: of this worker.
        otherwise: takes iterations that are larger.
        smallest: the smallest of an integer of all workers.

    Raises:
        RuntimeError: the GPUs cannot share memory, or one has not enough.
    """

    def __init__(
        self,
        layout: HeadLayout,
        group: torch.distributed.ProcessGroup,
        most_received: int,
        most_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        otherwise: HeadExchange,
        smallest: Callable[[int], int],
    ) -> None:
        self._layout = layout
        self._limits = most_received, most_tokens
        self._otherwise = otherwise
        scattered = (most_received, layout.packed_heads, layout.head_size)
        gathered = (most_tokens, layout.num_heads, layout.head_size)
        start = most_received * layout.packed_heads * layout.head_size
        size = start + most_tokens * layout.num_heads * layout.head_size
        memory = _allocate(size, dtype, device)
        if not smallest(int(memory is not None)):  # who went on alone would wait for ever
            raise RuntimeError("a worker has no memory for it")
        self._memory = memory
        self._handle = symmetric_memory.rendezvous(self._memory, group)
        ranks = range(layout.sp_degree)
        self._scattered = [self._handle.get_buffer(rank, scattered, dtype, 0) for rank in ranks]
        self._gathered = [self._handle.get_buffer(rank, gathered, dtype, start) for rank in ranks]

    def scatter(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shard_sizes: Sequence[int], rank: int
    ) -> torch.Tensor:
        """See `HeadExchange`."""
        if not self._fits(shard_sizes):
            return self._otherwise.scatter(query, key, value, shard_sizes, rank)
        start, n_p = sum(shard_sizes[:rank]), shard_sizes[rank]
        for peer in self._others_first(rank):
            kernels.push_heads(query, key, value, self._layout.sp_degree, peer, self._scattered[peer][start:][:n_p])
        self._handle.barrier(_SCATTER)
        return self._scattered[rank][: sum(shard_sizes)]

    def gather(self, attended: torch.Tensor, shard_sizes: Sequence[int], rank: int, output: torch.Tensor) -> None:
        """See `HeadExchange`."""
        if not self._fits(shard_sizes):
            self._otherwise.gather(attended, shard_sizes, rank, output)
            return
        heads = self._layout.shard_heads
        starts = [0, *accumulate(shard_sizes)]
        for peer in self._others_first(rank):
            target = self._gathered[peer][: shard_sizes[peer], rank * heads : (rank + 1) * heads]
            kernels.copy_heads(attended[starts[peer] : starts[peer + 1]], target)
        self._handle.barrier(_GATHER)
        kernels.copy_heads(self._gathered[rank][: shard_sizes[rank]], output)

    def _fits(self, shard_sizes: Sequence[int]) -> bool:
        """Whether the buffers hold an iteration; all ranks come to the same answer."""
        return sum(shard_sizes) <= self._limits[0] and max(shard_sizes) <= self._limits[1]

    def _others_first(self, rank: int) -> list[int]:
        """All ranks, the next one first, so that not all write to the same one at once; the own one last."""
        p = self._layout.sp_degree
        return [(rank + step) % p for step in range(1, p + 1)]


def _allocate(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor | None:
    try:
        return symmetric_memory.empty(size, dtype=dtype, device=device)
    except RuntimeError as error:
        logger.warning("no symmetric memory: %s", error)
        return None


def peer_exchange(
    layout: HeadLayout,
    group: torch.distributed.ProcessGroup,
    most_received: int,
    most_tokens: int,
    dtype: torch.dtype,
    device: torch.device,
    otherwise: CollectiveExchange,
    smallest: Callable[[int], int],
) -> HeadExchange:
    """A `PeerExchange`, or `otherwise` where the GPUs do not reach each other; the workers agree on it.

    Args:
        smallest: the smallest of an integer of all workers.
    """
    visible = range(torch.cuda.device_count())
    reach = len(visible) >= layout.sp_degree and all(
        torch.cuda.can_device_access_peer(device.index, other) for other in visible if other != device.index
    )
    reach = reach or os.environ.get(SHARED_VARIABLE) == "1"
    if not smallest(int(reach)):
        logger.warning("the GPUs do not reach each other's memory: heads go by NCCL")
        return otherwise
    exchange: HeadExchange = otherwise
    try:
        exchange = PeerExchange(layout, group, most_received, most_tokens, dtype, device, otherwise, smallest)
    except RuntimeError as error:
        logger.warning("no symmetric memory (%s): heads go by NCCL", error)
    return exchange if smallest(int(exchange is not otherwise)) else otherwise
