"""Runs iteration plans on one worker: block tables and token state, the forward pass, sampling."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from conflux_ray.execution.attention import AttentionStep, HeadLayout, KVPool, XPAttention, build_step
from conflux_ray.execution.batch import BlockTable, RankBatch, build_batch
from conflux_ray.execution.device import Device
from conflux_ray.execution.plan import IterationPlan, NewResident, WorkerResult
from conflux_ray.execution.transition import Handoff, Transitions
from conflux_ray.vllm_compat.loader import LoadedModel
from conflux_ray.vllm_compat.sampler import SampleRow, TokenSampler

POISON = 3.0e4
"""Written over freed blocks in tests: large, finite, and representable in float16."""


@dataclass(slots=True)
class Resident:
    """A request that samples on this rank."""

    new: NewResident
    slot: int  # of its last sampled token


class ModelRunner:
    """One worker's executor of Conflux Parallelism.

    Args:
        model: weights and process groups.
        device: streams, kernels, collectives.
        num_blocks: of the KV pool, the null block included.
        block_size: tokens of all heads in one block.
        sp_group, transfer_group: two communicators over the same workers.
        return_logits: report the logits of every sampled row (tests).
    """

    attention_class: type[XPAttention] = XPAttention

    def __init__(
        self,
        model: LoadedModel,
        device: Device,
        num_blocks: int,
        block_size: int,
        sp_group: torch.distributed.ProcessGroup,
        transfer_group: torch.distributed.ProcessGroup,
        return_logits: bool = False,
    ) -> None:
        shape = model.shape
        self.model = model
        self.device = device
        self.rank = model.logical_rank
        self.worker = torch.distributed.get_rank()
        self.num_ranks = model.sp_degree
        self.return_logits = return_logits
        self.layout = HeadLayout(shape.num_heads, shape.num_kv_heads, shape.head_size, self.num_ranks)
        self.pool = KVPool(
            shape.num_layers, num_blocks, block_size, self.layout, shape.dtype, device.torch_device
        )
        self.attention = self.attention_class(device, self.pool, self.layout, sp_group, model.scale)
        self.transitions = Transitions(device, self.pool, self.layout, self.rank, transfer_group)
        self.sampler = TokenSampler(device.torch_device, shape.vocab_size)
        self._layers = {name: i for i, name in enumerate(model.layer_names)}
        self._prefill_tables: dict[int, BlockTable] = {}
        self._decode_tables: dict[int, BlockTable] = {}
        self._residents: dict[int, Resident] = {}
        self._last_tokens = torch.zeros(64, dtype=torch.int64, device=device.torch_device)
        self._free_slots = list(range(64))[::-1]

    @torch.inference_mode()
    def run(self, plan: IterationPlan) -> WorkerResult:
        """Run one iteration and report it."""
        started = time.perf_counter()
        self._apply(plan)
        batch = self.build_batch(plan)
        result = WorkerResult(plan.iteration, self.worker)
        handoff = self.transitions.begin(plan.transfers, self._prefill_tables, self._decode_tables)
        # With a prefill anywhere, a rank without tokens still attends its heads for the tokens of the others.
        if plan.chunks or batch.num_tokens:
            self._forward(plan, batch, handoff, result)
        result.acknowledged = self.transitions.acknowledge(plan.wait_transfers)
        result.elapsed = time.perf_counter() - started
        return result

    def build_batch(self, plan: IterationPlan) -> RankBatch:
        """This rank's part of the plan."""
        return build_batch(plan, self.rank, self.num_ranks)

    def build_step(self, batch: RankBatch, overlap: bool) -> AttentionStep:
        """The attention indices of a batch."""
        return build_step(
            batch,
            self.rank,
            self._prefill_tables,
            self._decode_tables,
            self.pool,
            self.device.torch_device,
            overlap,
        )

    # State that plans change

    def _apply(self, plan: IterationPlan) -> None:
        if plan.iteration == 0:  # a new engine: it knows nothing of earlier allocations
            self._forget_all()
        for alloc_id in plan.drop:
            self._prefill_tables.pop(alloc_id, None)
            self._decode_tables.pop(alloc_id, None)
            resident = self._residents.pop(alloc_id, None)
            if resident is not None:
                self._free_slots.append(resident.slot)
        blocks = [block for rank, block in plan.poison if rank == self.rank]
        if blocks:
            self.pool.poison(blocks, POISON)
        for prefill in plan.new_prefills:
            self._prefill_tables[prefill.alloc_id] = np.array(prefill.block_tables[self.rank], np.int64)
        for new in plan.new_residents:
            if new.rank == self.rank:
                self._decode_tables[new.alloc_id] = np.array(new.block_table, np.int64)
                self._residents[new.alloc_id] = Resident(new, self._take_slot())
        for growth in plan.growths:
            if growth.alloc_id in self._decode_tables:
                table = self._decode_tables[growth.alloc_id]
                self._decode_tables[growth.alloc_id] = np.append(table, np.array(growth.blocks, np.int64))

    def _forget_all(self) -> None:
        self._prefill_tables.clear()
        self._decode_tables.clear()
        self._free_slots += [resident.slot for resident in self._residents.values()]
        self._residents.clear()

    def _take_slot(self) -> int:
        if not self._free_slots:
            size = len(self._last_tokens)
            self._last_tokens = torch.cat([self._last_tokens, torch.zeros_like(self._last_tokens)])
            self._free_slots = list(range(size, 2 * size))[::-1]
        return self._free_slots.pop()

    # The iteration

    def _forward(
        self, plan: IterationPlan, batch: RankBatch, handoff: Handoff | None, result: WorkerResult
    ) -> None:
        device = self.device.torch_device
        step = self.build_step(batch, plan.overlap)
        step.arrivals = self.transitions.arrivals(batch.decode_ids, len(self._layers))
        decode_slots = torch.tensor([self._residents[a].slot for a in batch.decode_ids], dtype=torch.int64, device=device)
        input_ids = torch.cat(
            [self._last_tokens[decode_slots], torch.from_numpy(batch.shard_tokens).to(device)]
        )
        positions = torch.from_numpy(batch.positions).to(device)
        padded = max(batch.num_tokens, 1)  # a rank with nothing of its own still runs every layer's collectives
        if padded > batch.num_tokens:
            input_ids, positions = input_ids.new_zeros(padded), positions.new_zeros(padded)

        def attend(
            layer_name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
        ) -> None:
            layer = self._layers[layer_name]
            if padded > batch.num_tokens:
                output.zero_()
            self.attention(step, layer, query, key, value, output)
            if handoff is not None:
                self.transitions.after_layer(handoff, layer)

        hidden = self.model.forward(input_ids, positions, attend)
        if batch.sample_ids:
            rows = torch.from_numpy(batch.sample_rows).to(device)
            self._sample(batch, self.model.logits(hidden[rows]), result)

    def _sample(self, batch: RankBatch, logits: torch.Tensor, result: WorkerResult) -> None:
        residents = [self._residents[a] for a in batch.sample_ids]
        rows = [
            SampleRow(resident.new.sampling, resident.new.seed, position)
            for resident, position in zip(residents, batch.sample_positions, strict=True)
        ]
        kept = logits.float().cpu().numpy() if self.return_logits else None
        tokens, logprobs = self.sampler.sample(logits, rows)
        slots = torch.tensor([r.slot for r in residents], dtype=torch.int64, device=self.device.torch_device)
        self._last_tokens[slots] = tokens
        if self.model.tp_rank == 0:
            result.alloc_ids = list(batch.sample_ids)
            result.tokens = tokens.tolist()
            if any(entry is not None for entry in logprobs):
                result.logprobs = logprobs
            if kept is not None:
                result.logits = [row.astype("<f4").tobytes() for row in kept]
