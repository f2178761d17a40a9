"""`python -m conflux_ray.cluster.leave`, a pod's preStop hook: takes its node out of the Ray cluster, cuts no stream.

Kubernetes sends a pod away without a word to Ray. This tells Ray that the node is draining, as Ray's autoscaler does
before it ends one: Ray Serve starts replicas elsewhere, sends nothing new to those here, and stops them when their
requests have ended. Then its HAProxy here lets go of its connections. The node may stop when both are gone.

Where the head is gone too, nobody can move anything; then what is left to wait for is the clients' connections.
"""

from __future__ import annotations

import argparse
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from conflux_ray.logs import configure as configure_logs

logger = logging.getLogger(__name__)

SERVING = ("ray::ServeReplica", "ray::HAProxyManager", "ray::ProxyActor")
"""Titles of the processes that hold streams: replicas, and the proxy in front of them."""
_POLL_SECONDS = 1.0
_COMMAND_SECONDS = 60.0
_STOP_SECONDS = 30
"""A proxy takes at least this long to drain, after its replicas."""


def serving_here() -> list[int]:
    """Process ids of what holds streams on this node; a pod sees no other node's processes."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        title = " ".join(process.info["cmdline"] or ())
        if title.startswith(SERVING):
            found.append(process.pid)
    return found


def clients_here(port: int) -> int:
    """Established connections to `port` of this node that come from another one."""
    return sum(
        1
        for connection in psutil.net_connections("tcp")
        if connection.status == psutil.CONN_ESTABLISHED
        and connection.laddr
        and connection.laddr.port == port
        and connection.raddr
        and connection.raddr.ip not in ("127.0.0.1", "::1", connection.laddr.ip)
    )


def ray_command(*arguments: str) -> bool:
    """Run `ray ARGUMENTS` of this installation; returns whether it succeeded."""
    ray = str(Path(sys.executable).with_name("ray"))
    try:
        # A process of its own: without a cluster to answer it, Ray takes long, and may end the process that asked.
        done = subprocess.run([ray, *arguments], capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        logger.warning("ray %s: no answer within %.0f s", arguments[0], _COMMAND_SECONDS)
        return False
    if done.returncode:
        logger.warning("ray %s: %s", arguments[0], (done.stderr or done.stdout).strip()[-500:])
    return done.returncode == 0


def this_node() -> str | None:
    """Id of the Ray node of this pod, None where there is none. Its process tells, with or without a cluster."""
    for process in psutil.process_iter(["cmdline"]):
        program, *arguments = process.info["cmdline"] or ("",)
        if Path(program).name == "raylet":
            for argument in arguments:
                name, _, value = argument.partition("=")
                if name == "--node_id":
                    return value
    return None


def announce(grace: float) -> bool:
    """Tell the cluster that this node goes within `grace` seconds; returns whether it heard."""
    node = this_node()
    if node is None:
        logger.warning("no raylet runs here; nobody to tell")
        return False
    return ray_command(
        "drain-node",
        f"--node-id={node}",
        "--reason=DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message=the pod is being deleted",
        # Ray Serve stops a replica so long before the deadline that its own graceful stop fits, even if no other has
        # started in its place: with this deadline, from now on.
        f"--deadline-remaining-seconds={max(1, int(grace) - _STOP_SECONDS)}",
    )


def leave(
    grace: float,
    port: int,
    announced: Callable[[float], bool] = announce,
    busy: Callable[[], object] = serving_here,
    clients: Callable[[int], int] = clients_here,
    head_answers: Callable[[], bool] = lambda: ray_command("health-check"),
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Announce that this node goes, and wait until it holds no stream.

    Args:
        grace: longest wait, seconds.
        port: of HTTP.
        announced, busy, clients, head_answers: the cluster and this node, as the functions above see them.
        now, sleep: the clock.

    Returns:
        Whether no stream was left when the wait ended.
    """
    deadline = now() + grace
    known = announced(grace)
    next_check = now() + _COMMAND_SECONDS
    while busy():
        if known and now() >= next_check:
            known = head_answers()
            next_check = now() + _COMMAND_SECONDS
        if not known and not clients(port):
            return True
        if now() >= deadline:
            return False
        sleep(_POLL_SECONDS)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the hook.

    Args:
        argv: command line.

    Returns:
        0 when this node holds no stream any more, 1 when the grace is over before.
    """
    parser = argparse.ArgumentParser(
        prog="python -m conflux_ray.cluster.leave", description="Take this node out of its Ray cluster; cut no stream."
    )
    parser.add_argument("--grace", type=float, required=True, help="longest wait, seconds")
    parser.add_argument("--port", type=int, default=8000, help="HTTP port of this node")
    args = parser.parse_args(argv)
    configure_logs()
    done = leave(args.grace, args.port)
    logger.info("no stream is left on this node" if done else "some streams have not ended; they are cut")
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
