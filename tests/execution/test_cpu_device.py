"""The CPU's streams and events keep the promises that CUDA's do, errors and delays included."""

from __future__ import annotations

import threading
import time

import pytest

pytestmark = pytest.mark.heavy

torch = pytest.importorskip("torch")
from conflux_ray.execution.cpu import CpuDevice, InlineStream, StreamError, ThreadStream  # noqa: E402


@pytest.fixture
def streams():
    pair = ThreadStream("test-a"), ThreadStream("test-b")
    yield pair
    for stream in pair:
        stream.close()


def fail() -> None:
    raise ValueError("planted")


def test_an_event_is_reached_only_after_all_work_before_it(streams) -> None:
    stream, _ = streams
    gate = threading.Event()
    stream.run(lambda: gate.wait(30) and None)
    event = stream.record()
    assert not event.query()
    gate.set()
    event.synchronize()
    assert event.query()


def test_work_runs_in_the_order_it_was_enqueued(streams) -> None:
    stream, _ = streams
    log: list[int] = []
    for i in range(100):
        stream.run(lambda i=i: log.append(i))
    stream.record().synchronize()
    assert log == list(range(100))


def test_a_stream_waits_for_another_streams_event(streams) -> None:
    first, second = streams
    gate, log = threading.Event(), []
    first.run(lambda: gate.wait(30) and None)
    first.run(lambda: log.append("first"))
    second.wait(first.record())
    second.run(lambda: log.append("second"))
    gate.set()
    second.record().synchronize()
    assert log == ["first", "second"]


def test_an_event_recorded_before_an_error_is_clean_and_one_after_it_raises(streams) -> None:
    stream, _ = streams
    before = stream.record()
    stream.run(fail)
    after = stream.record()
    before.synchronize()
    with pytest.raises(StreamError, match="planted") as caught:
        after.synchronize()
    assert isinstance(caught.value.__cause__, ValueError)


def test_nothing_runs_on_a_stream_that_failed(streams) -> None:
    stream, _ = streams
    log: list[str] = []
    stream.run(fail)
    stream.run(lambda: log.append("too late"))
    with pytest.raises(StreamError):
        stream.record().synchronize()
    assert log == []


def test_an_error_reaches_a_stream_that_waits_for_it(streams) -> None:
    first, second = streams
    log: list[str] = []
    first.run(fail)
    second.wait(first.record())
    second.run(lambda: log.append("on bad data"))
    with pytest.raises(StreamError, match="planted"):
        second.record().synchronize()
    assert log == []


def test_the_inline_stream_runs_work_at_once() -> None:
    stream, log = InlineStream(), []
    stream.run(lambda: log.append(1))
    assert log == [1]
    assert stream.record().query()


def test_a_delayed_stream_takes_that_long_and_keeps_its_order() -> None:
    stream, log = ThreadStream("test-slow", delay=(0.01, 0.01)), []
    start = time.monotonic()
    for i in range(3):
        stream.run(lambda i=i: log.append(i))
    stream.record().synchronize()
    assert time.monotonic() - start >= 0.03
    assert log == [0, 1, 2]
    stream.close()


def test_synchronizing_the_device_raises_what_failed_on_any_stream() -> None:
    device = CpuDevice()
    device.synchronize()
    device.transfer.run(fail)
    with pytest.raises(StreamError, match="planted"):
        device.synchronize()
    device.close()


def test_closing_the_device_ends_its_threads() -> None:
    before = set(threading.enumerate())
    device = CpuDevice()
    started = set(threading.enumerate()) - before
    assert {thread.name for thread in started} == {"conflux-decode", "conflux-transfer"}
    device.close()
    assert not any(thread.is_alive() for thread in started)


def test_an_uploaded_array_is_a_copy() -> None:
    import numpy as np

    device = CpuDevice()
    source = np.array([1, 2, 3])
    tensor = device.upload(source)
    source[0] = 9
    assert tensor.tolist() == [1, 2, 3]
    device.close()
