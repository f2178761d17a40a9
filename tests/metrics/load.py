"""Clients that count what they send and get, to compare with what the server counts."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field

import httpx


@dataclass
class Seen:
    """What the clients saw."""

    outcomes: Counter[str] = field(default_factory=Counter)  # as `conflux_requests_total` names them
    prompt_tokens: int = 0
    output_tokens: int = 0


@dataclass(frozen=True)
class Job:
    """One request.

    Args:
        prompt: its length in tokens; a negative one asks for a model that is not there.
        output: tokens to generate, no fewer.
        headers: promises.
        stream: server-sent events.
        leave: seconds after which the client leaves.
    """

    prompt: int = 40
    output: int = 8
    headers: dict[str, str] = field(default_factory=dict)
    stream: bool = True
    leave: float | None = None


class Clients:
    """Runs jobs against a server.

    Args:
        url, model: of the server.
        at_once: most requests in progress.
    """

    def __init__(self, url: str, model: str, at_once: int = 8) -> None:
        self.url = url
        self.model = model
        self.at_once = at_once
        self.seen = Seen()
        self._random = random.Random(0)

    def run(self, jobs: list[Job]) -> None:
        """Run all jobs, as many at once as allowed."""
        asyncio.run(self._run(jobs))

    async def _run(self, jobs: list[Job]) -> None:
        limit = asyncio.Semaphore(self.at_once)
        limits = httpx.Limits(max_connections=self.at_once)
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=limits) as client:

            async def one(job: Job) -> None:
                async with limit:
                    await self.send(client, job)

            await asyncio.gather(*(one(job) for job in jobs))

    async def send(self, client: httpx.AsyncClient, job: Job) -> None:
        """One request to its end."""
        prompt = [self._random.randrange(100, 400) for _ in range(abs(job.prompt))]
        body = {
            "model": self.model if job.prompt > 0 else f"nobody-{self._random.random()}",
            "prompt": prompt,
            "max_tokens": job.output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": job.stream,
        }
        if job.stream:
            body["stream_options"] = {"include_usage": True}
        try:
            async with asyncio.timeout(job.leave):
                status, usage = await self._answer(client, body, job)
        except TimeoutError:
            self.seen.outcomes["aborted"] += 1
            return
        self.seen.outcomes[{200: "completed", 429: "overloaded", 503: "unavailable", 404: "invalid"}[status]] += 1
        self.seen.prompt_tokens += usage.get("prompt_tokens", 0)
        self.seen.output_tokens += usage.get("completion_tokens", 0)

    @staticmethod
    async def _answer(client: httpx.AsyncClient, body: dict, job: Job) -> tuple[int, dict[str, int]]:
        usage: dict[str, int] = {}
        async with client.stream("POST", "/v1/completions", json=body, headers=job.headers) as response:
            content = await response.aread()
        if response.status_code == 200:
            # Not `splitlines`: generated text may hold any of Unicode's line separators.
            events = content.split(b"\n") if job.stream else [content]
            for event in events:
                if event.removeprefix(b"data: ").startswith(b"{"):
                    usage = json.loads(event.removeprefix(b"data: ")).get("usage") or usage
        return response.status_code, usage
