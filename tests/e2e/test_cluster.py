"""Two instances behind one ingress: load spreads, and what happens to one of them costs no client a token."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.chaos import FAULTS, NUM_INSTANCES, Chaos, chaos_server
from tests.e2e.server import Server, wait_for
from tests.e2e.tiny import start_stream

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("cluster")
    with chaos_server(folder, 18200) as server:
        both(server)
        yield server


def both(server: Server) -> None:
    """Wait until two instances serve and nothing runs."""
    server.wait_idle(120, count=NUM_INSTANCES)


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


def test_no_fault_costs_a_client_a_token(server: Server) -> None:
    outcome = Chaos(server, seed=0, say=print).run(streams=40, faults=len(FAULTS), at_once=8)
    assert outcome.streams >= 40
    assert set(outcome.faults) == set(FAULTS)
    both(server)


def test_after_aborts_and_a_restart_load_spreads_evenly_again(server: Server) -> None:
    both(server)
    before = finished(server)
    assert asyncio.run(burst(server, 24, 300)) == [200] * 24
    both(server)
    assert spread(server, before)[0] >= 6


def drain(server: Server, *options: str) -> None:
    command = [str(Path(sys.executable).with_name("conflux")), "drain", str(server.log.with_name("conflux.yaml"))]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def ask(server: Server) -> int:
    body = {"model": "tiny", "prompt": [1, 2], "max_tokens": 1}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=5).status_code


def test_a_drained_server_ends_what_runs_and_takes_nothing_new_until_that_is_undone(server: Server) -> None:
    stream = start_stream(server, max_tokens=900)
    drain(server, "--grace", "90")
    stream.join(5)
    assert stream.done
    assert len(stream.tokens) == 900
    assert server.process.poll() is None
    assert httpx.get(f"{server.url}/live", timeout=5).status_code == 200
    assert ask(server) == 503
    drain(server, "--undo")
    wait_for(lambda: ask(server) == 200, 30)
