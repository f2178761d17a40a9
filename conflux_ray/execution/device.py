"""What the executor needs of a device: streams and events, attention kernels, collectives.

The executor is written once against this interface. On CUDA a stream is a CUDA stream, and everything is enqueued
without waiting; on the CPU a stream is a thread, so that the same orders of events and acknowledgements are driven.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream's work."""

    def query(self) -> bool:
        """Whether the point is reached."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the point is reached."""
        ...


class Stream(Protocol):
    """An ordered queue of device work."""

    def run(self, work: Callable[[], None]) -> None:
        """Enqueue `work`."""
        ...

    def record(self) -> Event:
        """The point after everything enqueued so far."""
        ...

    def wait(self, event: Event) -> None:
        """Everything enqueued later runs after `event`."""
        ...


class Device(ABC):
    """Streams, kernels and collectives of one worker.

    `main` runs the model and the prefill path, `decode` the decode attention beside it, `transfer` the handoff of KV
    at prefill-to-decode transitions.
    """

    torch_device: torch.device
    main: Stream
    decode: Stream
    transfer: Stream

    @abstractmethod
    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  torch.distributed's name
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        group: torch.distributed.ProcessGroup,
    ) -> None:
        """Exchange rows (dimension 0) of contiguous tensors, as `torch.distributed.all_to_all_single`.

        Called within the stream it belongs to. Every rank of the group calls it in the same order, also with nothing
        to send.
        """

    @abstractmethod
    def write_kv(
        self, view: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store K and V of n tokens.

        Args:
            view: (num_blocks, 2, page, heads, D), a view of one layer's pool.
            blocks, offsets: (n,) int64.
            k, v: (n, heads, D).
        """

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        view: torch.Tensor,
        block_tables: torch.Tensor,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        scale: float,
        output: torch.Tensor,
    ) -> None:
        """Causal attention of sequences whose last `query_lens[i]` of `seq_lens[i]` tokens are the queries.

        Args:
            query: (sum of query_lens, q_heads, D).
            view: (num_blocks, 2, page, kv_heads, D); q_heads is a multiple of kv_heads.
            block_tables: (sequences, blocks) int32.
            query_lens, seq_lens: tokens per sequence.
            scale: of the logits.
            output: (sum of query_lens, q_heads, D), written.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Block until the device has done everything enqueued on all streams."""

    def close(self) -> None:
        """Release threads and the like."""
