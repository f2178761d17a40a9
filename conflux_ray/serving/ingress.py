"""The ingress as a Ray Serve deployment: vLLM's OpenAI application in front of the instances of a directory.

Ray Serve owns its life: replicas, health, rolling updates, the HTTP proxy in front. No token passes through a Ray
call; requests and outputs travel between this replica and the instances over `conflux_ray.transport`.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ray import serve

from conflux_ray.heap import freeze
from conflux_ray.logs import configure as configure_logs
from conflux_ray.metrics.ray_export import RayExporter
from conflux_ray.serving.directory import Directory
from conflux_ray.serving.environment import warn_if_slow
from conflux_ray.serving.options import IngressOptions

if TYPE_CHECKING:
    from conflux_ray.vllm_compat.frontend import FrontEnd

logger = logging.getLogger(__name__)


class Ingress:
    """One ingress replica.

    Args:
        options: its settings.
        open_directory: makes the directory of instances; called in the replica's event loop.
    """

    def __init__(self, options: IngressOptions, open_directory: Callable[[], Directory]) -> None:
        self._options = options
        self._open_directory = open_directory
        self._front_end: FrontEnd | None = None
        self._exporter: RayExporter | None = None
        configure_logs()
        warn_if_slow()

    async def __serve_build_asgi_app__(self) -> Any:
        """Called by Ray Serve in the event loop that will run the application."""
        from conflux_ray.vllm_compat.plugin import use_cpu_platform

        use_cpu_platform()  # before vLLM is imported: an ingress has no GPU, wherever it runs
        from conflux_ray.vllm_compat.frontend import build_front_end

        ingress_id = f"ingress-{uuid.uuid4().hex[:12]}"
        self._front_end = await build_front_end(self._options, self._open_directory(), ingress_id)
        self._exporter = RayExporter(self._front_end.metrics.store)
        self._exporter.start()
        freeze()
        return self._front_end.app

    def check_health(self) -> None:
        """Ray Serve replaces the replica when this raises; a missing instance is no reason to."""
        if self._front_end is not None and self._front_end.llm.errored:
            raise RuntimeError("the front end's output handler has ended; see the replica's log")


def build_ingress(
    options: IngressOptions, open_directory: Callable[[], Directory], **deployment_options: Any
) -> serve.Application:
    """The ingress as an application to pass to `serve.run`, or to return from a builder.

    Args:
        options: settings of every replica.
        open_directory: a picklable callable without arguments.
        deployment_options: of `serve.deployment`, e.g. num_replicas, ray_actor_options, graceful_shutdown_timeout_s.
    """
    defaults: dict[str, Any] = {
        "name": "ingress",
        # The middleware bounds requests and answers 429; Serve's own bound would hold them back silently.
        "max_ongoing_requests": options.max_in_flight + 64,
    }
    deployment = serve.deployment(**(defaults | deployment_options))(serve.ingress()(Ingress))
    return deployment.bind(options, open_directory)
