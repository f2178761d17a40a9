"""A deployment that a benchmark starts on this machine for itself, and stops again; and what its instances say."""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from conflux_ray.bench.live.contenders import Launch, serve_command
from conflux_ray.bench.live.servers import Servers, running

START_SECONDS = 600.0


@contextlib.contextmanager
def running_server(config: Mapping[str, Any], environment: Mapping[str, str], device: str = "cpu") -> Iterator[Servers]:
    """`serve run` of a configuration, with a Ray cluster of its own, stopped at the end.

    Args:
        config: of Ray Serve, with `http_options.port`.
        environment: variables that Ray is started with, beside this process's own that are not Ray's or vLLM's.
        device: "cuda" or "cpu".

    Yields:
        The server, when it is ready.

    Raises:
        ServerError: it did not become ready; the message has the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="conflux-bench-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        variables = {**environment, "RAY_USAGE_STATS_ENABLED": "0"}
        url = f"http://127.0.0.1:{config['http_options']['port']}"
        launch = Launch(serve_command(folder / "deployment.yaml"), variables, url, config)
        with running(Servers([launch], folder, "server", device)) as servers:
            servers.start(START_SECONDS)
            yield servers


def ray_is_running() -> bool:
    """Whether some Ray cluster runs on this machine: its load would be measured too."""
    return any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"]))


def ray_address(server: psutil.Process) -> str:
    """Of the Ray cluster that `serve run` started: there may be others on the machine.

    Raises:
        RuntimeError: it has none.
    """
    option = "--gcs-address="
    for child in server.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.name() == "raylet":
                return next(word.removeprefix(option) for word in child.cmdline() if word.startswith(option))
    raise RuntimeError(f"process {server.pid} has no raylet: is it `serve run` without a Ray cluster before it?")


def connect(address: str) -> None:
    """Connect this process to a Ray cluster of this machine."""
    import ray
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    # A local cluster wants a token by default, and Ray presents it by itself only where it chooses the cluster itself.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")


def instance_stats(server: Servers, count: int) -> list[dict[str, Any]]:
    """`Instance.stats` of all `count` instances.

    Raises:
        RuntimeError: not all of them answer.
    """
    # Ray Serve's client keeps state of the first cluster that a process connects to, and servers follow each other.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_ask_instances, ray_address(server.process), count).result()


def _ask_instances(address: str, count: int) -> list[dict[str, Any]]:
    connect(address)
    from ray import serve

    handle = serve.get_deployment_handle("instance", "conflux")
    found: dict[str, dict[str, Any]] = {}
    for _ in range(60):  # a handle asks an instance of its own choice
        stats = handle.stats.remote().result(timeout_s=20)
        found[stats["instance_id"]] = stats
        if len(found) == count:
            return list(found.values())
    raise RuntimeError(f"{len(found)} of {count} instances answer")
