"""The open-loop client: requests leave at their arrival times, whatever has come back by then.

A few processes share the load, since one event loop only follows so many tokens; a machine-wide monotonic clock keeps
them together. Each measures how late it is itself: when it sends, and when it wakes up to read. Where a server has
several replicas, the client is their router: shortest queue, over all its processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

from conflux_ray.bench.live.prompts import PromptSource, completion_body
from conflux_ray.bench.live.stream import Reply, StreamProtocol, request_bytes
from conflux_ray.simulator.request import Slo

TICK_SECONDS = 0.01
"""How often a client process checks how late it wakes up."""
CUT = "cut: it had broken a promise when the run ended"
UNDECIDED = "cut: it could still have kept its promises when the run ended"
_LOOK_TICKS = 25
"""Ticks between two looks at which requests can still keep their promises."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request to send.

    Args:
        index: its place in the trace.
        arrival: seconds after the start.
        prompt_tokens: at least 1.
        output_tokens: at least 1.
        hash_ids: identities of the prompt's blocks; empty if unknown.
        counted: whether it comes after the warm-up.
    """

    index: int
    arrival: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    counted: bool = True


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Args:
        urls: one of each replica, without a path.
        model: name in the API.
        api_key: sent as a bearer token.
        prompt_priority: send each request's prompt length as its priority.
    """

    urls: tuple[str, ...]
    model: str
    api_key: str | None = field(default=None, repr=False)
    prompt_priority: bool = False


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A replica's address, resolved before the run."""

    host: str
    port: int
    header: str
    tls: str | None

    @classmethod
    def of(cls, url: str) -> Endpoint:
        """From a URL.

        Raises:
            ValueError: it is not http or https, or its host is unknown.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url={url!r} must be like http://127.0.0.1:8000")
        if parts.path.strip("/") or parts.query:
            raise ValueError(f"url={url!r} must have no path; /v1/completions is added")
        port = parts.port or (443 if parts.scheme == "https" else 80)
        try:
            address = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)[0][4]
        except OSError as error:
            raise ValueError(f"url={url!r}: its host cannot be found ({error})") from None
        return cls(str(address[0]), port, parts.netloc, parts.hostname if parts.scheme == "https" else None)


@dataclass(slots=True)
class Sent:
    """A request and its answer; times in seconds on the machine's monotonic clock.

    Args:
        job: what was sent.
        replica: index into the target's urls.
        lag: how long after its arrival time the client began to send it, seconds.
        reply: what came back.
        checked: tokens that are known to have been on time.
    """

    job: Job
    replica: int
    lag: float
    reply: Reply
    checked: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What one client process hands back.

    Args:
        sent: its requests.
        ticks: how late it woke up, seconds, one value each `TICK_SECONDS`.
    """

    sent: list[Sent]
    ticks: list[float]


class Board:
    """Memory that the client processes and the one that watches them share.

    Args:
        context: of `multiprocessing`.
        clients: processes.
        replicas: of the server.
    """

    FIELDS = ("sent", "done", "missed", "counted_missed", "hopeful", "tokens", "late")

    def __init__(self, context: Any, clients: int, replicas: int) -> None:
        self._values = context.RawArray(ctypes.c_double, clients * len(self.FIELDS))
        self._control = context.RawArray(ctypes.c_double, 2)
        self._queues = context.RawArray(ctypes.c_longlong, 2 * replicas)
        self._lock = context.Lock()
        self._replicas = replicas

    @property
    def start(self) -> float:
        """When the first request may leave, monotonic seconds; 0 until it is set."""
        return self._control[0]

    @start.setter
    def start(self, when: float) -> None:
        self._control[0] = when

    @property
    def stopped(self) -> bool:
        """Whether clients are to cut what still runs."""
        return self._control[1] != 0

    def stop(self) -> None:
        self._control[1] = 1

    def put(self, client: int, **values: float) -> None:
        """Set some of `FIELDS` of a client."""
        for name, value in values.items():
            self._values[client * len(self.FIELDS) + self.FIELDS.index(name)] = value

    def total(self, name: str) -> float:
        """Sum over the clients of one of `FIELDS`."""
        return sum(self._values[self.FIELDS.index(name) :: len(self.FIELDS)])

    def worst(self, name: str) -> float:
        """Largest over the clients of one of `FIELDS`."""
        return max(self._values[self.FIELDS.index(name) :: len(self.FIELDS)])

    def pick(self, prompt_tokens: int) -> int:
        """The replica with the fewest requests running, then the fewest prompt tokens; the request counts at once."""
        if self._replicas == 1:
            return 0
        with self._lock:
            queues = self._queues
            chosen = min(range(self._replicas), key=lambda r: (queues[2 * r], queues[2 * r + 1], r))
            queues[2 * chosen] += 1
            queues[2 * chosen + 1] += prompt_tokens
        return chosen

    def release(self, replica: int, prompt_tokens: int) -> None:
        """A request of `pick` has ended."""
        if self._replicas > 1:
            with self._lock:
                self._queues[2 * replica] -= 1
                self._queues[2 * replica + 1] -= prompt_tokens


