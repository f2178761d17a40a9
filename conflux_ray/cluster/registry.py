"""Which instances exist: a small actor that instances report to and ingresses watch. No request passes through it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import ray

from conflux_ray.wire import InstanceInfo

logger = logging.getLogger(__name__)

NAMESPACE = "conflux"
HEARTBEAT_SECONDS = 2.0
EXPIRY_SECONDS = 15.0
SETTLE_SECONDS = 3 * HEARTBEAT_SECONDS
"""By then every instance has told a restarted registry that it exists."""
MOVE_SECONDS = 1.0
"""By then the requests of an instance that is gone have reached another."""
SUCCESSOR_SECONDS = 120.0
"""As long requests wait for a new instance, if `limits.no_instance_timeout_s` is as it comes."""
_LONG_POLL_SECONDS = 20.0


class Registry:
    """The state of the actor: instances by id, with a version that grows with every change."""

    def __init__(self) -> None:
        self._instances: dict[str, InstanceInfo] = {}
        self._seen: dict[str, float] = {}
        self._first_version = self._version = time.time_ns()  # higher than any of a registry before this one
        self._settled = time.monotonic() + SETTLE_SECONDS
        self._changed = asyncio.Event()
        self._draining = False
        self._busy: set[str] = set()  # instances that may have requests, or take new ones
        self._idle_from = 0.0  # what is said of being idle counts from then on
        self._awaited_until = 0.0  # the last instance left with requests; its successor will have them

    async def register(self, info: InstanceInfo) -> None:
        """Add an instance, or replace an earlier incarnation of it."""
        self._seen[info.instance_id] = time.monotonic()
        self._busy.add(info.instance_id)
        self._awaited_until = 0.0
        if self._instances.get(info.instance_id) != info:
            self._instances[info.instance_id] = info
            self._notify()

    async def heartbeat(self, instance_id: str, incarnation: str, idle: bool = False) -> tuple[bool, bool]:
        """Keep an instance listed.

        Args:
            instance_id, incarnation: who it is.
            idle: it takes no new requests and has none; those of an instance that is lost may still come.

        Returns:
            Whether it is listed (or has to register again), and whether it should take no new requests.
        """
        info = self._instances.get(instance_id)
        if info is None or info.incarnation != incarnation:
            return False, self._draining
        self._seen[instance_id] = now = time.monotonic()
        (self._busy.discard if idle and now >= self._idle_from else self._busy.add)(instance_id)
        return True, self._draining

    async def drain(self, on: bool) -> bool:
        """Tell all instances, present and future, with their next heartbeat to take no new requests, or to again.

        Returns:
            Whether every listed instance takes no new requests and has none.
        """
        self._draining = on
        self._expire()
        if not on or time.monotonic() < max(self._settled, self._awaited_until):
            return False
        return not self._busy & set(self._instances)

    async def leave(self, instance_id: str, incarnation: str) -> None:
        """Remove an instance; a later incarnation stays."""
        info = self._instances.get(instance_id)
        if info is not None and info.incarnation == incarnation:
            self._drop(instance_id)

    async def watch(self, version: int, timeout: float) -> tuple[int, tuple[InstanceInfo, ...]]:
        """The present version and instances, as soon as the version is not `version`, at the latest after `timeout`.

        Whoever knows instances of an earlier registry keeps them until this one has settled.
        """
        if 0 <= version < self._first_version:
            await asyncio.sleep(self._settled - time.monotonic())
        self._expire()
        if version == self._version:
            try:
                await asyncio.wait_for(self._changed.wait(), timeout)
            except TimeoutError:
                self._expire()
        return self._version, tuple(self._instances.values())

    def _expire(self) -> None:
        limit = time.monotonic() - EXPIRY_SECONDS
        for instance_id in [i for i in self._instances if self._seen[i] < limit]:
            logger.warning(
                "instance %s has been silent for %.0f s and is no longer listed", instance_id, EXPIRY_SECONDS
            )
            self._drop(instance_id)

    def _drop(self, instance_id: str) -> None:
        del self._instances[instance_id]
        if instance_id in self._busy:  # its requests move: whoever was idle may be so no more
            now = time.monotonic()
            self._busy = set(self._instances)
            self._idle_from = now + MOVE_SECONDS
            if not self._instances:
                self._awaited_until = now + SUCCESSOR_SECONDS
        self._notify()

    def _notify(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


def registry_handle(name: str) -> Any:
    """The registry of deployment `name`, started if there is none. It outlives those who use it, not Ray."""
    return (
        ray.remote(Registry)
        .options(
            name=f"registry:{name}",
            namespace=NAMESPACE,
            get_if_exists=True,
            lifetime="detached",
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=3,
            max_concurrency=1000,
        )
        .remote()
    )


@dataclass(frozen=True)
class RegistryDirectory:
    """The registry as an ingress's directory (implements `serving.directory.Directory`)."""

    name: str

    async def watch(self) -> AsyncIterator[tuple[InstanceInfo, ...]]:
        """Yield the present set, then the whole set after every change. A restarted registry is found again."""
        version = -1
        while True:
            try:
                found, instances = await registry_handle(self.name).watch.remote(version, _LONG_POLL_SECONDS)
            except ray.exceptions.RayError as error:
                logger.warning("the instance registry does not answer (%s); trying again", type(error).__name__)
                await asyncio.sleep(0.5)
                continue
            if found != version:
                version = found
                yield instances


@dataclass(frozen=True)
class OpenDirectory:
    """Makes an ingress's directory, and ties the instances' deployment to the ingress's application.

    Ray Serve deploys what an ingress's arguments refer to; the ingress itself never calls `instances`.
    """

    name: str
    instances: Any

    def __call__(self) -> RegistryDirectory:
        return RegistryDirectory(self.name)
