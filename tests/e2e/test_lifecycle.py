"""A server that is stopped, interrupted or loses a worker leaves nothing behind, and no stream ends in silence."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import threading
from pathlib import Path

import httpx
import psutil
import pytest

from conflux_ray.models import store
from tests.e2e.server import Server, ready, running, shared_memory, stop, wait_for

pytestmark = pytest.mark.heavy

TINY = {
    "model": {"max_model_len": 1024, "served_model_name": "tiny"},
    "instance": {"sp_degree": 2, "kv_memory_gib": 0.05, "drain_timeout_s": 60, "iteration_timeout_s": 15},
}


def tiny_server(folder: Path, port: int):
    changes = {section: dict(values) for section, values in TINY.items()}
    changes["model"]["path"] = str(store.model_dir("tiny-llama"))
    return running(folder, port, **changes)


def workers_of(server: Server) -> list[psutil.Process]:
    found = []
    for process in server.descendants():
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end while it is looked at
            if "WorkerActor" in " ".join(process.cmdline()):
                found.append(process)
    return found


def leftovers() -> set[str]:
    """What a server could leave on this machine. Other programs' segments come and go, so callers wait a little."""
    return shared_memory() | {str(path) for path in Path(tempfile.gettempdir()).glob("conflux-*/rendezvous")}


class Stream(threading.Thread):
    """A client that reads one greedy stream to its end, whatever happens to the server meanwhile."""

    def __init__(self, server: Server, prompt: list[int], max_tokens: int) -> None:
        super().__init__()
        self.url = server.url
        self.body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        self.tokens: list[int] = []
        self.first = threading.Event()
        self.finish_reason: str | None = None
        self.done = False
        self.error: str | None = None

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=120) as response:
                for line in response.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            self.error = event["error"]["message"]
                            continue
                        choice = event["choices"][0]
                        self.tokens += choice.get("token_ids") or []
                        self.finish_reason = choice["finish_reason"] or self.finish_reason
                        self.first.set()
        except httpx.HTTPError as error:
            self.error = repr(error)
        finally:
            self.first.set()


def start_stream(server: Server, max_tokens: int = 300) -> Stream:
    stream = Stream(server, [7, 8, 9, 10], max_tokens)
    stream.start()
    assert stream.first.wait(60)
    return stream


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
