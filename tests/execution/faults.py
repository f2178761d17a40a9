"""Runners with one planted bug each: the oracle must fail on every one of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from conflux_ray.execution.attention import AttentionStep, XPAttention
from conflux_ray.execution.batch import RankBatch
from conflux_ray.execution.plan import IterationPlan, WorkerResult
from conflux_ray.execution.runner import ModelRunner


class DroppedBlock(ModelRunner):
    """The first block of every longer context is read from the null block."""

    def build_step(self, batch: RankBatch, overlap: bool, decode_sms: int | None = None) -> AttentionStep:
        step = super().build_step(batch, overlap, decode_sms)
        if step.decode_tables.shape[1] > 1:
            step.decode_tables[:, 0] = 0
        return step


class _SwappedHeads(XPAttention):
    def _scatter_heads(
        self, step: AttentionStep, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        received = super()._scatter_heads(step, query, key, value)
        received[:, [0, 1]] = received[:, [1, 0]]
        return received


class SwappedHeads(ModelRunner):
    """Two query heads change places in the all-to-all."""

    attention_class = _SwappedHeads


class ShiftedPosition(ModelRunner):
    """Decodes write and attend one position too far."""

    def build_batch(self, plan: IterationPlan) -> RankBatch:
        batch = super().build_batch(plan)
        return replace(batch, decode_positions=np.maximum(batch.decode_positions - 1, 0))


class ReversedSegments(ModelRunner):
    """Received tokens are taken in the wrong order of segments."""

    def build_batch(self, plan: IterationPlan) -> RankBatch:
        batch = super().build_batch(plan)
        return replace(batch, received=batch.received[::-1])


class StaleBlock(ModelRunner):
    """A grown block table keeps its last block instead of the new one."""

    def _apply(self, plan: IterationPlan) -> None:
        before = {g.alloc_id: self._decode_tables.get(g.alloc_id) for g in plan.growths}
        super()._apply(plan)
        for alloc_id, table in before.items():
            if table is not None and len(table) and alloc_id in self._decode_tables:
                self._decode_tables[alloc_id][len(table) :] = table[-1]


class Raises(ModelRunner):
    """Fails in the third iteration."""

    def run(self, plan: IterationPlan) -> WorkerResult:
        if plan.iteration == 2:
            raise RuntimeError("planted failure")
        return super().run(plan)
