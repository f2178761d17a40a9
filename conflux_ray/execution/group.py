"""The instance's side of its workers: the plan channel, and a group of local processes for tests and demonstrations.

The cluster starts workers as Ray actors instead (`conflux_ray.cluster`); both speak through `PlanChannel`.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from conflux_ray.execution.loop import WorkerLostError
from conflux_ray.execution.plan import IterationPlan, WorkerError, WorkerResult, decode_result, encode
from conflux_ray.execution.worker import STOP, Worker, WorkerSpec
from conflux_ray.vllm_compat.channel import Reader, Writer
from conflux_ray.vllm_compat.loader import ModelShape
from conflux_ray.vllm_compat.plugin import GRAPHS_VARIABLE

_STOP_SECONDS = 10.0


class PlanChannel:
    """Plans to all workers over shared memory, results back (implements `loop.Workers`).

    Args:
        num_workers: readers of the plans.
        alive: raises WorkerLostError if a worker's process is gone; called about once a second while waiting.
        spin: seconds of busy polling for a result before sleeping.
    """

    def __init__(self, num_workers: int, alive: Callable[[], None], spin: float = 0.0) -> None:
        self._plans = Writer(num_workers)
        self._results: list[Reader] = []
        self._alive = alive
        self._spin = spin

    @property
    def handle(self) -> Any:
        """For `Worker.connect`."""
        return self._plans.handle

    def open(self, result_handles: Sequence[Any]) -> None:
        """Connect to the workers' results and wait until all are connected; `Worker.serve` must be running."""
        self._results = [Reader(handle, 0, self._spin) for handle in result_handles]
        self._plans.wait_until_ready()
        for reader in self._results:
            reader.wait_until_ready()

    def broadcast(self, plan: IterationPlan) -> None:
        """Send a plan to every worker."""
        self._plans.send(encode(plan))

    def ready(self) -> bool:
        """See `loop.Workers.ready`."""
        return any(reader.ready() for reader in self._results)

    def collect(self, timeout: float) -> list[WorkerResult]:
        """The results of the oldest iteration not collected, in order of worker; raises WorkerLostError."""
        deadline = time.monotonic() + timeout
        return [self._receive(worker, reader, deadline) for worker, reader in enumerate(self._results)]

    def _receive(self, worker: int, reader: Reader, deadline: float) -> WorkerResult:
        while True:
            try:
                result = decode_result(reader.receive(min(1.0, max(0.01, deadline - time.monotonic()))))
            except TimeoutError:
                self._alive()
                if time.monotonic() >= deadline:
                    raise WorkerLostError(f"worker {worker} did not answer in time") from None
                continue
            if isinstance(result, WorkerError):
                raise WorkerLostError(f"worker {result.worker} failed:\n{result.message}")
            return result

    def stop(self) -> None:
        """Tell the workers to end their loop."""
        self._plans.send(STOP, timeout=1.0)

    def close(self) -> None:
        """Release the shared memory."""
        self._plans.close()
        for reader in self._results:
            reader.close()


class LocalWorkerGroup:
    """Workers as local processes: on the CPU forked from a server that has imported vLLM once, else started afresh.

    Args:
        spec: of every worker; `rank`, `local_rank` and `init_method` are filled in.

    Raises:
        WorkerLostError: a worker failed to start; the message holds its error.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        context: ForkServerContext | SpawnContext
        if spec.device == "cpu":
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["conflux_ray.execution.worker"])
        else:
            # A process forked from one that has looked for a GPU cannot use it, and importing vLLM looks.
            context = multiprocessing.get_context("spawn")
            os.environ[GRAPHS_VARIABLE] = "1" if spec.graph_sizes else "0"
        self._directory = tempfile.TemporaryDirectory(prefix="conflux-")
        init_method = f"file://{Path(self._directory.name) / 'rendezvous'}"
        self._processes: list[BaseProcess] = []
        self._pipes: list[Connection] = []
        self._channel = PlanChannel(spec.world_size, self._check_alive)
        try:
            for rank in range(spec.world_size):
                ours, theirs = context.Pipe()
                process = context.Process(
                    target=_main,
                    args=(
                        replace(spec, rank=rank, local_rank=0 if spec.one_gpu else rank, init_method=init_method),
                        self._channel.handle,
                        theirs,
                    ),
                    name=f"conflux-worker-{rank}",
                    daemon=True,
                )
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(ours)
            answers = [self._answer(rank) for rank in range(spec.world_size)]
            self.shape: ModelShape = answers[0][0]
            self.num_blocks: int = answers[0][1]
            self._channel.open([handle for *_, handle in answers])
        except BaseException:
            self.kill()
            raise

    def broadcast(self, plan: IterationPlan) -> None:
        """Send a plan to every worker."""
        self._channel.broadcast(plan)

    def ready(self) -> bool:
        """See `loop.Workers.ready`."""
        return self._channel.ready()

    def collect(self, timeout: float) -> list[WorkerResult]:
        """See `PlanChannel.collect`."""
        return self._channel.collect(timeout)

    def close(self) -> None:
        """Stop the workers and wait for them."""
        self._channel.stop()
        for process in self._processes:
            process.join(timeout=_STOP_SECONDS)
        self.kill()

    def kill(self) -> None:
        """End the workers at once."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join()
        self._channel.close()
        self._directory.cleanup()

    def _answer(self, rank: int) -> tuple[ModelShape, int, Any]:
        pipe = self._pipes[rank]
        while not pipe.poll(1.0):
            self._check_alive()
        answer = pipe.recv()
        if isinstance(answer, str):
            raise WorkerLostError(f"worker {rank} failed to start:\n{answer}")
        return answer

    def _check_alive(self) -> None:
        for process in self._processes:
            if not process.is_alive():
                raise WorkerLostError(f"{process.name} exited with code {process.exitcode}")


def _main(spec: WorkerSpec, plans: Any, pipe: Connection) -> None:
    import traceback

    try:
        worker = Worker(spec)
        handle = worker.connect(plans)
    except BaseException:
        pipe.send(traceback.format_exc())
        return
    pipe.send((worker.shape, worker.num_blocks, handle))
    worker.serve()
