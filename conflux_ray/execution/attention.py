"""Conflux Parallelism's attention region: distributed prefill beside local decode (paper, sections 4 and 6.1).

For one layer, on one worker:

* *Prefill*, on the main stream: send Q, K, V of the own shard to the ranks of their heads (`exchange`); write the
  received K and V into head-sharded blocks; attend the own head shard for the tokens of all ranks; send it back.
* *Decode*, on the decode stream: write K and V into local blocks; attend over the local context, all heads.

Both join before the output projection. A rank without a shard enters every collective all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conflux_ray.execution.batch import BlockTable, RankBatch, gather_slots, stack_tables
from conflux_ray.execution.device import Device, Event, Sequences, Stream
from conflux_ray.execution.exchange import HeadExchange, HeadLayout


class KVPool:
    """One worker's KV memory: (num_blocks, 2, block_size, kv_heads, D) for each layer, all in one tensor, in two views.

    Attributes:
        layers: the decode view of each layer.
        prefill_views: the prefill view of each layer, (num_blocks, 2, prefill_page, kv_heads / P, D).
        all_layers, all_prefill_views: the same of the whole tensor: block b of layer l is block l * layer_stride + b.
        layer_stride: blocks from one layer to the next, 0 where they share memory.
    """

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        layout: HeadLayout,
        dtype: torch.dtype,
        device: torch.device,
        one_layer: bool = False,
    ) -> None:
        # A warm-up does not read what it writes, so all its layers may share one layer's memory.
        distinct = 1 if one_layer else num_layers
        self.layer_stride = 0 if one_layer else num_blocks
        shape = (distinct * num_blocks, 2, block_size, layout.num_kv_heads, layout.head_size)
        self.all_layers = torch.zeros(shape, dtype=dtype, device=device)
        sharded = (distinct * num_blocks, 2, block_size * layout.sp_degree, layout.shard_kv_heads, layout.head_size)
        self.all_prefill_views = self.all_layers.view(sharded)
        self.num_blocks = num_blocks
        starts = [layer * self.layer_stride for layer in range(num_layers)]
        self.layers = [self.all_layers[start : start + num_blocks] for start in starts]
        self.prefill_views = [self.all_prefill_views[start : start + num_blocks] for start in starts]
        self.block_size = block_size
        self.prefill_page = block_size * layout.sp_degree

    def poison(self, blocks: list[int], value: float) -> None:
        """Overwrite blocks in every layer, so that a later read of a freed block shows."""
        for layer in self.layers:
            layer[blocks] = value


@dataclass(slots=True)
class AttentionStep:
    """The index tensors of one iteration on one worker, the same for every layer."""

    num_decodes: int
    shard_sizes: list[int]  # prefill tokens per source rank
    rank: int
    overlap: bool
    tables: torch.Tensor  # all that names a block, int32: the four tensors of blocks and tables below are parts of it
    decode_blocks: torch.Tensor  # (n_d,)
    decode_offsets: torch.Tensor
    decode: Sequences  # n_d of one query each, in the decode view
    prefill_blocks: torch.Tensor  # (T,)
    prefill_offsets: torch.Tensor
    prefill: Sequences  # one per segment, in the prefill view
    arrivals: list[list[Event]] = field(default_factory=list)  # per layer: KV the decodes of this iteration wait for

    @property
    def num_received(self) -> int:
        return sum(self.shard_sizes)

    @property
    def num_tokens(self) -> int:
        """Tokens of this rank, decodes first."""
        return self.num_decodes + self.shard_sizes[self.rank]

    @property
    def decode_tables(self) -> torch.Tensor:
        """Block tables of the decodes, (n_d, blocks)."""
        return self.decode.tables


def build_step(
    batch: RankBatch,
    rank: int,
    prefill_tables: Mapping[int, BlockTable],
    decode_tables: Mapping[int, BlockTable],
    pool: KVPool,
    device: Device,
    overlap: bool,
    decode_sms: int | None = None,
) -> AttentionStep:
    """Turn a rank's batch and its block tables into index tensors, uploaded by the device's next `commit`.

    Args:
        decode_sms: multiprocessors for decode attention where it runs beside prefill; None lets both take all. What it
            leaves is prefill's from the start, the rest once decode is done.
    """
    prefill_blocks, prefill_offsets = gather_slots(batch.received, prefill_tables, pool.prefill_page)
    indices, decode_offsets = np.divmod(batch.decode_positions, pool.block_size)
    written = [decode_tables[a][i] for a, i in zip(batch.decode_ids, indices.tolist(), strict=True)]
    decode_lens = (batch.decode_positions + 1).tolist()
    prefill_lens = [s.end for s in batch.received]
    decode_margin = 0
    if decode_sms is not None and overlap and batch.decode_ids and batch.received and device.num_sms:
        decode_margin = max(device.num_sms - decode_sms, 0)
    parts: list[npt.NDArray[Any]] = [
        np.array(written, np.int64),
        prefill_blocks,
        stack_tables([decode_tables[a] for a in batch.decode_ids], decode_lens, pool.block_size),
        stack_tables([prefill_tables[s.alloc_id] for s in batch.received], prefill_lens, pool.prefill_page),
    ]
    tables, uploaded = _upload_together(device, parts)
    return AttentionStep(
        num_decodes=batch.num_decodes,
        shard_sizes=batch.shard_sizes,
        rank=rank,
        overlap=overlap,
        tables=tables,
        decode_blocks=uploaded[0],
        decode_offsets=device.upload(decode_offsets),
        decode=_sequences(device, uploaded[2], [1] * batch.num_decodes, decode_lens, decode_margin),
        prefill_blocks=uploaded[1],
        prefill_offsets=device.upload(prefill_offsets),
        prefill=_sequences(device, uploaded[3], [s.end - s.start for s in batch.received], prefill_lens),
    )


_ALIGNMENT = 16  # elements


def _upload_together(device: Device, parts: list[npt.NDArray[Any]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Arrays as int32 in one tensor, and each one as a part of it."""
    starts = np.cumsum([0] + [-(-part.size // _ALIGNMENT) * _ALIGNMENT for part in parts]).tolist()
    together = np.zeros(starts[-1], np.int32)
    for start, part in zip(starts, parts, strict=False):
        together[start : start + part.size] = part.reshape(-1)
    tensor = device.upload(together)
    views = [tensor[start : start + part.size].view(part.shape) for start, part in zip(starts, parts, strict=False)]
    return tensor, views


def _sequences(
    device: Device, tables: torch.Tensor, query_lens: list[int], seq_lens: list[int], sm_margin: int = 0
) -> Sequences:
    return Sequences(
        query_lens,
        seq_lens,
        tables,
        device.upload(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)),
        device.upload(np.array(seq_lens, np.int32)),
        sm_margin,
    )


class XPAttention:
    """Runs the attention region of every layer of one worker.

    Args:
        device: streams, kernels, collectives.
        pool: the worker's KV memory.
        layout: heads of this worker.
        exchange: of heads, in the SP group: the workers of the same base-TP index on all logical ranks.
        scale: of the attention logits.
    """

    def __init__(self, device: Device, pool: KVPool, layout: HeadLayout, exchange: HeadExchange, scale: float) -> None:
        self.device = device
        self.pool = pool
        self.layout = layout
        self.exchange = exchange
        self.scale = scale

    def plan(self, step: AttentionStep) -> None:
        """Let the attention kernels prepare for the iteration; its index tensors are on the device by now."""
        if step.num_decodes:
            self.device.plan_attention(step.decode, self.pool.layers[0], self.layout.num_heads)
        if step.num_received:
            self.device.plan_attention(step.prefill, self.pool.prefill_views[0], self.layout.shard_heads)

    def __call__(
        self,
        step: AttentionStep,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Attend one layer.

        Args:
            step: this iteration's indices.
            layer: index of the layer.
            query, output: (tokens, num_heads, D), decode tokens first; rows past the batch are padding.
            key, value: (tokens, num_kv_heads, D).
        """
        for event in step.arrivals[layer] if step.arrivals else ():
            self._decode_stream(step).wait(event)
        self.attend(step, self.pool.layers[layer], self.pool.prefill_views[layer], query, key, value, output)

    def attend(
        self,
        step: AttentionStep,
        local: torch.Tensor,
        sharded: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        """Both paths, side by side, in the layer that the step's tables name.

        Args:
            local, sharded: the decode and the prefill view of the KV.
        """
        n_d, end = step.num_decodes, step.num_tokens
        main, stream = self.device.main, self._decode_stream(step)
        if n_d:
            if stream is not main:
                stream.wait(main.record())
            stream.run(lambda: self._decode(step, local, query[:n_d], key[:n_d], value[:n_d], output[:n_d]))
        if step.num_received:
            self._prefill(step, sharded, query[n_d:end], key[n_d:end], value[n_d:end], output[n_d:end])
        if n_d and stream is not main:
            main.wait(stream.record())

    def _decode_stream(self, step: AttentionStep) -> Stream:
        return self.device.decode if step.overlap and step.num_received else self.device.main

    def _decode(
        self,
        step: AttentionStep,
        view: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        self.device.write_kv(view, step.decode_blocks, step.decode_offsets, key, value)
        self.device.attend(query, view, step.decode, self.scale, output)

    def _prefill(
        self,
        step: AttentionStep,
        view: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        layout = self.layout
        received = self._scatter_heads(step, query, key, value)
        q, k, v = received.split([layout.shard_heads, layout.shard_kv_heads, layout.shard_kv_heads], dim=1)
        self.device.write_kv(view, step.prefill_blocks, step.prefill_offsets, k, v)
        attended = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.device.attend(q, view, step.prefill, self.scale, attended)
        self._gather_heads(step, attended, output)

    def _scatter_heads(
        self, step: AttentionStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """First exchange: from (n_p, all heads) here to (T, this rank's heads), Q, K and V packed."""
        return self.exchange.scatter(query, key, value, step.shard_sizes, step.rank)

    def _gather_heads(self, step: AttentionStep, attended: torch.Tensor, output: torch.Tensor) -> None:
        """Second exchange: from (T, this rank's heads) back to (n_p, all heads)."""
        self.exchange.gather(attended, step.shard_sizes, step.rank, output)


MOST_PLACES = 3
"""Sets of places that layers find Q, K, V and their output in, for which attention is enqueued anew in an iteration."""


class RepeatedAttention(XPAttention):
    """The attention region enqueued a few times an iteration at most and repeated for every layer.

    All layers do the same with the same indices, but for where their KV is. So the step's tables name blocks of one
    tensor of all layers, and after each layer they move on to the next. Where a device can repeat work at next to no
    cost to the host (CUDA captures a graph), a layer costs the host a launch instead of dozens, which is what limits
    mixed iterations.

    Repeated work reads and writes the same memory. Most models' layers find Q, K, V and the output in the same few
    places, since each frees what the next one takes; a layer that finds them elsewhere copies them to a place of their
    own, and back.
    """

    def __init__(self, device: Device, pool: KVPool, layout: HeadLayout, exchange: HeadExchange, scale: float) -> None:
        super().__init__(device, pool, layout, exchange, scale)
        self._places: list[torch.Tensor] = []  # of Q, K, V and the output, for layers that find them elsewhere
        self._work: dict[tuple[int, ...], Callable[[], None]] = {}  # of this iteration, by where it reads and writes

    def plan(self, step: AttentionStep) -> None:
        super().plan(step)
        self._work.clear()

    def __call__(
        self,
        step: AttentionStep,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        for event in step.arrivals[layer] if step.arrivals else ():
            self.device.main.wait(event)
        if not step.num_decodes and not step.num_received:
            return
        n = step.num_tokens
        found = [query[:n], key[:n], value[:n], output[:n]]
        work = self._repeat(step, found, MOST_PLACES)
        if work is not None:
            work()
            return
        places = self._take_places(n)
        for place, given in zip(places[:3], found, strict=False):
            place.copy_(given)
        work = self._repeat(step, places, MOST_PLACES + 1)
        assert work is not None
        work()
        output[:n] = places[3]

    def _repeat(self, step: AttentionStep, tensors: list[torch.Tensor], most: int) -> Callable[[], None] | None:
        """The attention of a layer whose Q, K, V and output are these; None if there are `most` others already."""
        where = tuple(number for tensor in tensors for number in (tensor.data_ptr(), *tensor.stride()))
        work = self._work.get(where)
        if work is None and len(self._work) < most:
            pool = self.pool

            def layer() -> None:
                self.attend(step, pool.all_layers, pool.all_prefill_views, *tensors)
                if pool.layer_stride:
                    step.tables.add_(pool.layer_stride)

            work = self._work[where] = self.device.repeatable(layer)
        return work

    def _take_places(self, num_tokens: int) -> list[torch.Tensor]:
        if not self._places or self._places[0].shape[0] < num_tokens:
            layout, pool = self.layout, self.pool.all_layers
            rows = 1 << max(num_tokens - 1, 0).bit_length()
            heads = [layout.num_heads, layout.num_kv_heads, layout.num_kv_heads, layout.num_heads]
            self._places = [pool.new_empty(rows, h, layout.head_size) for h in heads]
        return [place[:num_tokens] for place in self._places]
