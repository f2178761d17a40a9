"""One simulation: a workload on a deployment of a system."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from conflux_ray.simulator.clock import Clock
from conflux_ray.simulator.deployment import Deployment, Instance
from conflux_ray.simulator.hardware import SlowedHardware
from conflux_ray.simulator.metrics import Summary, certainly_missed, summarize
from conflux_ray.simulator.request import Phase, Request, Slo
from conflux_ray.simulator.router import ROUTERS, Router
from conflux_ray.simulator.systems.registry import SYSTEMS
from conflux_ray.simulator.trace import Trace

CHECK_EVERY = 64
"""Arrivals between two looks at whether the outcome is certain."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What serves a workload.

    Args:
        system: a key of `SYSTEMS`.
        deployment: of one instance.
        slo: of every request.
        options: of the system; {} takes its defaults.
        instances: how many such deployments stand behind the global router.
        router: a key of `ROUTERS`.
        speeds: of each deployment relative to `deployment`; empty: all are alike.
        ingress: seconds from sending a request until its instance has it: HTTP, tokenizer, router.
        egress: seconds from the end of an iteration until the client has its tokens.

    Raises:
        ValueError: there is no such system or router, no instance, not a positive speed for each, or a negative delay.
    """

    system: str
    deployment: Deployment
    slo: Slo
    options: dict[str, Any] = field(default_factory=dict)
    instances: int = 1
    router: str = "queued_work"
    speeds: tuple[float, ...] = ()
    ingress: float = 0.0
    egress: float = 0.0

    def __post_init__(self) -> None:
        if self.system not in SYSTEMS:
            raise ValueError(f"system={self.system!r} is unknown; choose one of {', '.join(SYSTEMS)}")
        if self.instances < 1:
            raise ValueError(f"instances={self.instances} must be at least 1")
        if self.router not in ROUTERS:
            raise ValueError(f"router={self.router!r} is unknown; choose one of {', '.join(ROUTERS)}")
        if self.speeds and (len(self.speeds) != self.instances or not all(s > 0 for s in self.speeds)):
            raise ValueError(
                f"speeds={self.speeds} must be a positive number for each of the {self.instances} instances"
            )

        if self.ingress < 0 or self.egress < 0:
            raise ValueError(f"ingress={self.ingress} and egress={self.egress} must not be negative, seconds")

    def build(self, clock: Clock) -> list[Instance]:
        """All instances."""
        options = dict(self.options)
        if "tbt" in SYSTEMS[self.system].options():
            options.setdefault("tbt", self.slo.tbt)
        built = []
        for speed in self.speeds or (1.0,) * self.instances:
            deployment = self.deployment
            if speed != 1.0:
                deployment = replace(deployment, hardware=SlowedHardware(deployment.hardware, 1 / speed))
            built += SYSTEMS[self.system].build(clock, deployment, options)
        return built


@dataclass(frozen=True, slots=True)
class Outcome:
    """A finished simulation.

    Args:
        summary: what it shows.
        requests: in order of arrival, with the times of their tokens.
        routed: requests of each instance.
        routed_tokens: prompt tokens of each instance.
        certain_miss: it was stopped early: attainment is certain to be below the asked one, and the summary partial.
        seconds: of wall time.
        notes: of the trace.
    """

    summary: Summary
    requests: tuple[Request, ...]
    routed: tuple[int, ...]
    routed_tokens: tuple[int, ...]
    certain_miss: bool
    seconds: float
    notes: tuple[str, ...]


class _Verdict:
    """Stops a simulation once attainment is certain to miss `floor`."""

    def __init__(self, clock: Clock, counted: Sequence[Request], floor: float) -> None:
        self._clock = clock
        self._open = list(counted)
        self._allowed = len(counted) - floor * len(counted) + 1e-9
        self._missed = 0
        self.certain = False

    def look(self) -> None:
        still_open = []
        for request in self._open:
            if request.arrival > self._clock.now:
                still_open.append(request)
            elif certainly_missed(request, self._clock.now):
                self._missed += 1
            elif request.phase is not Phase.FINISHED:
                still_open.append(request)
        self._open = still_open
        if self._missed > self._allowed:
            self.certain = True
            self._clock.stop()


def simulate(
    setup: Setup,
    trace: Trace,
    warm_up: float = 0.1,
    floor: float | None = None,
    progress: Callable[[], Any] | None = None,
) -> Outcome:
    """Serve `trace`.

    Args:
        setup: what serves it.
        trace: the workload.
        warm_up: share of the requests, the first ones, that no figure counts, 0..1.
        floor: stop as soon as attainment is certain to end below it; None runs to the end.
        progress: called at every arrival.

    Raises:
        RuntimeError: an instance ended with requests or memory still held; that is a bug of its system.
        ValueError: the setup does not fit together.
    """
    clock = Clock()
    router = ROUTERS[setup.router](setup.build(clock))
    return serve(trace, setup.slo, clock, router, warm_up, floor, progress, setup.ingress, setup.egress)


def serve(
    trace: Trace,
    slo: Slo,
    clock: Clock,
    router: Router,
    warm_up: float = 0.1,
    floor: float | None = None,
    progress: Callable[[], Any] | None = None,
    ingress: float = 0.0,
    egress: float = 0.0,
) -> Outcome:
    """Serve `trace` with the instances behind `router`; `simulate` has the other arguments and what is raised.

    Args:
        trace: the workload.
        slo: of every request.
        clock: of the instances.
        router: in front of them.
        ingress: see `Setup`.
        egress: see `Setup`.
    """
    started = time.perf_counter()
    requests = [
        Request(i, r.arrival, r.prompt_tokens, r.output_tokens, slo, r.hash_ids) for i, r in enumerate(trace.requests)
    ]
    skipped = int(warm_up * len(requests))
    verdict = _Verdict(clock, requests[skipped:], floor) if floor is not None else None

    def arrive(index: int) -> None:
        if index + 1 < len(requests):
            clock.at(requests[index + 1].arrival, partial(arrive, index + 1))
        if ingress:
            clock.after(ingress, partial(router.submit, requests[index]))
        else:
            router.submit(requests[index])
        if progress is not None:
            progress()
        if verdict is not None and index % CHECK_EVERY == 0:
            verdict.look()

    if requests:
        clock.at(requests[0].arrival, partial(arrive, 0))
    clock.run()
    for request in requests if egress else ():
        request.times = [t + egress for t in request.times]
    certain = verdict is not None and verdict.certain
    if not certain:
        _check(requests, router.instances)
    return Outcome(
        summary=summarize(requests, skipped, sum(i.iterations for i in router.instances)),
        requests=tuple(requests),
        routed=tuple(router.routed),
        routed_tokens=tuple(router.routed_tokens),
        certain_miss=certain,
        seconds=time.perf_counter() - started,
        notes=trace.notes,
    )


def _check(requests: Sequence[Request], instances: Sequence[Instance]) -> None:
    """Nothing is lost: every request ended with all its tokens, every block came back."""
    for request in requests:
        if request.phase is Phase.FINISHED and request.generated == request.output_tokens:
            continue
        if request.phase is not Phase.REJECTED:
            raise RuntimeError(
                f"request {request.index} ended {request.phase.name} with {request.generated} of "
                f"{request.output_tokens} tokens"
            )
    for number, instance in enumerate(instances):
        if instance.kv_in_use():
            raise RuntimeError(f"instance {number} ended with {instance.kv_in_use()} KV blocks in use")