class Client:
    """One process's share of a run.

    Args:
        number: of the process.
        jobs: in order of arrival.
        target: where they go.
        prompts: makes them.
        slo: the promises, for what is shown while it runs and for when to stop.
        board: shared with the other processes.
        clock: monotonic seconds, the same in all processes.
    """

    def __init__(
        self,
        number: int,
        jobs: Sequence[Job],
        target: Target,
        prompts: PromptSource,
        slo: Slo,
        board: Board,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._number = number
        self._jobs = jobs
        self._slo = slo
        self._board = board
        self._clock = clock
        self._endpoints = [Endpoint.of(url) for url in target.urls]
        self._tls = ssl.create_default_context() if any(e.tls for e in self._endpoints) else None
        self._requests = [
            completion_body(
                target.model,
                prompts.tokens(job.index, job.prompt_tokens, job.hash_ids),
                job.output_tokens,
                job.prompt_tokens if target.prompt_priority else None,
            )
            for job in jobs
        ]
        self._api_key = target.api_key
        self._sent: list[Sent] = []
        self._running: dict[int, tuple[Sent, StreamProtocol]] = {}
        self._missed: set[int] = set()
        self._counted_missed = 0
        self._done = 0
        self._tokens = 0

    async def run(self) -> Report:
        """Send everything, and follow the answers until they end or the board says stop."""
        loop = asyncio.get_running_loop()
        while not self._board.start:
            await asyncio.sleep(TICK_SECONDS)
        start = self._board.start
        pending: set[asyncio.Task[None]] = set()
        ticks: list[float] = []
        ticker = loop.create_task(self._tick(start, ticks))
        try:
            for job, body in zip(self._jobs, self._requests, strict=True):
                while (wait := start + job.arrival - self._clock()) > 0 and not self._board.stopped:
                    await asyncio.sleep(min(wait, 0.25))
                if self._board.stopped:
                    break
                task = loop.create_task(self._send(job, body, start + job.arrival))
                pending.add(task)
                task.add_done_callback(pending.discard)
            while pending and not self._board.stopped:
                await asyncio.wait(pending, timeout=0.1)
            self._look(self._clock())
            for index, (_, protocol) in list(self._running.items()):
                protocol.cut(CUT if index in self._missed else UNDECIDED)
            if pending:
                await asyncio.wait(pending, timeout=5)
        finally:
            ticker.cancel()
            for task in pending:
                task.cancel()
            await asyncio.gather(ticker, *pending, return_exceptions=True)
        self._publish()
        return Report(self._sent, ticks)

    async def _send(self, job: Job, body: bytes, due: float) -> None:
        replica = self._board.pick(job.prompt_tokens)
        reply = Reply()
        sent = Sent(job, replica, self._clock() - due, reply)
        self._sent.append(sent)
        endpoint = self._endpoints[replica]
        ended = asyncio.Event()
        request = request_bytes(endpoint.header, "/v1/completions", body, self._api_key)
        protocol = StreamProtocol(request, reply, self._clock, ended.set)
        self._running[job.index] = (sent, protocol)
        try:
            await asyncio.get_running_loop().create_connection(
                lambda: protocol,
                endpoint.host,
                endpoint.port,
                ssl=self._tls if endpoint.tls else None,
                server_hostname=endpoint.tls,
            )
            await ended.wait()
        except OSError as error:
            reply.error = f"cannot connect: {error}"
        except asyncio.CancelledError:
            reply.error = reply.error or UNDECIDED
            raise
        finally:
            del self._running[job.index]
            self._board.release(replica, job.prompt_tokens)
            self._done += 1
            self._tokens += len(reply.times)
            if reply.fault(job.prompt_tokens, job.output_tokens) is not None or self._is_late(sent, self._clock()):
                self._miss(job)

    def _miss(self, job: Job) -> None:
        if job.index not in self._missed:
            self._missed.add(job.index)
            self._counted_missed += job.counted

    def _is_late(self, sent: Sent, now: float) -> bool:
        """Whether a token was late, or is late by now."""
        arrival = self._board.start + sent.job.arrival
        times = sent.reply.times
        # Only what is new: to look at every token again and again would make the client late itself.
        while sent.checked < len(times):
            if times[sent.checked] > self._slo.deadline(arrival, sent.checked + 1):
                return True
            sent.checked += 1
        return len(times) < sent.job.output_tokens and now > self._slo.deadline(arrival, len(times) + 1)

    async def _tick(self, start: float, ticks: list[float]) -> None:
        count = 0
        while True:
            expected = self._clock() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            now = self._clock()
            if now >= start:
                ticks.append(max(0.0, now - expected))
            count += 1
            if count % _LOOK_TICKS == 0:
                self._look(now)
                self._publish(max(ticks[-_LOOK_TICKS:], default=0.0))

    def _look(self, now: float) -> None:
        for index, (sent, _) in self._running.items():
            if index not in self._missed and self._is_late(sent, now):
                self._miss(sent.job)

    def _publish(self, late: float = 0.0) -> None:
        to_come = len(self._jobs) - len(self._sent)
        running = sum(index not in self._missed for index in self._running)
        tokens = self._tokens + sum(len(sent.reply.times) for sent, _ in self._running.values())
        self._board.put(
            self._number,
            sent=len(self._sent),
            done=self._done,
            missed=len(self._missed),
            counted_missed=self._counted_missed,
            hopeful=to_come + running,
            tokens=tokens,
            late=late,
        )


def client_main(
    number: int,
    jobs: Sequence[Job],
    target: Target,
    prompts: PromptSource,
    slo: Slo,
    board: Board,
    pipe: Connection,
) -> None:
    """A client process: says "ready", waits for the board's start, and hands back a `Report` or its exception."""
    try:
        client = Client(number, jobs, target, prompts, slo, board)
        # A collection stops every stream of this process at once, and nothing here makes cycles that matter.
        gc.collect()
        gc.freeze()
        gc.disable()
        pipe.send("ready")
        with contextlib.suppress(KeyboardInterrupt):
            pipe.send(asyncio.run(client.run()))
    except Exception as error:
        pipe.send(error)
