"""Starts the real server the way the README does, and looks at it from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from conflux_ray.bench.server import ray_address
from conflux_ray.serving.environment import serve_environment

START_SECONDS = 240.0
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass
class Server:
    """A running `serve run`."""

    process: subprocess.Popen[bytes]
    url: str
    model: str
    log: Path
    _prober: subprocess.Popen[str] | None = None

    def stats(self) -> dict[str, Any]:
        """`Instance.stats` of an instance."""
        return self.all_stats(1)[0]

    def all_stats(self, count: int) -> list[dict[str, Any]]:
        """`Instance.stats` of `count` instances, or of those that answer."""
        return self._ask(f"stats {count}")

    def scale(self, count: int) -> None:
        """Have Ray Serve run `count` instances; needs `external_scaler_enabled` in the configuration."""
        self._ask(f"replicas {count}")

    def drain(self, on: bool) -> None:
        """Have all instances take no new requests, as `conflux drain` does, or take some again."""
        self._ask(f"drain {self.model} {'on' if on else 'off'}")

    def _ask(self, line: str) -> Any:
        if self._prober is None:
            self._prober = subprocess.Popen(
                [sys.executable, "-m", "tests.e2e.prober", ray_address(psutil.Process(self.process.pid))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=REPOSITORY,
            )
        assert self._prober.stdin is not None
        assert self._prober.stdout is not None
        print(line, file=self._prober.stdin, flush=True)
        for answer in self._prober.stdout:
            if answer.startswith("answer "):
                return json.loads(answer.removeprefix("answer "))
        raise AssertionError(f"the prober ended at {line!r}: the cluster does not answer")

    def end_prober(self) -> None:
        if self._prober is not None:
            self._prober.kill()
            self._prober.wait()
            self._prober = None

    def idle(self, count: int = 1) -> bool:
        """Whether no request runs and every KV block is free on `count` instances."""
        stats = self.all_stats(count)
        return len(stats) == count and all(
            s["running"] == s["waiting"] == s["draining_allocations"] == 0 and s["kv_used_fraction"] == 0 for s in stats
        )

    def wait_idle(self, seconds: float = 20.0, count: int = 1) -> None:
        wait_for(lambda: self.idle(count), seconds, lambda: f"not idle: {self.all_stats(count)}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)


def wait_for(condition, seconds: float, message=lambda: "") -> None:
    """Poll until `condition()` holds; AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {message()}"
        time.sleep(0.1)


def shared_memory() -> set[str]:
    """Named segments of Python's shared memory on this machine."""
    return {path.name for path in Path("/dev/shm").glob("psm_*")}


def ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@contextmanager
def running(
    folder: Path,
    port: int,
    environment: dict[str, str] | None = None,
    launcher: bool = False,
    deployment: str = "conflux.yaml",
    application: dict[str, Any] | None = None,
    **changes: Any,
) -> Iterator[Server]:
    """`serve run` (or `conflux serve`) of a deployment with `changes` to its args, stopped at the end.

    Args:
        folder: for the configuration and the log.
        port: of HTTP.
        environment: variables for the server in place of `serve_environment()`.
        launcher: run `conflux serve`.
        deployment: file in deployments/.
        application: keys to set beside the args.
        changes: per section of the args, the keys to set.
    """
    config = yaml.safe_load((REPOSITORY / "deployments" / deployment).read_text())
    config["http_options"]["port"] = port
    config["applications"][0].update(application or {})
    args = config["applications"][0]["args"]
    for section, values in changes.items():
        args.setdefault(section, {}).update(values)
    path, log = folder / "conflux.yaml", folder / "server.log"
    path.write_text(yaml.safe_dump(config))
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("CONFLUX_VLLM", "RAY_", "VLLM_LOGGING"))}
    variables |= serve_environment() if environment is None else environment
    program, *arguments = ("conflux", "serve") if launcher else ("serve", "run")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(Path(sys.executable).with_name(program)), *arguments, str(path)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
            # A test run in the background ignores the interrupt, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    server = Server(
        process, f"http://127.0.0.1:{port}", args["model"].get("served_model_name") or args["model"]["path"], log
    )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not ready(server.url):
            assert process.poll() is None, f"serve run ended with {process.returncode}:\n{tail(log)}"
            assert time.monotonic() < deadline, f"not ready within {START_SECONDS:.0f} s:\n{tail(log)}"
            time.sleep(0.25)
        yield server
    finally:
        stop(server)


def stop(server: Server, number: int = signal.SIGTERM, seconds: float = 60.0) -> list[psutil.Process]:
    """Stop the server; returns those of its processes that are still there afterwards."""
    server.end_prober()
    if server.process.poll() is not None:
        return []
    children = server.descendants()
    server.signal(number)
    try:
        server.process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        server.process.kill()
        server.process.wait()
    _, alive = psutil.wait_procs(children, timeout=15)
    for process in alive:
        process.kill()
    return alive


def tail(path: Path, lines: int = 60) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
