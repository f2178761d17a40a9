"""How an ingress learns which instances exist."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from conflux_ray.wire import InstanceInfo


class Directory(Protocol):
    """The set of instances that may be connected to; drained and dead ones leave it."""

    def watch(self) -> AsyncIterator[tuple[InstanceInfo, ...]]:
        """Yield the present set at once, then the whole set again after every change."""
        ...


class StaticDirectory:
    """A directory that changes only by `set`, for one event loop: fixed deployments and tests."""

    def __init__(self, instances: Iterable[InstanceInfo] = ()) -> None:
        self._instances = tuple(instances)
        self._changed = asyncio.Event()

    def set(self, instances: Iterable[InstanceInfo]) -> None:
        """Replace the set."""
        self._instances = tuple(instances)
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[tuple[InstanceInfo, ...]]:
        """Yield the present set, then after every `set`."""
        while True:
            changed = self._changed
            yield self._instances
            await changed.wait()
