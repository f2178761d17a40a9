"""Two instances behind one ingress: load spreads, and what happens to one of them costs no client a token."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Iterator

import httpx
import pytest

from conflux_ray.models import store
from tests.e2e.server import Server, running, wait_for
from tests.e2e.tiny import Stream, workers_of

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("cluster")
    with running(folder, 18200, deployment="two-instances.yaml", model={"served_model_name": "tiny"}) as server:
        both(server)
        yield server


@pytest.fixture(scope="module")
def reference():
    from conflux_ray.models.reference import Reference

    return Reference(store.model_dir("tiny-llama"))


def both(server: Server) -> None:
    """Wait until two instances serve and nothing runs."""
    server.wait_idle(120, count=2)


def finished(server: Server) -> dict[str, int]:
    return {s["instance_id"]: s["counters"]["finished"] for s in server.all_stats(2)}


def spread(server: Server, before: dict[str, int]) -> list[int]:
    """How many requests each instance has finished since."""
    return sorted(count - before.get(instance, 0) for instance, count in finished(server).items())


async def complete(client: httpx.AsyncClient, server: Server, prompt: list[int], max_tokens: int) -> httpx.Response:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return await client.post(f"{server.url}/v1/completions", json=body)


async def burst(server: Server, count: int, length: int) -> list[int]:
    """Status codes of `count` requests sent at once, each with a prompt of `length` tokens and one token of output."""
    async with httpx.AsyncClient(timeout=120, limits=httpx.Limits(max_connections=count)) as client:
        prompts = [[5 + (i + j) % 300 for j in range(length)] for i in range(count)]
        return [r.status_code for r in await asyncio.gather(*(complete(client, server, p, 1) for p in prompts))]


def prompts(count: int) -> list[list[int]]:
    return [[7 + i, 8, 9 + i, 10] for i in range(count)]


def start_streams(server: Server, count: int, max_tokens: int) -> list[Stream]:
    streams = [Stream(server, prompt, max_tokens) for prompt in prompts(count)]
    for stream in streams:
        stream.start()
    for stream in streams:
        assert stream.first.wait(60)
    return streams


def check_streams(streams: list[Stream], reference, max_tokens: int) -> None:
    for stream in streams:
        stream.join(180)
        assert stream.error is None, stream.error
        assert stream.done
        assert stream.finish_reason == "length"
        assert stream.tokens == reference.greedy(stream.body["prompt"], max_tokens)


def test_a_burst_of_long_prompts_does_not_go_to_one_instance(server: Server) -> None:
    before = finished(server)
    assert asyncio.run(burst(server, 24, 900)) == [200] * 24
    both(server)
    counts = spread(server, before)
    assert sum(counts) == 24
    assert counts[0] >= 6


def test_clients_that_leave_at_any_moment_leave_nothing_behind(server: Server) -> None:
    rng = random.Random(0)

    async def leave(client: httpx.AsyncClient, number: int) -> None:
        try:
            async with asyncio.timeout(rng.uniform(0.0, 0.5)):
                await complete(client, server, [5 + number] * 900, 50)
        except TimeoutError:
            pass

    async def everything() -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=80)) as client:
            await asyncio.gather(*(leave(client, number) for number in range(80)))

    asyncio.run(everything())
    server.wait_idle(30, count=2)


def test_streams_of_a_killed_instance_go_on_at_the_other(server: Server, reference) -> None:
    streams = start_streams(server, 6, 500)
    victim = workers_of(server)[0]
    killed = time.monotonic()
    os.kill(victim.pid, signal.SIGKILL)
    check_streams(streams, reference, 500)
    assert time.monotonic() - killed < 60  # they did not wait for the instance to be started again
    both(server)


def test_after_aborts_and_a_restart_load_spreads_evenly_again(server: Server) -> None:
    both(server)
    before = finished(server)
    assert asyncio.run(burst(server, 24, 300)) == [200] * 24
    both(server)
    assert spread(server, before)[0] >= 6


def test_a_frozen_worker_holds_up_nobody_for_long(server: Server, reference) -> None:
    streams = start_streams(server, 6, 500)
    victim = workers_of(server)[0]
    frozen = time.monotonic()
    victim.suspend()
    check_streams(streams, reference, 500)
    assert time.monotonic() - frozen < 60
    wait_for(lambda: not victim.is_running(), 30, lambda: "the frozen worker is still there")
    both(server)
