"""The global router (section 5.1, step 1): the instance with the lowest normalized queued workload."""

from __future__ import annotations

from collections.abc import Sequence

from conflux_ray.simulator.deployment import Instance
from conflux_ray.simulator.request import Request


class Router:
    """Sends every request to one instance, as it arrives.

    Args:
        instances: at least one.
    """

    def __init__(self, instances: Sequence[Instance]) -> None:
        if not instances:
            raise ValueError("a router needs at least one instance")
        self.instances = instances
        self.routed = [0] * len(instances)

    def choose(self) -> int:
        """The instance with the least queued work in seconds; of equals the one that got fewest requests so far."""
        if len(self.instances) == 1:
            return 0
        return min(
            range(len(self.instances)),
            key=lambda i: (self.instances[i].queued_work(), self.routed[i], i),
        )

    def submit(self, request: Request) -> None:
        chosen = self.choose()
        self.routed[chosen] += 1
        self.instances[chosen].submit(request)
