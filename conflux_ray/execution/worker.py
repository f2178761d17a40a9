"""A worker process: loads its part of the model, then runs plans until it is told to stop."""

from __future__ import annotations

import importlib
import os
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from conflux_ray.config import ConfluxConfig, ModelGeometry
from conflux_ray.execution.cpu import CpuDevice
from conflux_ray.execution.device import Device
from conflux_ray.execution.plan import IterationPlan, WorkerError, WorkerResult, decode_plan, encode
from conflux_ray.execution.runner import ModelRunner, RunnerLimits, RunningIteration
from conflux_ray.heap import freeze
from conflux_ray.vllm_compat.channel import Reader, Writer
from conflux_ray.vllm_compat.graphs import LARGEST_GRAPH, decode_sizes, graph_sizes
from conflux_ray.vllm_compat.loader import LoadedModel, ModelArgs, ModelShape

STOP = b""
"""Sent instead of a plan to end the loop."""

_IDLE_SECONDS = 1.0
"""Between two looks at whether the other thread still lives."""

_SWITCH_SECONDS = 2e-4
"""How long the thread that enqueues may keep the other one from the interpreter; Python's 5 ms would show in TBT."""


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker needs to start; the same for all workers of an instance but for `rank`."""

    model: ModelArgs
    rank: int  # 0 .. world_size - 1; a logical rank is `model.tensor_parallel` consecutive workers
    world_size: int
    num_blocks: int  # of the KV pool, the null block included; 0: as many as the GPU's memory holds
    block_size: int
    init_method: str
    device: str = "cpu"
    local_rank: int = 0
    threads: int = 1
    return_logits: bool = False
    runner: str = "conflux_ray.execution.runner:ModelRunner"  # tests put a faulty one in its place
    decode_delay: tuple[float, float] = (0.0, 0.0)
    transfer_delay: tuple[float, float] = (0.0, 0.0)
    one_gpu: bool = False  # tests: all workers on the first GPU, `cuda.SharedCudaDevice`
    seed: int = 0
    gpu_memory_utilization: float = 0.9
    max_prefill_tokens: int = 2048  # of one iteration, all ranks together: sizes the warm-up
    max_num_seqs: int = 128  # resident decodes of one logical rank, likewise
    repeat_attention: bool = False  # `attention.RepeatedAttention`
    graph_sizes: tuple[int, ...] = ()  # of CUDA graphs, tokens (`vllm_compat.graphs.graph_sizes`); none: eager
    peer_memory: bool = False  # `peer.PeerExchange` where GPUs reach each other's memory
    decode_sizes: tuple[int, ...] = ()  # of `decode_graphs`, decodes; on a GPU at most the largest of graph_sizes


def worker_spec(config: ConfluxConfig, folder: str, geometry: ModelGeometry, num_blocks: int = 0) -> WorkerSpec:
    """What the workers of a configured instance need.

    Args:
        config: of the instance; `device` is resolved.
        folder: of the model.
        geometry: of the model.
        num_blocks: of the KV pool; 0: as many as the GPU's memory holds.
    """
    instance = config.instance
    gpu = instance.device == "cuda"
    graphs = gpu and instance.cuda_graphs
    return WorkerSpec(
        model=ModelArgs(
            model=folder,
            dtype=geometry.dtype,
            max_model_len=geometry.max_model_len,
            load_format=config.model.load_format,
            tensor_parallel=instance.tensor_parallel,
            block_size=instance.block_tokens,
            trust_remote_code=config.model.trust_remote_code,
        ),
        rank=0,
        world_size=instance.num_workers,
        num_blocks=num_blocks,
        block_size=instance.block_tokens,
        init_method="",
        device=instance.device,
        threads=instance.cpu_threads,
        gpu_memory_utilization=instance.gpu_memory_utilization,
        max_prefill_tokens=config.scheduler.max_prefill_tokens,
        max_num_seqs=instance.max_num_seqs,
        peer_memory=instance.peer_memory,
        repeat_attention=gpu and instance.attention_graphs,
        graph_sizes=graph_sizes(LARGEST_GRAPH) if graphs else (),
        decode_sizes=decode_sizes(instance.max_num_seqs) if graphs else (),
    )


class Worker:
    """One worker of an instance. It may be served from another thread than the one that made it.

    Raises:
        ValueError: the device is unknown, or the model's heads do not divide (see `config`).
        RuntimeError: the GPU, its driver or its memory does not suffice; the message names what.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        # All workers of an instance are on one node: their rendezvous needs no network interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(spec.threads)
        self._device = make_device(spec)
        self._device.bind()
        backend = "gloo" if spec.device == "cpu" or spec.one_gpu else "nccl"
        self._model = LoadedModel(
            spec.model,
            spec.rank,
            spec.world_size,
            spec.local_rank,
            spec.init_method,
            self._device.torch_device,
            backend,
        )
        runner: type[ModelRunner] = load_object(spec.runner)
        self._runner = runner(
            self._model,
            self._device,
            spec.num_blocks,
            spec.block_size,
            sp_group=self._model.new_sp_group(backend),
            transfer_group=self._model.new_sp_group(backend),
            return_logits=spec.return_logits,
            limits=RunnerLimits(
                spec.max_prefill_tokens,
                spec.max_num_seqs,
                spec.gpu_memory_utilization,
                spec.repeat_attention,
                spec.graph_sizes,
                spec.peer_memory,
                spec.decode_sizes,
            ),
        )
        self._plans: Reader | None = None
        self._results: Writer | None = None

    @property
    def shape(self) -> ModelShape:
        """Sizes of the loaded model on this worker."""
        return self._model.shape

    @property
    def num_blocks(self) -> int:
        """Blocks of this worker's KV pool, the null block included; the same on every worker."""
        return self._runner.pool.num_blocks

    def connect(self, plans: Any) -> Any:
        """Subscribe to the instance's plans; returns the handle of this worker's results."""
        spin = 0.0 if self.spec.device == "cpu" else 1.0
        self._plans = Reader(plans, self.spec.rank, spin)
        self._results = Writer(1)
        freeze()
        return self._results.handle

    def serve(self) -> None:
        """Run plans until `STOP`. A failing iteration is reported, then raised: the instance is lost as a whole."""
        assert self._plans is not None, "connect first"
        assert self._results is not None
        results = self._results
        self._plans.wait_until_ready()
        results.wait_until_ready()
        self._device.bind()
        try:
            sys.setswitchinterval(_SWITCH_SECONDS)
            run_plans(
                self._plans,
                self._runner.run,
                lambda result: results.send(encode(result)),
                lambda: results.send(encode(WorkerError(self.spec.rank, traceback.format_exc()))),
                self._device.bind,
            )
        except ReportedError:
            raise
        except Exception:
            results.send(encode(WorkerError(self.spec.rank, traceback.format_exc())))
            raise
        finally:
            self._device.close()


