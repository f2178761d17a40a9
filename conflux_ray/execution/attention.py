"""Conflux Parallelism's attention region: distributed prefill beside local decode (paper, sections 4 and 6.1).

For one layer, on one worker:

* *Prefill*, on the main stream: pack Q, K, V of the own shard by destination rank; all-to-all; write the received K
  and V into head-sharded blocks; attend the own head shard for the tokens of all ranks; all-to-all back.
* *Decode*, on the decode stream: write K and V into local blocks; attend over the local context, all heads.

Both join before the output projection. A rank without a shard enters every collective all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from conflux_ray.execution.batch import BlockTable, RankBatch, gather_slots, slots, stack_tables
from conflux_ray.execution.device import Device, Event, Sequences


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


class KVPool:
    """One worker's KV memory: a tensor per layer, (num_blocks, 2, block_size, kv_heads, D), and its two views."""

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
        shape = (num_blocks, 2, block_size, layout.num_kv_heads, layout.head_size)
        # A warm-up does not read what it writes, so all its layers may share one layer's memory.
        distinct = 1 if one_layer else num_layers
        tensors = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(distinct)]
        self.layers = [tensors[i % distinct] for i in range(num_layers)]
        self.num_blocks = num_blocks
        sharded = (num_blocks, 2, block_size * layout.sp_degree, layout.shard_kv_heads, layout.head_size)
        self.prefill_views = [layer.view(sharded) for layer in self.layers]
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
        decode_sms: multiprocessors for decode attention where it runs beside prefill; None lets both take all.
    """
    blocks, offsets = gather_slots(batch.received, prefill_tables, pool.prefill_page)
    decode = [
        slots(decode_tables[a], batch.decode_positions[i : i + 1], pool.block_size)
        for i, a in enumerate(batch.decode_ids)
    ]
    decode_lens = [int(p) + 1 for p in batch.decode_positions]
    decode_margin = prefill_margin = 0
    if decode_sms is not None and overlap and batch.decode_ids and batch.received and device.num_sms:
        decode_margin, prefill_margin = max(device.num_sms - decode_sms, 0), decode_sms
    return AttentionStep(
        num_decodes=batch.num_decodes,
        shard_sizes=batch.shard_sizes,
        rank=rank,
        overlap=overlap,
        decode_blocks=device.upload(np.array([int(b[0]) for b, _ in decode], np.int64)),
        decode_offsets=device.upload(np.array([int(o[0]) for _, o in decode], np.int64)),
        decode=_sequences(
            device,
            [decode_tables[a] for a in batch.decode_ids],
            [1] * batch.num_decodes,
            decode_lens,
            pool.block_size,
            decode_margin,
        ),
        prefill_blocks=device.upload(blocks),
        prefill_offsets=device.upload(offsets),
        prefill=_sequences(
            device,
            [prefill_tables[s.alloc_id] for s in batch.received],
            [s.end - s.start for s in batch.received],
            [s.end for s in batch.received],
            pool.prefill_page,
            prefill_margin,
        ),
    )


def _sequences(
    device: Device, tables: list[BlockTable], query_lens: list[int], seq_lens: list[int], page: int, sm_margin: int
) -> Sequences:
    return Sequences(
        query_lens,
        seq_lens,
        device.upload(stack_tables(tables, seq_lens, page)),
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
        group: the SP group: the workers of the same base-TP index on all logical ranks.
    """

    def __init__(
        self, device: Device, pool: KVPool, layout: HeadLayout, group: torch.distributed.ProcessGroup, scale: float
    ) -> None:
        self.device = device
        self.pool = pool
        self.layout = layout
        self.group = group
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
        n_d = step.num_decodes
        end = n_d + step.shard_sizes[step.rank]
        device = self.device
        stream = device.decode if step.overlap and step.num_received else device.main
        if n_d:
            if stream is not device.main:
                stream.wait(device.main.record())
            for event in step.arrivals[layer] if step.arrivals else ():
                stream.wait(event)
            stream.run(lambda: self._decode(step, layer, query[:n_d], key[:n_d], value[:n_d], output[:n_d]))
        if step.num_received:
            self._prefill(step, layer, query[n_d:end], key[n_d:end], value[n_d:end], output[n_d:end])
        if n_d and stream is not device.main:
            device.main.wait(stream.record())

    def _decode(
        self,
        step: AttentionStep,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        view = self.pool.layers[layer]
        self.device.write_kv(view, step.decode_blocks, step.decode_offsets, key, value)
        self.device.attend(query, view, step.decode, self.scale, output)

    def _prefill(
        self,
        step: AttentionStep,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        output: torch.Tensor,
    ) -> None:
        layout, view = self.layout, self.pool.prefill_views[layer]
        received = self._scatter_heads(step, query, key, value)
        q, k, v = received.split([layout.shard_heads, layout.shard_kv_heads, layout.shard_kv_heads], dim=1)
        self.device.write_kv(view, step.prefill_blocks, step.prefill_offsets, k, v)
        attended = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.device.attend(q, view, step.prefill, self.scale, attended)
        self._gather_heads(step, attended, output)

    def _scatter_heads(
        self, step: AttentionStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """First all-to-all: from (n_p, all heads) here to (T, this rank's heads), Q, K and V packed."""
        layout, n_p = self.layout, query.shape[0]
        p = layout.sp_degree
        send = self.device.pack_heads(query, key, value, p)
        received = send.new_empty(step.num_received, layout.packed_heads, layout.head_size)
        self.device.all_to_all(received, send, step.shard_sizes, [n_p] * p, self.group)
        return received

    def _gather_heads(self, step: AttentionStep, attended: torch.Tensor, output: torch.Tensor) -> None:
        """Second all-to-all: from (T, this rank's heads) back to (n_p, all heads)."""
        layout, n_p = self.layout, output.shape[0]
        p = layout.sp_degree
        back = attended.new_empty(p * n_p, layout.shard_heads, layout.head_size)
        self.device.all_to_all(back, attended, [n_p] * p, step.shard_sizes, self.group)
        self.device.merge_heads(back, output)
