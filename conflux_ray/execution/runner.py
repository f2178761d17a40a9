"""Runs iteration plans on one worker: block tables and token state, the forward pass, sampling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from conflux_ray.execution.attention import (
    AttentionStep,
    KVPool,
    RepeatedAttention,
    XPAttention,
    build_step,
)
from conflux_ray.execution.batch import BlockTable, RankBatch, build_batch
from conflux_ray.execution.decode_graphs import DecodeGraphs
from conflux_ray.execution.device import Device, Event
from conflux_ray.execution.exchange import CollectiveExchange, HeadExchange, HeadLayout
from conflux_ray.execution.plan import (
    Chunk,
    Decode,
    IterationPlan,
    NewPrefill,
    NewResident,
    Shard,
    Transfer,
    WorkerResult,
)
from conflux_ray.execution.transition import Handoff, Transitions
from conflux_ray.kv import KVGeometry
from conflux_ray.vllm_compat.loader import LoadedModel
from conflux_ray.vllm_compat.sampler import Sampled, SampleRow, SamplingBatch, TokenSampler
from conflux_ray.wire import Sampling

POISON = 3.0e4
"""Written over freed blocks in tests: large, finite, and representable in float16."""


@dataclass(slots=True)
class Resident:
    """A request that samples on this rank."""

    new: NewResident
    slot: int  # of its last sampled token


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """The largest iteration, which the warm-up runs once to learn what memory it takes."""

    max_prefill_tokens: int = 2048  # of one iteration, all ranks together
    max_num_seqs: int = 128  # resident decodes of one logical rank
    gpu_memory_utilization: float = 0.9  # share of the device's memory for everything
    repeat_attention: bool = False  # enqueue the attention region once an iteration, for all layers
    graph_sizes: tuple[int, ...] = ()  # numbers of tokens at which the linear regions are captured as CUDA graphs
    peer_memory: bool = False  # exchange heads by writing into the other GPUs' memory, where that works
    decode_sizes: tuple[int, ...] = ()  # numbers of decodes at which iterations of decodes alone are, as a whole


class RunningIteration:
    """An iteration that is enqueued, and perhaps not yet done.

    Args:
        done: reached when its tokens are in the host's memory.
        read: completes the result then.
    """

    def __init__(self, done: Event, read: Callable[[], WorkerResult]) -> None:
        self._done = done
        self._read = read

    def finish(self) -> WorkerResult:
        """Wait for the iteration and report it."""
        self._done.synchronize()
        return self._read()


class ModelRunner:
    """One worker's executor of Conflux Parallelism.

    Args:
        model: weights and process groups.
        device: streams, kernels, collectives.
        num_blocks: of the KV pool, the null block included; 0 takes the memory that the largest iteration leaves.
        block_size: tokens of all heads in one block.
        sp_group, transfer_group: two communicators over the same workers.
        return_logits: report the logits of every sampled row (tests).
        limits: the largest iteration.

    Raises:
        RuntimeError: the memory left for KV does not hold one request of the model's length.
        ValueError: `num_blocks` is 0 on a device that cannot size its pool.
    """

    attention_class: type[XPAttention] | None = None  # tests put a faulty one in its place

    def __init__(
        self,
        model: LoadedModel,
        device: Device,
        num_blocks: int,
        block_size: int,
        sp_group: torch.distributed.ProcessGroup,
        transfer_group: torch.distributed.ProcessGroup,
        return_logits: bool = False,
        limits: RunnerLimits | None = None,
    ) -> None:
        shape = model.shape
        self.model = model
        self.device = device
        self.rank = model.logical_rank
        self.worker = torch.distributed.get_rank()
        self.num_ranks = model.sp_degree
        self.return_logits = return_logits
        self.layout = HeadLayout(shape.num_heads, shape.num_kv_heads, shape.head_size, self.num_ranks)
        self.block_size = block_size
        self.sampler = TokenSampler(device.torch_device, shape.vocab_size, device.upload)
        self._layers = {name: i for i, name in enumerate(model.layer_names)}
        self._prefill_tables: dict[int, BlockTable] = {}
        self._decode_tables: dict[int, BlockTable] = {}
        self._residents: dict[int, Resident] = {}
        self._last_tokens = torch.zeros(64, dtype=torch.int64, device=device.torch_device)
        self._free_slots = list(range(64))[::-1]
        self.pool = self._make_pool(2)
        limits = limits or RunnerLimits()
        attention = self.attention_class or (RepeatedAttention if limits.repeat_attention else XPAttention)
        self.attention = attention(device, self.pool, self.layout, self._exchange(sp_group, limits), model.scale)
        self.transitions = Transitions(device, self.pool, self.layout, self.rank, transfer_group)
        self._decodes: DecodeGraphs | None = None
        if device.compiles or not num_blocks:
            self.warm_up(limits)
        if limits.graph_sizes:  # before the pool is sized: graphs take memory too
            model.capture(limits.graph_sizes)
        if limits.decode_sizes and device.keeps_attention:
            self._decodes = DecodeGraphs(model, device, self.attention, limits.decode_sizes, block_size)
            if not num_blocks:
                self._decodes.capture(self.pool)  # on a pool to throw away: the same memory again is taken below
        self._use(self._make_pool(num_blocks or self._size_pool(limits.gpu_memory_utilization)))
        if self._decodes is not None:
            self._decodes.capture(self.pool)

    @torch.inference_mode()
    def run(self, plan: IterationPlan) -> RunningIteration:
        """Enqueue one iteration; returns without waiting for the device."""
        start = self.device.mark()
        self._apply(plan)
        batch = self.build_batch(plan)
        result = WorkerResult(plan.iteration, self.worker)
        handoff = self.transitions.begin(plan.transfers, self._prefill_tables, self._decode_tables)
        sampled: _Fetched | None = None
        # With a prefill anywhere, a rank without tokens still attends its heads for the tokens of the others.
        if plan.chunks or batch.num_tokens:
            sampled = self._forward(plan, batch, handoff)
        begun = self.transitions.num_begun
        end, done = self.device.mark(), self.device.main.record()

        def read() -> WorkerResult:
            if sampled is not None and self.model.tp_rank == 0:
                sampled.report(result)
            result.acknowledged = self.transitions.acknowledge(begun, plan.wait_transfers)
            result.elapsed = self.device.elapsed(start, end)
            return result

        return RunningIteration(done, read)

    def _exchange(self, group: torch.distributed.ProcessGroup, limits: RunnerLimits) -> HeadExchange:
        """How heads go from rank to rank; all workers come to the same answer."""
        collective = CollectiveExchange(self.device, self.layout, group)
        if not limits.peer_memory or self.num_ranks == 1 or self.device.torch_device.type != "cuda":
            return collective
        from conflux_ray.execution.peer import peer_exchange

        most = limits.max_prefill_tokens
        return peer_exchange(
            self.layout,
            group,
            self.num_ranks * most,  # the warm-up gives each rank as many
            most,
            self.model.shape.dtype,
            self.device.torch_device,
            collective,
            self.model.smallest,
        )

    def warm_up(self, limits: RunnerLimits) -> None:
        """Run the largest iteration once, on a pool of its own that all layers share. All workers call it together.

        It loads and compiles kernels, opens communicators, and leaves the device's peak memory to be read.
        """
        length = max(1, min(limits.max_prefill_tokens, self.model.shape.max_model_len - 1))
        table = list(range(1, 1 + -(-length // self.block_size)))
        final = self.pool
        self._use(self._make_pool(len(table) + 1, one_layer=True))
        # Twice, since the first run's compilation and communicators take memory of their own.
        for _ in range(2):
            self.run(self._largest_plan(limits, length, table)).finish()
        self._forget_all()
        self._use(final)
        self.device.synchronize()

    def _largest_plan(self, limits: RunnerLimits, length: int, table: list[int]) -> IterationPlan:
        """Every rank computes `max_prefill_tokens` of prefill and `max_num_seqs` decodes; one prompt is handed over."""
        page_table = table[: -(-length // (self.block_size * self.num_ranks))]
        chunks, prefills, residents, decodes = [], [], [], []
        alloc_id = 0
        for rank in range(self.num_ranks):
            left = limits.max_prefill_tokens
            while left:
                tokens = min(left, length)
                chunks.append(Chunk(alloc_id, bytes(4 * tokens), (Shard(rank, 0, tokens),)))
                prefills.append(NewPrefill(alloc_id, (page_table,) * self.num_ranks))
                left -= tokens
                alloc_id += 1
        # The sampling that takes most memory: sorted logits of every row.
        sampling = Sampling(max_tokens=2, temperature=1.0, top_p=0.9)
        residents.append(NewResident(0, 0, table, sampling, 0, b"", 1))
        handover = min(limits.max_prefill_tokens, length)
        for rank in range(self.num_ranks):
            ids = range(alloc_id, alloc_id + limits.max_num_seqs)
            alloc_id += limits.max_num_seqs
            residents += [NewResident(i, rank, table[:1], sampling, i, b"", 1) for i in ids]
            decodes.append(tuple(Decode(i, 0) for i in ids))
        return IterationPlan(
            0,
            tuple(decodes),
            chunks=tuple(chunks),
            new_prefills=tuple(prefills),
            new_residents=tuple(residents),
            transfers=(Transfer(0, 0, 0, handover, 0),),
            wait_transfers=True,
        )

    def _size_pool(self, utilization: float) -> int:
        """Blocks that fit beside the largest iteration, the same number on every worker."""
        shape = self.model.shape
        per_token = 2 * self.layout.num_kv_heads * self.layout.head_size * shape.dtype.itemsize * shape.num_layers
        block_bytes = per_token * self.block_size
        budget = self.device.kv_budget(utilization)
        num_blocks = self.model.smallest(max(budget, 0) // block_bytes)
        needed = KVGeometry(self.block_size, self.num_ranks, 2).min_blocks(shape.max_model_len)
        if num_blocks < needed:
            raise RuntimeError(
                f"gpu_memory_utilization={utilization} leaves {budget / 2**30:.2f} GiB for KV on this worker and "
                f"{num_blocks} blocks on the tightest one, and a request of max_model_len={shape.max_model_len} needs "
                f"{needed} ({needed * block_bytes / 2**30:.2f} GiB): raise gpu_memory_utilization, lower "
                "max_model_len or max_prefill_tokens, or give a logical rank more GPUs"
            )
        return num_blocks

    def _make_pool(self, num_blocks: int, one_layer: bool = False) -> KVPool:
        shape = self.model.shape
        return KVPool(
            shape.num_layers,
            num_blocks,
            self.block_size,
            self.layout,
            shape.dtype,
            self.device.torch_device,
            one_layer,
        )

    def _use(self, pool: KVPool) -> None:
        self.pool = self.attention.pool = self.transitions.pool = pool

    def build_batch(self, plan: IterationPlan) -> RankBatch:
        """This rank's part of the plan."""
        return build_batch(plan, self.rank, self.num_ranks)

    def build_step(self, batch: RankBatch, overlap: bool, decode_sms: int | None = None) -> AttentionStep:
        """The attention indices of a batch, on the device: what was uploaded before is there as well."""
        step = build_step(
            batch, self.rank, self._prefill_tables, self._decode_tables, self.pool, self.device, overlap, decode_sms
        )
        self.device.commit()
        return step

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

    def _forward(self, plan: IterationPlan, batch: RankBatch, handoff: Handoff | None) -> _Fetched | None:
        upload = self.device.upload
        sampling = self._prepare_sampling(batch) if batch.sample_ids else None
        decode_slots = upload(np.array([self._residents[a].slot for a in batch.decode_ids], np.int64))
        if self._decodes is not None and not plan.chunks and handoff is None and self._decodes.takes(batch.num_decodes):
            # KV that is still arriving is waited for as a whole: its last layer comes last.
            for event in (self.transitions.arrivals(batch.decode_ids, len(self._layers)) or [[]])[-1]:
                self.device.main.wait(event)
            hidden = self._decodes.run(batch, self._decode_tables, self._last_tokens, decode_slots)
            return None if sampling is None else self._sample(batch, hidden, sampling)
        shard_tokens, own_positions = upload(batch.shard_tokens), upload(batch.positions)
        step = self.build_step(batch, plan.overlap, plan.decode_sms)
        step.arrivals = self.transitions.arrivals(batch.decode_ids, len(self._layers))
        self.attention.plan(step)
        n_d, n = batch.num_decodes, batch.num_tokens
        input_ids, positions = self.model.inputs(n)
        torch.index_select(self._last_tokens, 0, decode_slots, out=input_ids[:n_d])
        input_ids[n_d:n] = shard_tokens
        positions[:n] = own_positions

        def attend(
            layer_name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor
        ) -> None:
            layer = self._layers[layer_name]
            self.attention(step, layer, query, key, value, output)
            if handoff is not None:
                self.transitions.after_layer(handoff, layer)

        hidden = self.model.forward(input_ids, positions, attend)
        return None if sampling is None else self._sample(batch, hidden, sampling)

    def _prepare_sampling(self, batch: RankBatch) -> _SamplingInput:
        residents = [self._residents[a] for a in batch.sample_ids]
        rows = [
            SampleRow(resident.new.sampling, resident.new.seed, position)
            for resident, position in zip(residents, batch.sample_positions, strict=True)
        ]
        return _SamplingInput(
            self.sampler.prepare(rows),
            self.device.upload(batch.sample_rows),
            self.device.upload(np.array([r.slot for r in residents], np.int64)),
        )

    def _sample(self, batch: RankBatch, hidden: torch.Tensor, sampling: _SamplingInput) -> _Fetched:
        logits = self.model.logits(hidden[sampling.hidden_rows])
        kept = self.device.fetch(logits.float()) if self.return_logits else None
        sampled = self.sampler.sample(logits, sampling.batch)
        self._last_tokens[sampling.slots] = sampled.tokens
        return _Fetched(list(batch.sample_ids), sampling.batch, sampled.to_host(self.device.fetch), kept)


@dataclass(slots=True)
class _SamplingInput:
    """What sampling needs on the device before the forward pass."""

    batch: SamplingBatch
    hidden_rows: torch.Tensor  # (rows,) of the hidden states
    slots: torch.Tensor  # (rows,) of the sampled tokens


@dataclass(slots=True)
class _Fetched:
    """An iteration's sampled tokens on their way to the host."""

    alloc_ids: list[int]
    batch: SamplingBatch
    sampled: Sampled
    logits: torch.Tensor | None

    def report(self, result: WorkerResult) -> None:
        """Put what has arrived into `result`."""
        result.alloc_ids = self.alloc_ids
        result.tokens = self.sampled.tokens.tolist()
        logprobs = self.sampled.logprobs_of(self.batch)
        if any(entry is not None for entry in logprobs):
            result.logprobs = logprobs
        if self.logits is not None:
            result.logits = [row.astype("<f4").tobytes() for row in self.logits.numpy()]
