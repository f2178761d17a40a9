"""The server as its users meet it: `serve run`, then curl, the openai client, vLLM's own benchmark."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
import time

import httpx
import openai
import pytest

from conflux_ray.models import store
from tests.e2e.server import Server

pytestmark = pytest.mark.heavy

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120)


def test_the_readmes_curl_line_answers_in_english(server: Server) -> None:
    body = json.dumps({"model": "smollm2-135m-instruct", "messages": QUESTION})
    answer = subprocess.run(
        ["curl", "-sS", f"{server.url}/v1/chat/completions", "-H", "content-type: application/json", "-d", body],
        capture_output=True,
        check=True,
        timeout=120,
    )
    assert "Paris" in json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_the_openai_client_streams_what_it_answers(client: openai.OpenAI) -> None:
    request = {"model": "smollm2-135m-instruct", "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert client.models.list().data[0].id == "smollm2-135m-instruct"


def test_thirty_two_streams_at_once_are_the_reference_models(server: Server, reference) -> None:
    prompts = [[(37 * i + 11 * j) % 40000 + 100 for j in range(3 + 2 * (i % 13))] for i in range(32)]

    async def one(client: httpx.AsyncClient, prompt: list[int]) -> list[int]:
        body = {
            "model": "smollm2-135m-instruct",
            "prompt": prompt,
            "max_tokens": 8,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        async with client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    tokens += json.loads(line[6:])["choices"][0]["token_ids"] or []
        return tokens

    async def everything() -> list[list[int]]:
        async with httpx.AsyncClient(timeout=180, limits=httpx.Limits(max_connections=64)) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    for prompt, tokens in zip(prompts, asyncio.run(everything()), strict=True):
        assert len(tokens) == 8
        want = reference.greedy(prompt, 8)
        if tokens != want:  # only where the reference itself hardly prefers its choice
            first = next(i for i, (a, b) in enumerate(zip(tokens, want, strict=True)) if a != b)
            assert reference.margin(prompt, want)[first] < 1e-3


def test_clients_that_leave_mid_stream_leave_no_kv_behind(server: Server) -> None:
    async def leave(client: httpx.AsyncClient, stream: bool, after: float) -> None:
        body = {
            "model": "smollm2-135m-instruct",
            "prompt": "Once upon a time " * 20,
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": stream,
        }
        with pytest.raises((httpx.TimeoutException, asyncio.TimeoutError)):
            await asyncio.wait_for(client.post(f"{server.url}/v1/completions", json=body), after)

    async def everyone() -> None:
        async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=64)) as client:
            await asyncio.gather(*(leave(client, i % 2 == 0, 0.3 + 0.15 * i) for i in range(16)))

    asyncio.run(everyone())
    server.wait_idle()


def test_health_answers_within_a_second_under_load(server: Server) -> None:
    body = {"model": "smollm2-135m-instruct", "prompt": "Tell me. " * 50, "max_tokens": 4, "ignore_eos": True}
    statuses: list[int] = []

    async def load() -> None:
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=48)) as client:
            answers = await asyncio.gather(*(client.post(f"{server.url}/v1/completions", json=body) for _ in range(48)))
            statuses.extend(a.status_code for a in answers)

    thread = threading.Thread(target=lambda: asyncio.run(load()))
    thread.start()
    slowest = 0.0
    with httpx.Client(timeout=10) as client:
        while thread.is_alive():
            for path in ("/health", "/live"):
                started = time.monotonic()
                assert client.get(f"{server.url}{path}").status_code == 200
                slowest = max(slowest, time.monotonic() - started)
            thread.join(0.1)
    assert statuses == [200] * 48
    assert slowest < 1.0


def test_wrong_requests_get_openai_errors_and_harm_nobody(server: Server, client: openai.OpenAI) -> None:
    too_long = {"model": "smollm2-135m-instruct", "prompt": [5] * 5000, "max_tokens": 4, "stream": True}
    with httpx.Client(timeout=30) as http:
        for body, status in (
            (b"[]", 400),
            (b'{"model": "nobody", "prompt": "x"}', 404),
            (json.dumps(too_long).encode(), 400),
        ):
            answer = http.post(
                f"{server.url}/v1/completions", content=body, headers={"content-type": "application/json"}
            )
            assert answer.status_code == status, answer.text
            assert set(answer.json()["error"]) >= {"message", "type", "code"}
    answer = client.completions.create(model="smollm2-135m-instruct", prompt="x", max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_vllms_own_benchmark_completes_fifty_requests(server: Server) -> None:
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "vllm.entrypoints.cli.main",
            "bench",
            "serve",
            *("--base-url", server.url, "--model", "smollm2-135m-instruct"),
            *("--tokenizer", str(store.model_dir(store.SMOLLM2))),
            *("--dataset-name", "random", "--random-input-len", "48", "--random-output-len", "8"),
            *("--num-prompts", "50", "--max-concurrency", "16", "--ignore-eos"),
        ],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    counts = dict(line.split(":") for line in result.stdout.splitlines() if line.count(":") == 1)
    assert int(counts["Successful requests"]) == 50, result.stdout[-3000:]
    assert int(counts.get("Failed requests", "0")) == 0
    assert int(counts["Total generated tokens"]) == 400
    server.wait_idle()


def test_what_was_served_was_conflux_parallelism(server: Server) -> None:
    counters = server.stats()["counters"]
    assert counters["mixed_iterations"] > 0
    assert counters["cross_rank_transitions"] > 0