class Plans(Protocol):
    """Where a worker's plans come from (`vllm_compat.channel.Reader`)."""

    def receive(self, timeout: float) -> bytes:
        """The next message; raises TimeoutError after `timeout` seconds."""
        ...


class ReportedError(RuntimeError):
    """What ended the thread that reports, and is reported itself."""


def run_plans(
    plans: Plans,
    run: Callable[[IterationPlan], RunningIteration],
    send: Callable[[WorkerResult], None],
    failed: Callable[[], None],
    bind: Callable[[], None] = lambda: None,
) -> None:
    """Run plans until `STOP`; what is enqueued then is still reported.

    A thread of its own waits for iterations and reports them: enqueueing a large one takes the host tens of
    milliseconds, and the tokens of the one before must not wait for that.

    Args:
        plans: one after the other.
        run: enqueues an iteration.
        send: reports its result.
        failed: reports the exception at hand where an iteration fails after it was enqueued. Like `send` it is called
            by the other thread.
        bind: called first by the other thread, which then uses the device.

    Raises:
        ReportedError: an iteration failed after it was enqueued.
    """
    reporter = _Reporter(send, failed, bind)
    try:
        while True:
            try:
                data = plans.receive(_IDLE_SECONDS)
            except TimeoutError:
                reporter.check()
                continue
            if data == STOP:
                break
            reporter.forget()
            reporter.add(run(decode_plan(data)))
    finally:
        reporter.end()
    reporter.check()


class _Reporter:
    """Reports iterations in the order in which they were enqueued."""

    def __init__(
        self, send: Callable[[WorkerResult], None], failed: Callable[[], None], bind: Callable[[], None]
    ) -> None:
        self._send = send
        self._failed = failed
        self._bind = bind
        self._entries: list[_Entry] = []  # not let go of yet
        self._queue: queue.SimpleQueue[_Entry | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name="conflux-results", daemon=True)
        self._thread.start()

    def add(self, iteration: RunningIteration) -> None:
        """Report an iteration that has been enqueued, once it is done.

        There are two at most: the instance issues no third before it has the result of the first.
        """
        self.check()
        entry = _Entry(iteration)
        self._entries.append(entry)
        self._queue.put(entry)

    def forget(self) -> None:
        """Let go of what iterations that are reported held.

        It is for the thread that enqueues: memory that the device wrote is freed with a mark on its stream, which must
        not fall into a capture of that stream.
        """
        kept = []
        for entry in self._entries:
            if entry.reported:
                entry.iteration = None
            else:
                kept.append(entry)
        self._entries = kept

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._failure is not None:
            raise ReportedError(str(self._failure)) from self._failure

    def end(self) -> None:
        """Wait until everything is reported."""
        self._queue.put(None)
        self._thread.join()
        self.forget()

    def _loop(self) -> None:
        try:
            self._bind()
            while (entry := self._queue.get()) is not None:
                assert entry.iteration is not None
                self._send(entry.iteration.finish())
                entry.reported = True
        except BaseException as error:
            self._failure = error
            self._failed()


@dataclass(slots=True)
class _Entry:
    """An iteration on its way to being reported: only the thread that enqueued it takes it out of here."""

    iteration: RunningIteration | None
    reported: bool = False


def make_device(spec: WorkerSpec) -> Device:
    """The device of a worker; raises as `Worker` does."""
    if spec.device == "cpu":
        return CpuDevice(spec.decode_delay, spec.transfer_delay, spec.seed + spec.rank)
    if spec.device != "cuda":
        raise ValueError(f"device={spec.device} is not one of cpu, cuda")
    from conflux_ray.execution.cuda import CudaDevice, SharedCudaDevice

    page = spec.block_size * (spec.world_size // spec.model.tensor_parallel)
    kind = SharedCudaDevice if spec.one_gpu else CudaDevice
    return kind(
        spec.local_rank,
        flash_attention=spec.model.dtype not in ("float32", "float"),
        prefill_page=page,
        decode_delay=spec.decode_delay,
        transfer_delay=spec.transfer_delay,
        seed=spec.seed + spec.rank,
    )


def load_object(name: str) -> Any:
    """The object named `module:attribute`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
