"""The CPU implementation of the device interface: threads for streams, plain torch, gloo."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from conflux_ray.execution.device import Device, Event, Sequences


class StreamError(RuntimeError):
    """Work on a side stream raised; raised again where its event is waited for."""


class ThreadEvent:
    """Reached when the thread gets to it; carries the stream's first error to whoever waits."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.error: BaseException | None = None

    def set(self) -> None:
        self._reached.set()

    def query(self) -> bool:
        return self._reached.is_set()

    def synchronize(self) -> None:
        self._reached.wait()
        if self.error is not None:
            raise StreamError(f"work on a side stream failed: {self.error!r}") from self.error


class InlineStream:
    """Work runs at once, in the caller's thread."""

    def run(self, work: Callable[[], None]) -> None:
        work()

    def record(self) -> Event:
        event = ThreadEvent()
        event.set()
        return event

    def wait(self, event: Event) -> None:
        event.synchronize()


class ThreadStream:
    """A thread that takes work in order.

    Args:
        name: of the thread.
        delay: (least, most) seconds to sleep before each piece of work, drawn evenly: a slow device, for tests.
        seed: of the delays.
    """

    def __init__(self, name: str, delay: tuple[float, float] = (0.0, 0.0), seed: int = 0) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | ThreadEvent | None] = queue.SimpleQueue()
        self._delay = delay
        self._random = random.Random(seed)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None]) -> None:
        self._work.put(work)

    def record(self) -> Event:
        event = ThreadEvent()
        self._work.put(event)
        return event

    def wait(self, event: Event) -> None:
        self._work.put(event.synchronize)

    def close(self) -> None:
        self._work.put(None)
        self._thread.join(timeout=5)

    @torch.inference_mode()
    def _loop(self) -> None:
        while (item := self._work.get()) is not None:
            if isinstance(item, ThreadEvent):
                item.error = self._error
                item.set()
                continue
            if self._error is not None:
                continue
            if self._delay[1] > 0:
                time.sleep(self._random.uniform(*self._delay))
            try:
                item()
            except BaseException as error:
                self._error = error


class CpuDevice(Device):
    """Executes on CPU threads.

    Args:
        decode_delay, transfer_delay: (least, most) seconds before each piece of work of that stream (tests).
        seed: of the delays.
    """

    def __init__(
        self,
        decode_delay: tuple[float, float] = (0.0, 0.0),
        transfer_delay: tuple[float, float] = (0.0, 0.0),
        seed: int = 0,
    ) -> None:
        self.torch_device = torch.device("cpu")
        self.main = InlineStream()
        self._threads = (
            ThreadStream("conflux-decode", decode_delay, seed),
            ThreadStream("conflux-transfer", transfer_delay, seed + 1),
        )
        self.decode, self.transfer = self._threads

    def all_to_all(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        group: torch.distributed.ProcessGroup,
    ) -> None:
        torch.distributed.all_to_all_single(output, input, list(output_sizes), list(input_sizes), group=group)

    def bind(self) -> None:
        pass

    def upload(self, array: npt.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.array(array))

    def commit(self) -> None:
        pass

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def mark(self) -> Any:
        return time.perf_counter()

    def elapsed(self, start: Any, end: Any) -> float:
        return end - start

    def kv_budget(self, utilization: float) -> int:
        raise ValueError("num_blocks=0 asks for a KV pool sized by the device's memory; on device=cpu name its blocks")

    def plan_attention(self, sequences: Sequences, view: torch.Tensor, num_heads: int) -> None:
        pass

    def synchronize(self) -> None:
        self.decode.record().synchronize()
        self.transfer.record().synchronize()

    def close(self) -> None:
        for thread in self._threads:
            thread.close()
