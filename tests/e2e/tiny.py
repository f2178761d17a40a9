"""A server of a tiny model, its processes, and clients that read one stream to its end."""

from __future__ import annotations

import contextlib
import json
import tempfile
import threading
from pathlib import Path
from typing import Any

import httpx
import psutil

from conflux_ray.models import store
from tests.e2e.server import Server, running, shared_memory

TINY = {
    "model": {"max_model_len": 1024, "served_model_name": "tiny"},
    "instance": {"sp_degree": 2, "kv_memory_gib": 0.05, "drain_timeout_s": 60, "iteration_timeout_s": 15},
}


def tiny_server(folder: Path, port: int, launcher: bool = False, **instance: Any):
    """A server of tiny-llama on two ranks; `instance` changes keys of that section."""
    changes = {section: dict(values) for section, values in TINY.items()}
    changes["model"]["path"] = str(store.model_dir("tiny-llama"))
    changes["instance"] |= instance
    return running(folder, port, launcher=launcher, **changes)


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

    def __init__(self, server: Server, prompt: list[int], max_tokens: int, **changes: Any) -> None:
        super().__init__()
        self.url = server.url
        self.changes = changes
        self.body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        } | changes
        self.tokens: list[int] = []
        self.first = threading.Event()
        self.finish_reason: str | None = None
        self.done = False
        self.error: str | None = None
        self.status: int | None = None

    def run(self) -> None:
        try:
            with httpx.stream("POST", f"{self.url}/v1/completions", json=self.body, timeout=120) as response:
                self.status = response.status_code
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
