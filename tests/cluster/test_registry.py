"""The registry of instances, without Ray."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("ray")
from conflux_ray.cluster import registry as module
from conflux_ray.cluster.registry import Registry
from conflux_ray.wire import InstanceInfo

pytestmark = pytest.mark.heavy


def info(name: str, incarnation: str = "1") -> InstanceInfo:
    return InstanceInfo(name, incarnation, "tcp://127.0.0.1:1", "secret")


def test_a_watcher_hears_of_every_change_at_once() -> None:
    async def scenario() -> None:
        registry = Registry()
        version, instances = await registry.watch(-1, 0.1)
        assert instances == ()
        waiting = asyncio.create_task(registry.watch(version, 30.0))
        await asyncio.sleep(0)
        await registry.register(info("a"))
        version, instances = await asyncio.wait_for(waiting, 0.1)
        assert instances == (info("a"),)
        await registry.register(info("a", "2"))
        await registry.leave("a", "1")  # the earlier incarnation: the later one stays
        assert (await registry.watch(version, 30.0))[1] == (info("a", "2"),)
        await registry.leave("a", "2")
        assert (await registry.watch(-1, 0.1))[1] == ()

    asyncio.run(scenario())


def test_an_instance_that_is_not_listed_is_told_so() -> None:
    async def scenario() -> None:
        registry = Registry()
        assert await registry.heartbeat("a", "1") == (False, False)
        await registry.register(info("a"))
        assert await registry.heartbeat("a", "1") == (True, False)
        assert await registry.heartbeat("a", "0") == (False, False)

    asyncio.run(scenario())


def test_a_silent_instance_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        registry = Registry()
        await registry.register(info("a"))
        monkeypatch.setattr(module, "EXPIRY_SECONDS", -1.0)
        assert (await registry.watch(-1, 0.1))[1] == ()
        assert await registry.heartbeat("a", "1") == (False, False)

    asyncio.run(scenario())


def test_a_restarted_registry_lets_watchers_keep_what_they_know_until_instances_are_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        old = Registry()
        await old.register(info("a"))
        version, _ = await old.watch(-1, 0.1)
        monkeypatch.setattr(module, "SETTLE_SECONDS", 0.3)
        new = Registry()
        waiting = asyncio.create_task(new.watch(version, 30.0))
        assert (await new.watch(-1, 0.1))[1] == ()  # whoever knows nothing is told what there is
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await new.register(info("a"))
        later, instances = await asyncio.wait_for(waiting, 1.0)
        assert later > version
        assert instances == (info("a"),)

    asyncio.run(scenario())


def test_it_is_drained_when_every_instance_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.0)

    async def scenario() -> None:
        registry = Registry()
        for name in ("a", "b"):
            await registry.register(info(name))
            await registry.heartbeat(name, "1")
        assert not await registry.drain(True)  # nobody has heard of it yet
        assert await registry.heartbeat("a", "1", idle=False) == (True, True)
        await registry.heartbeat("a", "1", idle=True)
        assert not await registry.drain(True)
        await registry.heartbeat("b", "1", idle=True)
        assert await registry.drain(True)
        await registry.leave("b", "1")
        assert await registry.drain(True)
        await registry.register(info("c"))  # starts while all others stop
        assert not await registry.drain(True)
        assert await registry.heartbeat("c", "1", idle=True) == (True, True)
        assert await registry.drain(True)
        assert not await registry.drain(False)
        assert await registry.heartbeat("a", "1") == (True, False)

    asyncio.run(scenario())


def test_a_drain_waits_for_the_requests_of_an_instance_that_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(module, "MOVE_SECONDS", 0.2)

    async def scenario() -> None:
        registry = Registry()
        for name in ("a", "b"):
            await registry.register(info(name))
        assert not await registry.drain(True)
        await registry.heartbeat("a", "1", idle=True)
        await registry.leave("b", "1")
        await registry.heartbeat("a", "1", idle=True)  # sent before what b had has come
        assert not await registry.drain(True)
        await asyncio.sleep(0.25)
        await registry.heartbeat("a", "1", idle=False)
        assert not await registry.drain(True)
        await registry.leave("a", "1")
        assert not await registry.drain(True)  # its requests wait for the successor
        await registry.register(info("c"))
        await asyncio.sleep(0.25)
        assert not await registry.drain(True)
        await registry.heartbeat("c", "1", idle=True)
        assert await registry.drain(True)

    asyncio.run(scenario())


def test_a_drain_does_not_wait_for_a_successor_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(module, "SUCCESSOR_SECONDS", 0.2)

    async def scenario() -> None:
        registry = Registry()
        await registry.register(info("a"))
        await registry.leave("a", "1")
        assert not await registry.drain(True)
        await asyncio.sleep(0.25)
        assert await registry.drain(True)

    asyncio.run(scenario())


def test_a_registry_that_has_just_started_knows_too_little_to_say_that_all_has_ended() -> None:
    async def scenario() -> None:
        assert not await Registry().drain(True)

    asyncio.run(scenario())
