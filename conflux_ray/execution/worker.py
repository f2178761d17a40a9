"""A worker process: loads its part of the model, then runs plans until it is told to stop."""

from __future__ import annotations

import importlib
import os
import traceback
from dataclasses import dataclass
from typing import Any

import torch

from conflux_ray.execution.cpu import CpuDevice
from conflux_ray.execution.plan import WorkerError, decode_plan, encode
from conflux_ray.execution.runner import ModelRunner
from conflux_ray.vllm_compat.channel import Reader, Writer
from conflux_ray.vllm_compat.loader import LoadedModel, ModelArgs, ModelShape

STOP = b""
"""Sent instead of a plan to end the loop."""

_IDLE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """What a worker needs to start; the same for all workers of an instance but for `rank`."""

    model: ModelArgs
    rank: int  # 0 .. world_size - 1; a logical rank is `model.tensor_parallel` consecutive workers
    world_size: int
    num_blocks: int
    block_size: int
    init_method: str
    device: str = "cpu"
    local_rank: int = 0
    threads: int = 1
    return_logits: bool = False
    runner: str = "conflux_ray.execution.runner:ModelRunner"  # tests put a faulty one in its place
    decode_delay: tuple[float, float] = (0.0, 0.0)
    transfer_delay: tuple[float, float] = (0.0, 0.0)
    seed: int = 0


class Worker:
    """One worker of an instance.

    Raises:
        ValueError: the device is unknown, or the model's heads do not divide (see `config`).
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        if spec.device != "cpu":
            raise ValueError(f"device={spec.device} is not supported by this build; use device=cpu")
        # All workers of an instance are on one node: their rendezvous needs no network interface.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        torch.set_num_threads(spec.threads)
        self._device = CpuDevice(spec.decode_delay, spec.transfer_delay, spec.seed + spec.rank)
        self._model = LoadedModel(
            spec.model,
            spec.rank,
            spec.world_size,
            spec.local_rank,
            spec.init_method,
            self._device.torch_device,
            backend="gloo",
        )
        runner: type[ModelRunner] = load_object(spec.runner)
        self._runner = runner(
            self._model,
            self._device,
            spec.num_blocks,
            spec.block_size,
            sp_group=self._model.new_sp_group("gloo"),
            transfer_group=self._model.new_sp_group("gloo"),
            return_logits=spec.return_logits,
        )
        self._plans: Reader | None = None
        self._results: Writer | None = None

    @property
    def shape(self) -> ModelShape:
        """Sizes of the loaded model on this worker."""
        return self._model.shape

    def connect(self, plans: Any) -> Any:
        """Subscribe to the instance's plans; returns the handle of this worker's results."""
        spin = 0.0 if self.spec.device == "cpu" else 1.0
        self._plans = Reader(plans, self.spec.rank, spin)
        self._results = Writer(1)
        return self._results.handle

    def serve(self) -> None:
        """Run plans until `STOP`. A failing iteration is reported, then raised: the instance is lost as a whole."""
        assert self._plans is not None, "connect first"
        assert self._results is not None
        self._plans.wait_until_ready()
        self._results.wait_until_ready()
        try:
            while True:
                try:
                    data = self._plans.receive(_IDLE_SECONDS)
                except TimeoutError:
                    continue
                if data == STOP:
                    return
                self._results.send(encode(self._runner.run(decode_plan(data))))
        except Exception:
            self._results.send(encode(WorkerError(self.spec.rank, traceback.format_exc())))
            raise
        finally:
            self._device.close()


def load_object(name: str) -> Any:
    """The object named `module:attribute`."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)
