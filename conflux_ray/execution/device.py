"""What the executor needs of a device: streams and events, copies, attention kernels, collectives.

The executor is written once against this interface. On CUDA a stream is a CUDA stream, and everything is enqueued
without waiting; on the CPU a stream is a thread, so that the same orders of events and acknowledgements are driven.
The kernels here are plain torch: what the CPU runs, and what CUDA's own kernels are compared with.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812


@dataclass(slots=True)
class Sequences:
    """The sequences of an attention call, the same for every layer of an iteration.

    The last `query_lens[i]` of the `seq_lens[i]` tokens of sequence i are its queries. Tensors are on the device.
    """

    query_lens: list[int]
    seq_lens: list[int]
    tables: torch.Tensor  # (sequences, blocks) int32
    query_starts: torch.Tensor  # (sequences + 1,) int32, where each one's queries begin, and the end
    lengths: torch.Tensor  # (sequences,) int32, seq_lens
    sm_margin: int = 0  # multiprocessors left to the kernels beside this one
    num_splits: int = 0  # most parts that a sequence's keys are attended in; 0: the kernel's choice
    schedule: torch.Tensor | None = None  # the attention kernel's own plan, never shared with another call site
    max_query_len: int = field(init=False)
    max_seq_len: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_query_len = max(self.query_lens, default=0)
        self.max_seq_len = max(self.seq_lens, default=0)


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
    keeps_attention: bool = True  # whether `attend` may be captured, its sequences changing only on the device
    num_sms: int = 0  # streaming multiprocessors; 0 where there is nothing to share out
    compiles: bool = False  # whether kernels and communicators come to be on first use: warm them up before serving

    @abstractmethod
    def bind(self) -> None:
        """Make the calling thread enqueue on `main`; every thread that uses the device calls it first."""

    @abstractmethod
    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        """A copy of `array` on the device, for work enqueued on `main` after the next `commit`."""

    @abstractmethod
    def commit(self) -> None:
        """Enqueue the copies asked for since the last call, as few as can be."""

    @abstractmethod
    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of `tensor` in the host's memory, to be read once an event recorded on `main` later is reached."""

    @abstractmethod
    def mark(self) -> Any:
        """A point in time of `main`, for `elapsed`."""

    @abstractmethod
    def elapsed(self, start: Any, end: Any) -> float:
        """Seconds between two marks that are both reached."""

    def repeatable(self, work: Callable[[], None]) -> Callable[[], None]:
        """Work on `main` in a form that costs the host next to nothing to enqueue, where the device has one.

        Args:
            work: always does the same with the same memory. It may be called here, or not; what it does happens only
                when the result is called.
        """
        return work

    @abstractmethod
    def kv_budget(self, utilization: float) -> int:
        """Bytes for the KV pool: a share of the device's memory, less what is in use and what the warm-up's peak took.

        Args:
            utilization: the share, of which everything must fit.

        Raises:
            ValueError: the device's memory is not for the taking: name the number of blocks.
        """

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

    def write_kv(
        self, view: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Store K and V of n tokens.

        Args:
            view: (num_blocks, 2, page, heads, D), a view of one layer's pool.
            blocks: (n,) int32.
            offsets: (n,) int64.
            k, v: (n, heads, D), each token contiguous.
        """
        blocks = blocks.long()
        view[blocks, 0, offsets] = k
        view[blocks, 1, offsets] = v

    def pack_heads(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, degree: int) -> torch.Tensor:
        """Arrange n tokens' heads by destination rank.

        Args:
            query: (n, heads, D), each token contiguous.
            key, value: (n, kv_heads, D), likewise.
            degree: P, which divides both numbers of heads.

        Returns:
            (P * n, (heads + 2 * kv_heads) / P, D): for each rank its shard of every token's Q, K and V heads.
        """
        n, size = query.shape[0], query.shape[-1]
        shards = [t.reshape(n, degree, t.shape[1] // degree, size) for t in (query, key, value)]
        packed = torch.cat(shards, dim=2)
        return packed.transpose(0, 1).reshape(degree * n, packed.shape[2], size)

    def merge_heads(self, shards: torch.Tensor, output: torch.Tensor) -> None:
        """Put the head shards of n tokens, received from P ranks, side by side.

        Args:
            shards: (P * n, heads / P, D), contiguous.
            output: (n, heads, D), each token contiguous; written.
        """
        n, heads, size = output.shape
        degree = heads // shards.shape[1]
        output.view(n, degree, shards.shape[1], size).copy_(
            shards.view(degree, n, shards.shape[1], size).transpose(0, 1)
        )

    def gather_kv(self, view: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """K and V of n tokens: (n, 2, heads, D) of a view (num_blocks, 2, page, heads, D); indices are (n,) int64."""
        return view[blocks, :, offsets].contiguous()

    def scatter_kv(self, view: torch.Tensor, blocks: torch.Tensor, offsets: torch.Tensor, shards: torch.Tensor) -> None:
        """Store K and V of n tokens whose head shards came from P ranks.

        Args:
            view: (num_blocks, 2, page, heads, D), written.
            blocks, offsets: (n,) int64.
            shards: (P * n, 2, heads / P, D), contiguous; rank s held heads [s * heads / P, (s + 1) * heads / P).
        """
        heads, size = view.shape[3:]
        degree, n = heads // shards.shape[2], len(blocks)
        merged = shards.view(degree, n, 2, shards.shape[2], size).permute(1, 2, 0, 3, 4)
        view[blocks, :, offsets] = merged.reshape(n, 2, heads, size)

    @abstractmethod
    def plan_attention(self, sequences: Sequences, view: torch.Tensor, num_heads: int) -> None:
        """Prepare `attend` calls on `sequences`, one after the other on one stream, if its kernel plans ahead.

        Args:
            view: as `attend` will get it.
            num_heads: query heads.
        """

    def attend(
        self, query: torch.Tensor, view: torch.Tensor, sequences: Sequences, scale: float, output: torch.Tensor
    ) -> None:
        """Causal attention; a sequence without tokens is padding, and its output of no account.

        Args:
            query: (queries of all sequences, q_heads, D), each token contiguous.
            view: (num_blocks, 2, page, kv_heads, D); q_heads is a multiple of kv_heads.
            scale: of the logits.
            output: (queries of all sequences, q_heads, D), written.
        """
        page, heads, size = view.shape[2:]
        start = 0
        for row, (queries, length) in enumerate(zip(sequences.query_lens, sequences.seq_lens, strict=True)):
            if not length:  # a row of padding
                output[start : start + queries] = 0.0
                start += queries
                continue
            blocks = sequences.tables[row, : -(-length // page)].long()
            kv = view[blocks]  # (blocks, 2, page, heads, D)
            k = kv[:, 0].reshape(-1, heads, size)[:length].transpose(0, 1)
            v = kv[:, 1].reshape(-1, heads, size)[:length].transpose(0, 1)
            q = query[start : start + queries].transpose(0, 1)
            mask = None
            if queries > 1:
                mask = torch.ones(queries, length, dtype=torch.bool, device=query.device).tril(length - queries)
            out = F.scaled_dot_product_attention(
                q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0), attn_mask=mask, scale=scale, enable_gqa=True
            )
            output[start : start + queries] = out.squeeze(0).transpose(0, 1)
            start += queries

    @abstractmethod
    def synchronize(self) -> None:
        """Block until the device has done everything enqueued on all streams."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and the like."""
