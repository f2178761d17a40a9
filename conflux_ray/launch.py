"""`conflux serve` and `conflux drain`: `serve run` with the environment it needs, and an end that cuts no stream.

`serve run` takes SIGINT as its graceful stop, which waits half a minute, and ends at once on SIGTERM. Container
runtimes and systemd send SIGTERM and mean: finish what you have begun. So both signals drain here first: instances take
no new requests, `/health` answers 503, streams run to their end, and then `serve run` is stopped its own way.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from conflux_ray.config import ConfigError, parse
from conflux_ray.logs import configure as configure_logs
from conflux_ray.serving.environment import serve_environment

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.25
_STOP_SECONDS = 90.0
"""Longest `serve run` may take to stop once nothing runs any more."""


def served_names(path: Path) -> list[str]:
    """Names of the models that a deployment YAML serves.

    Raises:
        ConfigError: it is no deployment of this project.
    """
    try:
        applications = yaml.safe_load(path.read_text())["applications"]
        return [parse(application["args"]).model.name for application in applications]
    except (OSError, KeyError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"{path}: not a Ray Serve configuration with applications and their args ({error!r})"
        ) from None


def tell(names: Sequence[str], drained: bool) -> bool:
    """Have all instances of these models take no new requests, or take some again.

    Returns:
        Whether no instance takes requests or has any.
    """
    import ray

    from conflux_ray.cluster.registry import registry_handle

    registries = [registry_handle(name) for name in names]
    return all(ray.get([registry.drain.remote(drained) for registry in registries], timeout=30))


def drain(names: Sequence[str], grace: float, wait: Callable[[float], bool]) -> bool:
    """Let the instances of these models take no new requests, and wait until the running ones have ended.

    Args:
        names: of models; of a Ray cluster that this process is connected to.
        grace: longest wait, seconds.
        wait: sleeps some seconds; returns whether to give up.

    Returns:
        Whether all requests have ended.
    """
    deadline = time.monotonic() + grace
    # Said again each time: a registry that is restarted meanwhile has forgotten it.
    while not tell(names, drained=True):
        if time.monotonic() > deadline or wait(_POLL_SECONDS):
            return False
    return True


def connect() -> None:
    """Connect this process to the Ray cluster of this machine."""
    import ray

    ray.init(address="auto", log_to_driver=False, logging_level="ERROR", ignore_reinit_error=True)


def drain_main(argv: Sequence[str] | None = None) -> int:
    """Drain a running server and leave it running, or, with `--undo`, have it take requests again.

    Args:
        argv: command line after `conflux drain`.

    Returns:
        0 when nothing runs any more, or at once with `--undo`; 1 when the grace is over before.
    """
    parser = argparse.ArgumentParser(prog="conflux drain", description="Take no new requests; wait for the running.")
    parser.add_argument("config", type=Path, help="the deployment YAML that the server runs")
    parser.add_argument("--grace", type=float, default=600.0, help="longest wait, seconds")
    parser.add_argument("--undo", action="store_true", help="take new requests again, within seconds")
    args = parser.parse_args(argv)
    configure_logs()
    try:
        names = served_names(args.config)
        connect()
    except (ConfigError, ConnectionError) as error:
        print(f"conflux drain: {error}", file=sys.stderr)
        return 1
    if args.undo:
        tell(names, drained=False)
        return 0

    def wait(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    return 0 if drain(names, args.grace, wait) else 1


class Launcher:
    """Runs `serve run` as a child until it ends or a signal asks for it.

    Args:
        config: the deployment YAML.
        grace: longest time for running requests after a signal, seconds.
    """

    def __init__(self, config: Path, grace: float) -> None:
        self._config = config
        self._grace = grace
        self._signals = 0

    def run(self) -> int:
        """Serve; returns the exit status of `serve run`."""
        names = served_names(self._config)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._count)
        child = subprocess.Popen(
            [str(Path(sys.executable).with_name("serve")), "run", str(self._config)],
            env={**serve_environment(), **os.environ},
            start_new_session=True,  # a terminal's Ctrl-C comes to this process alone
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        while child.poll() is None and not self._signals:
            time.sleep(_POLL_SECONDS)
        if child.poll() is None:
            self._stop(child, names)
        return child.returncode

    def _stop(self, child: subprocess.Popen[Any], names: Sequence[str]) -> None:
        logger.info(
            "draining: no new requests, at most %.0f s for the running ones; signal again to cut them", self._grace
        )
        try:
            connect()
            done = drain(names, self._grace, self._wait)
            logger.info("all requests have ended" if done else "some requests have not ended; they are cut")
        except Exception as error:  # whatever is wrong with the cluster, it has to end
            logger.warning("could not drain (%r); stopping at once", error)
        child.send_signal(signal.SIGINT)
        try:
            child.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning("serve run does not end; killing it")
            child.kill()
            child.wait()

    def _wait(self, seconds: float) -> bool:
        time.sleep(seconds)
        return self._signals > 1

    def _count(self, number: int, frame: Any) -> None:
        self._signals += 1


def serve_main(argv: Sequence[str] | None = None) -> int:
    """Serve a deployment until a signal.

    Args:
        argv: command line after `conflux serve`.

    Returns:
        The exit status of `serve run`, 2 for a configuration that cannot be served.
    """
    parser = argparse.ArgumentParser(
        prog="conflux serve",
        description="`serve run` with the environment it needs. SIGTERM and Ctrl-C let running requests end first.",
    )
    parser.add_argument("config", type=Path, help="the deployment YAML")
    parser.add_argument("--grace", type=float, default=600.0, help="longest time for running requests, seconds")
    args = parser.parse_args(argv)
    configure_logs()
    try:
        return Launcher(args.config, args.grace).run()
    except ConfigError as error:
        print(f"conflux serve: {error}", file=sys.stderr)
        return 2
