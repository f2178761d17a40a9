"""vLLM's shared-memory message queue between an instance and its workers: plans out, results back."""

from __future__ import annotations

from typing import Any

import zmq
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, memory_fence

_CHUNK_BYTES = 1 << 20  # a larger message goes through the queue's socket
_CHUNKS = 6
_POLL_SECONDS = 1.0
_WAKE_UPS = 1000  # that may wait to be sent; the reader keeps only the last one


class Writer:
    """Sends bytes to `num_readers` readers on this node."""

    def __init__(self, num_readers: int) -> None:
        self._queue = MessageQueue(num_readers, num_readers, max_chunk_bytes=_CHUNK_BYTES, max_chunks=_CHUNKS)
        # vLLM lets one wake-up wait to be sent. ZMQ looks about once a millisecond whether it was, and until then drops
        # the next one: of two messages within a millisecond, an idle reader would see the second a second late.
        wake_ups = self._queue._spin_condition.local_notify_socket
        wake_ups.setsockopt(zmq.SNDHWM, _WAKE_UPS)
        address = wake_ups.getsockopt_string(zmq.LAST_ENDPOINT)
        wake_ups.unbind(address)
        wake_ups.bind(address)  # the limit holds for connections to a later bind

    @property
    def handle(self) -> Any:
        """What a reader needs to connect; picklable."""
        return self._queue.export_handle()

    def wait_until_ready(self) -> None:
        """Block until every reader is connected. From then on the shared memory has no name to leave behind."""
        self._queue.wait_until_ready()
        unname(self._queue)

    def send(self, data: bytes, timeout: float | None = None) -> None:
        """Enqueue; raises TimeoutError if the readers leave no room for `timeout` seconds."""
        self._queue.enqueue(data, timeout)

    def close(self) -> None:
        """Close the sockets; the shared memory goes with the last process that maps it."""
        _close(self._queue)


class Reader:
    """Receives what a `Writer` sends.

    Args:
        handle: of the writer.
        index: of this reader, 0 .. num_readers - 1.
        spin: seconds of busy polling after a message before sleeping; 0 leaves the cores to others.
    """

    def __init__(self, handle: Any, index: int, spin: float) -> None:
        self._queue = MessageQueue.create_from_handle(handle, index)
        self._queue._spin_condition.busy_loop_s = spin

    def wait_until_ready(self) -> None:
        """Block until the writer has seen every reader."""
        self._queue.wait_until_ready()

    def ready(self) -> bool:
        """Whether a message is there, so that `receive` returns at once."""
        memory_fence()
        with self._queue.buffer.get_metadata(self._queue.current_idx) as flags:
            return bool(flags[0]) and not flags[self._queue.local_reader_rank + 1]

    def receive(self, timeout: float) -> bytes:
        """The next message; raises TimeoutError after `timeout` seconds."""
        # A wake-up can be lost while the reader's subscription is young, so look at the buffer at least every second.
        waited = 0.0
        while True:
            step = min(_POLL_SECONDS, timeout - waited)
            try:
                return self._queue.dequeue(timeout=max(step, 0.001))
            except TimeoutError:
                waited += step
                if waited >= timeout:
                    raise

    def close(self) -> None:
        """Close the sockets. No `receive` may be running."""
        _close(self._queue)


def unname(queue: MessageQueue) -> None:
    """Remove the name of a queue's shared memory, which every reader has open.

    The memory lives while a process maps it, so no way of dying leaves a segment behind.
    """
    buffer = queue.buffer
    if buffer is not None and buffer.is_creator:
        buffer.shared_memory.unlink()
        buffer.is_creator = False


def _close(queue: MessageQueue) -> None:
    # An open socket with an unsent message would block the interpreter when its context is collected.
    queue.shutting_down = True
    condition = queue._spin_condition
    sockets = [queue.local_socket, condition.local_notify_socket]
    if condition.is_reader:
        sockets += [condition.write_cancel_socket, condition.read_cancel_socket]
    for socket in sockets:
        socket.close(linger=0)
