"""A server that is stopped, interrupted or loses a worker leaves nothing behind, and no stream ends in silence."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from conflux_ray.models import store
from tests.e2e.server import ready, shared_memory, stop, wait_for
from tests.e2e.tiny import leftovers, start_stream, tiny_server, workers_of

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def reference():
    from conflux_ray.models.reference import Reference

    return Reference(store.model_dir("tiny-llama"))


def test_a_killed_worker_costs_a_pause_and_no_token(tmp_path: Path, reference) -> None:
    before = shared_memory()
    with tiny_server(tmp_path, 18100) as server:
        first = workers_of(server)
        assert len(first) == 2
        stream = start_stream(server, max_tokens=900)
        os.kill(first[0].pid, signal.SIGKILL)
        wait_for(lambda: not any(p.is_running() for p in first), 30, lambda: "the other worker lives on")
        wait_for(lambda: len(workers_of(server)) == 2, 120, lambda: "no new workers")
        stream.join(120)
        assert stream.error is None, stream.error
        assert stream.done
        assert stream.finish_reason == "length"
        assert stream.tokens == reference.greedy([7, 8, 9, 10], 900)
        wait_for(lambda: ready(server.url), 60)
        server.wait_idle()
        assert stop(server) == []
    wait_for(lambda: shared_memory() <= before, 20, lambda: f"left behind: {shared_memory() - before}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stopped_server_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    before = leftovers()
    with tiny_server(tmp_path, 18101) as server:
        stream = start_stream(server, max_tokens=900)
        assert stop(server, number) == []
        stream.join(60)
        assert not stream.is_alive()
        assert stream.done or stream.error is not None, "the stream ended in silence"
    wait_for(lambda: leftovers() <= before, 20, lambda: f"left behind: {leftovers() - before}")
