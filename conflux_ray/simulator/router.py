"""The global router (section 5.1, step 1), and what it is compared with: one class each.

    queued_work     the instance where the request's prefill would end first: queued work, and its own, in seconds
    shortest_queue  the instance with the fewest requests that have not ended
    round_robin     one after the other

The names are those of `ingress.routing` in a deployment.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from conflux_ray.simulator.deployment import Instance
from conflux_ray.simulator.request import Phase, Request


class Router(ABC):
    """Sends every request to one instance, as it arrives.

    Args:
        instances: at least one.
    """

    def __init__(self, instances: Sequence[Instance]) -> None:
        if not instances:
            raise ValueError("a router needs at least one instance")
        self.instances = instances
        self.routed = [0] * len(instances)
        self.routed_tokens = [0] * len(instances)

    @abstractmethod
    def choose(self, request: Request) -> int:
        """The place in `instances` of the one that takes the request."""

    def submit(self, request: Request) -> None:
        """Give the request to an instance, now."""
        chosen = self.choose(request)
        self.routed[chosen] += 1
        self.routed_tokens[chosen] += request.prompt_tokens
        self.instances[chosen].submit(request)


class QueuedWork(Router):
    """The lowest normalized queued workload; of equals the instance that got fewest requests so far."""

    def choose(self, request: Request) -> int:
        if len(self.instances) == 1:
            return 0
        return min(range(len(self.instances)), key=lambda i: (self._seconds(i, request), self.routed[i], i))

    def _seconds(self, i: int, request: Request) -> float:
        """Until the prefill of `request` would end at instance `i`.

        The request's own work counts, or an idle slow instance would look as good as an idle fast one.
        """
        instance = self.instances[i]
        return instance.queued_work() + request.prompt_tokens / instance.capacity


class ShortestQueue(Router):
    """Join the shortest queue, by request count; of equals the instance that got fewest requests so far."""

    def __init__(self, instances: Sequence[Instance]) -> None:
        super().__init__(instances)
        self._open: list[list[Request]] = [[] for _ in instances]

    def choose(self, request: Request) -> int:
        self._open = [
            [r for r in held if not _has_ended(r, instance.clock.now)]
            for held, instance in zip(self._open, self.instances, strict=True)
        ]
        chosen = min(range(len(self.instances)), key=lambda i: (len(self._open[i]), self.routed[i], i))
        self._open[chosen].append(request)
        return chosen


def _has_ended(request: Request, now: float) -> bool:
    """Whether its last token is out: an iteration's outcome is known from when it was planned."""
    if request.phase is Phase.FINISHED:
        return request.times[-1] <= now
    return request.phase is Phase.REJECTED


class RoundRobin(Router):
    """One after the other."""

    def choose(self, request: Request) -> int:
        return sum(self.routed) % len(self.instances)


ROUTERS: dict[str, type[Router]] = {
    "queued_work": QueuedWork,
    "shortest_queue": ShortestQueue,
    "round_robin": RoundRobin,
}
"""By name."""
