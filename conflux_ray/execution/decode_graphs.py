"""Iterations of decodes alone: the whole forward pass as one piece of work, repeated for ever.

Without prefill there is no collective of the SP group and no second stream: every rank runs its decodes as any engine
does. All index tensors have a place of their own here, at a few numbers of decodes, so that a device can capture model
and attention together (CUDA: one graph, one launch an iteration). A batch is padded with sequences that have no tokens;
they write to the null block.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from conflux_ray.execution.attention import AttentionStep, KVPool, XPAttention
from conflux_ray.execution.batch import BlockTable, RankBatch, stack_tables
from conflux_ray.execution.device import Device, Sequences
from conflux_ray.vllm_compat.loader import LoadedModel

MOST_SPLITS = 32
"""Parts that the keys of one decode may be attended in: the kernel's scratch memory must be known at capture."""


class _Kept(NamedTuple):
    """The pass at one number of decodes."""

    step: AttentionStep
    input_ids: torch.Tensor
    positions: torch.Tensor
    run: Callable[[], torch.Tensor]


class DecodeGraphs:
    """Forward passes of decodes alone.

    Args:
        model: of this worker.
        device: likewise.
        attention: of this worker; its pool is the one that passes read and write when they are captured.
        sizes: numbers of decodes, ascending.
        block_size: tokens.
    """

    def __init__(
        self, model: LoadedModel, device: Device, attention: XPAttention, sizes: Sequence[int], block_size: int
    ) -> None:
        self._model = model
        self._device = device
        self._attention = attention
        self.sizes = tuple(sizes)
        self._block_size = block_size
        self._layers = {name: i for i, name in enumerate(model.layer_names)}
        largest, where = self.sizes[-1], device.torch_device
        self._blocks = torch.zeros(largest, dtype=torch.int32, device=where)
        self._offsets = torch.zeros(largest, dtype=torch.int64, device=where)
        self._lengths = torch.ones(largest, dtype=torch.int32, device=where)
        self._starts = torch.arange(largest + 1, dtype=torch.int32, device=where)
        width = -(-model.shape.max_model_len // block_size)
        self._tables = torch.zeros(largest, width, dtype=torch.int32, device=where)
        self._kept: dict[int, _Kept] = {}

    def capture(self, pool: KVPool) -> None:
        """Capture every size for this pool; what was captured before is gone. All workers call it together."""
        self._kept.clear()
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            step = self._step(size)
            self._kept[size] = _Kept(step, *self._model.keep(size, self._attend(step, pool)))

    def takes(self, num_decodes: int) -> bool:
        """Whether there is a pass for so many."""
        return 0 < num_decodes <= self.sizes[-1]

    def run(
        self,
        batch: RankBatch,
        tables: Mapping[int, BlockTable],
        last_tokens: torch.Tensor,
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """Enqueue one iteration.

        Args:
            batch: of decodes alone.
            tables: the decode view's blocks of each allocation.
            last_tokens: token ids, and `slots`, (n_d,) int64, which of them the decodes begin with.

        Returns:
            Hidden states (rows, hidden), the decodes first; valid until the next forward pass.
        """
        n = batch.num_decodes
        kept = self._kept[self.sizes[bisect_left(self.sizes, n)]]
        lengths = (batch.decode_positions + 1).tolist()
        indices, offsets = np.divmod(batch.decode_positions, self._block_size)
        own = [tables[a] for a in batch.decode_ids]
        size = len(kept.step.decode.seq_lens)
        rows = np.zeros((4, size), np.int64)
        rows[0, :n] = [table[i] for table, i in zip(own, indices.tolist(), strict=True)]
        rows[1, :n], rows[2, :n], rows[3, :n] = offsets, lengths, batch.decode_positions
        uploaded = self._device.upload(rows)
        blocks = self._device.upload(stack_tables(own, lengths, self._block_size))
        self._device.commit()
        self._blocks[:size].copy_(uploaded[0])
        self._offsets[:size].copy_(uploaded[1])
        self._lengths[:size].copy_(uploaded[2])
        kept.positions.copy_(uploaded[3])
        self._tables[:n, : blocks.shape[1]].copy_(blocks)
        kept.step.decode.seq_lens[:] = lengths + [0] * (size - n)
        torch.index_select(last_tokens, 0, slots, out=kept.input_ids[:n])
        return kept.run()

    def _step(self, size: int) -> AttentionStep:
        """The indices of `size` decodes, to be filled in."""
        ranks = self._attention.layout.sp_degree
        nothing = self._blocks[:0]
        decode = Sequences(
            [1] * size,
            [0] * size,
            self._tables[:size],
            self._starts[: size + 1],
            self._lengths[:size],
            num_splits=MOST_SPLITS,
        )
        decode.max_seq_len = self._model.shape.max_model_len
        return AttentionStep(
            num_decodes=size,
            shard_sizes=[0] * ranks,
            rank=0,
            overlap=False,
            tables=self._tables,
            decode_blocks=self._blocks[:size],
            decode_offsets=self._offsets[:size],
            decode=decode,
            prefill_blocks=nothing,
            prefill_offsets=self._offsets[:0],
            prefill=Sequences([], [], nothing.view(0, 1), self._starts[:1], nothing),
        )

    def _attend(self, step: AttentionStep, pool: KVPool) -> Callable[..., None]:
        attention = self._attention

        def attend(
            layer_name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
        ) -> None:
            layer = self._layers[layer_name]
            if layer == 0:  # captured with the pass, since it follows from the lengths
                self._device.plan_attention(step.decode, pool.layers[0], attention.layout.num_heads)
            attention.attend(step, pool.layers[layer], pool.prefill_views[layer], query, key, value, output)

        return attend
