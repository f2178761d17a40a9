"""An instance's workers as Ray actors in the instance's placement group (implements `execution.loop.Workers`)."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from conflux_ray.execution.group import PlanChannel
from conflux_ray.execution.loop import WorkerLostError
from conflux_ray.execution.plan import IterationPlan, WorkerResult
from conflux_ray.execution.worker import WorkerSpec
from conflux_ray.logs import configure as configure_logs
from conflux_ray.vllm_compat.plugin import GRAPHS_VARIABLE, PLATFORM_VARIABLE

logger = logging.getLogger(__name__)

_STOP_SECONDS = 5.0


class WorkerActor:
    """One worker process under Ray."""

    def __init__(self) -> None:
        configure_logs()
        self._worker: Any = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def gpus(self) -> list[str]:
        """The GPUs that Ray gave this worker, as CUDA_VISIBLE_DEVICES names them."""
        return [str(gpu) for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", [])]

    def start(self, spec: WorkerSpec, gpus: Sequence[str]) -> int:
        """Load the model; returns the blocks of the KV pool.

        Args:
            spec: of this worker; its `local_rank` is an index into `gpus`.
            gpus: of all workers of the instance: one that reads another's memory must see its GPU.
        """
        if gpus:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        from conflux_ray.execution.worker import Worker

        self._worker = Worker(spec)
        return self._worker.num_blocks

    def connect(self, plans: Any) -> Any:
        """Subscribe to the plans and start the loop; returns the handle of this worker's results."""
        handle = self._worker.connect(plans)
        self._thread = threading.Thread(target=self._serve, name="conflux-worker", daemon=True)
        self._thread.start()
        return handle

    def wait(self) -> None:
        """Return when the loop has ended; raise what ended it, if it failed."""
        assert self._thread is not None, "connect first"
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def _serve(self) -> None:
        try:
            self._worker.serve()
        except BaseException as error:
            self._failure = error


class RayWorkerGroup:
    """The workers of one instance.

    Args:
        spec: of every worker; `rank`, `local_rank` and `init_method` are filled in.
        group: placement group of the instance; bundle 1 + i is worker i's.
        progress: called with a line for the log as the start-up proceeds.

    Raises:
        WorkerLostError: a worker did not start within `timeout` seconds; the message holds its error.
    """

    def __init__(
        self, spec: WorkerSpec, group: PlacementGroup | None, timeout: float, progress: Callable[[str], None]
    ) -> None:
        # The workers share this node (STRICT_PACK), so a file is all they need to meet.
        self._directory = tempfile.mkdtemp(prefix="conflux-")
        init_method = f"file://{Path(self._directory) / 'rendezvous'}"
        self._actors: list[Any] = []
        self._ends: list[ray.ObjectRef] = []
        self._channel: PlanChannel | None = None
        try:
            deadline = time.monotonic() + timeout
            self._actors = [self._create(spec, rank, group) for rank in range(spec.world_size)]
            gpus = [gpu for own in self._get([a.gpus.remote() for a in self._actors], deadline) for gpu in own]
            self.gpus = tuple(gpus)  # of the instance, as CUDA_VISIBLE_DEVICES names them
            progress("worker processes are up" + (f" on GPUs {', '.join(gpus)}" if gpus else ""))
            specs = [
                replace(spec, rank=rank, local_rank=rank if gpus else 0, init_method=init_method)
                for rank in range(spec.world_size)
            ]
            started = [a.start.remote(own, gpus) for a, own in zip(self._actors, specs, strict=True)]
            self.num_blocks: int = self._get(started, deadline)[0]  # of the KV pool, the same on all
            progress("weights loaded")
            self._channel = PlanChannel(spec.world_size, self._check_alive, spin=0.0 if spec.device == "cpu" else 1.0)
            handles = self._get([a.connect.remote(self._channel.handle) for a in self._actors], deadline)
            self._ends = [a.wait.remote() for a in self._actors]
            self._channel.open(handles)
            self._forget_rendezvous()  # all have met: whatever ends this process later, no file is left behind
        except BaseException:
            self.kill()
            raise

    def broadcast(self, plan: IterationPlan) -> None:
        """Send a plan to every worker."""
        assert self._channel is not None
        self._channel.broadcast(plan)

    def ready(self) -> bool:
        """See `loop.Workers.ready`."""
        assert self._channel is not None
        return self._channel.ready()

    def collect(self, timeout: float) -> list[WorkerResult]:
        """See `PlanChannel.collect`."""
        assert self._channel is not None
        return self._channel.collect(timeout)

    def stop(self) -> None:
        """End the workers in order, then by force."""
        if self._channel is not None and self._ends:
            try:
                self._channel.stop()
                ray.wait(self._ends, num_returns=len(self._ends), timeout=_STOP_SECONDS)
            except TimeoutError:
                logger.warning("workers do not take the order to stop; killing them")
        self.kill()

    def kill(self) -> None:
        """End the workers at once and release what they share."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._forget_rendezvous()

    def check(self) -> None:
        """Raise WorkerLostError if a worker is gone."""
        self._check_alive()

    def _forget_rendezvous(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)

    def _create(self, spec: WorkerSpec, rank: int, group: PlacementGroup | None) -> Any:
        cpu = spec.device == "cpu"
        options: dict[str, Any] = {"max_restarts": 0, "max_concurrency": 2}
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=1 + rank
            )
            bundle = group.bundle_specs[1 + rank]
            options["num_cpus"] = bundle.get("CPU", 0)
            options["num_gpus"] = bundle.get("GPU", 0)
        # What vLLM reads when it is imported.
        environment = {
            PLATFORM_VARIABLE: "cpu" if cpu else "",
            GRAPHS_VARIABLE: "1" if spec.graph_sizes else "0",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            "OMP_NUM_THREADS": str(spec.threads),
        }
        options["runtime_env"] = {"env_vars": environment}
        return ray.remote(WorkerActor).options(**options).remote()

    def _get(self, refs: list[ray.ObjectRef], deadline: float) -> list[Any]:
        pending = list(refs)
        while pending:
            ready, pending = ray.wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise WorkerLostError(f"{len(pending)} workers did not start within instance.start_timeout_s")
            for ref in ready:
                try:
                    ray.get(ref)
                except ray.exceptions.RayError as error:
                    raise WorkerLostError(f"a worker failed to start:\n{error}") from None
        return ray.get(refs)

    def _check_alive(self) -> None:
        ended, _ = ray.wait(self._ends, num_returns=len(self._ends), timeout=0) if self._ends else ([], [])
        for ref in ended:
            try:
                ray.get(ref)
            except Exception as error:
                raise WorkerLostError(f"a worker died: {error}") from None
            raise WorkerLostError("a worker ended its loop without being told to")
