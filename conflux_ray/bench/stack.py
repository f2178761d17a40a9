"""`conflux bench stack`: what HTTP, tokenizing and Ray Serve add to the instance's own delays.

A tiny model makes iterations short, so that the stack is what is measured. For each way into Ray Serve one server is
started, and the same closed-loop load is sent to it twice: over HTTP to `/v1/completions`, and straight to the
instance over `conflux_ray.wire`. Repeats of the two alternate in the same server run; "added" is the difference of
their percentiles, repeat by repeat.

Client, server and model share the machine's cores. What the stack takes from the model's compute is therefore part of
the added delay, as it is for whoever serves on such a machine; where the model has a GPU it is not.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from conflux_ray.bench.server import connect, ray_address, ray_is_running, running_server
from conflux_ray.serving.environment import haproxy_binary, serve_environment
from conflux_ray.simulator.metrics import percentiles
from conflux_ray.wire import AddRequest, FinishReason, InstanceInfo, Outputs, Sampling, Slo

WAYS = {
    "haproxy": "HAProxy, throughput mode",
    "grpc": "Serve's gRPC proxy",
    "python": "Serve's default proxy",
}
METRICS = ("ttft_p50", "ttft_p95", "gap_p50", "gap_p95")
MODEL = "tiny-llama"
PROMPT = "What is the capital of France?"
RAMP_SECONDS = 1.0
MIN_REQUESTS = 4
SLO = Slo(2.0, 0.2)


def environment_of(way: str) -> dict[str, str]:
    """Variables that Ray is started with for one of `WAYS`."""
    if way == "haproxy":
        return serve_environment()
    if way == "grpc":
        return {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_PROXY_USE_GRPC": "1"}
    return {}


# What is measured


@dataclass(slots=True)
class Reply:
    """One request as its client saw it; times are `time.perf_counter` seconds."""

    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)  # when, and how many tokens came together

    @property
    def num_tokens(self) -> int:
        return sum(count for _, count in self.arrivals)

    @property
    def ttft(self) -> float:
        """Seconds."""
        return self.arrivals[0][0] - self.sent

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between each token that came from `begin` to `end` and the one before it.

        Tokens that come together are 0 apart: that is what their reader sees.
        """
        times = [when for when, count in self.arrivals for _ in range(count)]
        return [later - earlier for earlier, later in itertools.pairwise(times) if begin <= later <= end]


@dataclass(frozen=True, slots=True)
class Summary:
    """One load's result: milliseconds, except the last four."""

    ttft_p50: float
    ttft_p95: float
    gap_p50: float
    gap_p95: float
    tokens_per_s: float
    tokens_per_arrival: float
    requests: int
    gaps: int


def summarize(replies: Sequence[Reply], begin: float, end: float) -> Summary:
    """Percentiles of the requests sent, and of the tokens received, between `begin` and `end`.

    Raises:
        ValueError: there were none.
    """
    ttfts = [reply.ttft * 1e3 for reply in replies if begin <= reply.sent <= end]
    gaps = [gap * 1e3 for reply in replies for gap in reply.gaps(begin, end)]
    counts = [count for reply in replies for when, count in reply.arrivals if begin <= when <= end]
    if not ttfts or not gaps:
        raise ValueError("no values to take a percentile of: measure longer")
    ttft, gap = percentiles(ttfts), percentiles(gaps)
    return Summary(
        ttft["p50"],
        ttft["p95"],
        gap["p50"],
        gap["p95"],
        sum(counts) / (end - begin),
        statistics.mean(counts),
        len(ttfts),
        len(gaps),
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and range over repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.1f} [{self.low:.1f}, {self.high:.1f}]"


@dataclass(frozen=True, slots=True)
class Cell:
    """All repeats of one way at one number of streams; `direct[i]` and `http[i]` ran one after the other."""

    way: str
    streams: int
    direct: list[Summary]
    http: list[Summary]

    def added(self, metric: str) -> Spread:
        """Milliseconds that HTTP adds to one of `METRICS`."""
        pairs = zip(self.http, self.direct, strict=True)
        return Spread.of([getattr(http, metric) - getattr(direct, metric) for http, direct in pairs])

    def of(self, side: str, metric: str) -> float:
        """Median over repeats of a field of `Summary` on the side "direct" or "http"."""
        return statistics.median(getattr(summary, metric) for summary in getattr(self, side))


# The two clients


class Client(Protocol):
    """Sends the load's requests."""

    async def generate(self, stream: int, max_tokens: int) -> Reply:
        """Run one request of `stream` to its end; a stream has one request at a time."""
        ...


def token_arrivals(reads: Sequence[tuple[float, bytes]]) -> list[tuple[float, int]]:
    """When tokens came, from what was read off a connection: one whole chunked HTTP response of server-sent events.

    Args:
        reads: the time of each read, and its bytes.

    Returns:
        For each event with tokens, the time of the read that completed it, and their number by `token_ids`.

    Raises:
        ValueError: the response is not 200 and chunked, or an event reports an error.
    """
    arrivals: list[tuple[float, int]] = []
    raw, body = b"", b""
    in_body = False
    for when, data in reads:
        raw += data
        if not in_body:
            head, mark, rest = raw.partition(b"\r\n\r\n")
            if not mark:
                continue
            if b" 200 " not in head.split(b"\r\n", 1)[0] or b"transfer-encoding: chunked" not in head.lower():
                raise ValueError(f"not a stream: {raw[:500]!r}")
            raw, in_body = rest, True
        while (line_end := raw.find(b"\r\n")) >= 0:
            size = int(raw[:line_end].split(b";")[0], 16)
            if len(raw) < line_end + 2 + size + 2:
                break
            body += raw[line_end + 2 : line_end + 2 + size]
            raw = raw[line_end + 2 + size + 2 :]
        *events, body = body.split(b"\n\n")
        for event in events:
            if event.startswith(b"data: {"):
                value = json.loads(event[6:])
                if "error" in value:
                    raise ValueError(f"error in the stream: {value['error']}")
                count = sum(len(choice.get("token_ids") or ()) for choice in value["choices"])
                if count:
                    arrivals.append((when, count))
    return arrivals


class HttpClient:
    """Streams completions, each stream on a kept connection; parses only after the end, so as to keep out of the way.

    Args:
        port: of the server on this machine.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def connect(self, streams: int) -> None:
        """Open the connections of streams 0 to `streams` - 1."""
        for stream in range(streams):
            self._connections[stream] = await asyncio.open_connection("127.0.0.1", self._port)

    async def close(self) -> None:
        for _, writer in self._connections.values():
            writer.close()
        self._connections.clear()

    async def generate(self, stream: int, max_tokens: int) -> Reply:
        reader, writer = self._connections[stream]
        content = json.dumps(
            {
                "model": MODEL,
                "prompt": PROMPT,
                "max_tokens": max_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "return_token_ids": True,
            }
        ).encode()
        request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self._port}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        ).encode()
        reply = Reply(time.perf_counter())
        writer.write(request + content)
        reads: list[tuple[float, bytes]] = []
        end = b""
        while not end.endswith(b"\r\n0\r\n\r\n"):
            data = await reader.read(1 << 16)
            reads.append((time.perf_counter(), data))
            if not data or (len(reads) == 1 and b" 200 " not in data[:20]):
                raise RuntimeError(f"no stream: {b''.join(data for _, data in reads)[:500]!r}")
            end = (end + data)[-7:]
        reply.arrivals = token_arrivals(reads)
        return reply


class DirectClient:
    """Speaks the wire protocol to one instance, as an ingress does, and stops there.

    Args:
        info: the instance, from the registry.
        prompt: token ids.
    """

    def __init__(self, info: InstanceInfo, prompt: list[int]) -> None:
        from conflux_ray.transport import IngressEndpoint

        self._info = info
        self._prompt = prompt
        self._ready = asyncio.Event()
        self._running: dict[str, tuple[Reply, asyncio.Future[None]]] = {}
        self._count = 0
        self._endpoint = IngressEndpoint(
            f"bench-{uuid.uuid4().hex[:12]}", lambda *_: self._ready.set(), self._take, self._ended
        )

    async def connect(self) -> None:
        self._endpoint.set_instances([self._info])
        await asyncio.wait_for(self._ready.wait(), 20)

    async def close(self) -> None:
        await self._endpoint.close()

    async def generate(self, stream: int, max_tokens: int) -> Reply:
        self._count += 1
        request_id = f"{stream}-{self._count}"
        sampling = Sampling(max_tokens, temperature=0.0, ignore_eos=True)
        reply, done = Reply(time.perf_counter()), asyncio.get_running_loop().create_future()
        self._running[request_id] = reply, done
        if not self._endpoint.send(self._info.instance_id, AddRequest(request_id, 0, self._prompt, sampling, SLO)):
            raise RuntimeError("the session with the instance is over")
        await done
        return reply

    def _take(self, message: Outputs) -> None:
        now = time.perf_counter()
        for output in message.outputs:
            reply, done = self._running[output.request_id]
            if output.new_token_ids:
                reply.arrivals.append((now, len(output.new_token_ids)))
            if output.finish_reason is not None:
                del self._running[output.request_id]
                if output.finish_reason == FinishReason.LENGTH:
                    done.set_result(None)
                else:
                    done.set_exception(RuntimeError(f"{output.finish_reason.name}: {output.error}"))

    def _ended(self, instance_id: str, reason: str) -> None:
        for _, done in self._running.values():
            if not done.done():
                done.set_exception(RuntimeError(f"the session with {instance_id} ended: {reason}"))


async def send_load(client: Client, streams: int, seconds: float, tokens: int, seed: int) -> Summary:
    """Keep `streams` requests running, and summarize what came in `seconds` after all had begun.

    The time is longer where fewer than `MIN_REQUESTS` requests were sent in it: some ways are that slow. Lengths are
    uniform from 3/4 to 5/4 of `tokens`, and streams begin one after the other, so that they do not stay in step.
    """
    begin = time.perf_counter() + RAMP_SECONDS
    end = begin + seconds
    replies: list[Reply] = []

    async def run(stream: int) -> None:
        rng = random.Random(f"{seed}/{stream}")
        await asyncio.sleep(RAMP_SECONDS * stream / streams)
        while time.perf_counter() < end or sum(reply.sent >= begin for reply in replies) < MIN_REQUESTS:
            length = rng.randint(tokens * 3 // 4, tokens * 5 // 4)
            reply = await client.generate(stream, length)
            if reply.num_tokens != length:
                raise RuntimeError(f"{reply.num_tokens} tokens came of {length}")
            replies.append(reply)

    async with asyncio.timeout(RAMP_SECONDS + seconds + 120):
        await asyncio.gather(*(run(stream) for stream in range(streams)))
    return summarize(replies, begin, max(end, max(reply.sent for reply in replies)))


# The server


def _config(port: int) -> dict[str, Any]:
    return {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "conflux",
                "route_prefix": "/",
                "import_path": "conflux_ray.app:build",
                "args": {
                    "model": {"path": MODEL, "dtype": "float32", "max_model_len": 1024},
                    "instance": {"sp_degree": 2, "device": "cpu", "kv_memory_gib": 0.25, "max_num_seqs": 64},
                    "slo": {"ttft_s": SLO.ttft_s, "tbt_s": SLO.tbt_s},
                },
            }
        ],
    }


def _get(url: str, body: dict[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=5
    ) as r:
        return r.read()


def _find_instance(address: str) -> InstanceInfo:
    import ray

    from conflux_ray.cluster.registry import registry_handle

    connect(address)
    try:
        _, instances = ray.get(registry_handle(MODEL).watch.remote(-1, 5.0), timeout=30)
    finally:
        ray.shutdown()
    if len(instances) != 1:
        raise RuntimeError(f"{len(instances)} instances in the registry, not one")
    return instances[0]


# The benchmark


async def _measure_server(way: str, port: int, info: InstanceInfo, args: argparse.Namespace) -> list[Cell]:
    prompt = json.loads(_get(f"http://127.0.0.1:{port}/tokenize", {"model": MODEL, "prompt": PROMPT}))["tokens"]
    direct, http = DirectClient(info, prompt), HttpClient(port)
    await direct.connect()
    await http.connect(max(args.streams))
    cells = []
    try:
        for client in (direct, http):  # first requests pay for what is set up on first use
            await asyncio.gather(*(client.generate(stream, 8) for stream in range(max(args.streams))))
        for streams in args.streams:
            cell = Cell(way, streams, [], [])
            for repeat in range(args.repeats):
                for client, results in ((direct, cell.direct), (http, cell.http)):
                    results.append(await send_load(client, streams, args.seconds, args.tokens, args.seed + repeat))
            cells.append(cell)
            print(f"{way}, {streams} streams: {len(cell.http)} repeats", file=sys.stderr, flush=True)
    finally:
        await http.close()
        await direct.close()
    return cells


def format_table(cells: Sequence[Cell]) -> str:
    """The result as a Markdown table."""
    lines = [
        "| Way | Streams | TTFT direct, P50 / P95 | added P50 | added P95 "
        "| Gap direct, P50 / P95 | added P50 | added P95 | Tokens/s direct | HTTP |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    lines += [
        f"| {WAYS[cell.way]} | {cell.streams} "
        f"| {cell.of('direct', 'ttft_p50'):.1f} / {cell.of('direct', 'ttft_p95'):.1f} "
        f"| {cell.added('ttft_p50')} | {cell.added('ttft_p95')} "
        f"| {cell.of('direct', 'gap_p50'):.1f} / {cell.of('direct', 'gap_p95'):.1f} "
        f"| {cell.added('gap_p50')} | {cell.added('gap_p95')} "
        f"| {cell.of('direct', 'tokens_per_s'):.0f} | {cell.of('http', 'tokens_per_s'):.0f} |"
        for cell in cells
    ]
    return "\n".join(lines)


def _plot(cells: Sequence[Cell], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ways = list(dict.fromkeys(cell.way for cell in cells))
    counts = sorted({cell.streams for cell in cells})
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    colors = dict(zip(WAYS, ("#1b7837", "#2166ac", "#b2182b"), strict=True))
    for panel, name, title in zip(panels, ("ttft", "gap"), ("Time to first token", "Between tokens"), strict=True):
        for index, way in enumerate(ways):
            for percent, shift, fill in (("p50", -0.06, colors[way]), ("p95", 0.06, "white")):
                mine = [cell for cell in cells if cell.way == way]
                spreads = [cell.added(f"{name}_{percent}") for cell in mine]
                panel.errorbar(
                    [counts.index(cell.streams) + 0.27 * (index - (len(ways) - 1) / 2) + shift for cell in mine],
                    [s.median for s in spreads],
                    yerr=[[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]],
                    fmt="o",
                    color=colors[way],
                    markerfacecolor=fill,
                    capsize=2.5,
                    label=f"{WAYS[way]}, {percent.upper()}",
                )
        panel.set_yscale("symlog", linthresh=1, linscale=0.5)
        panel.yaxis.set_major_formatter("{x:g}")
        panel.axhline(0, color="grey", linewidth=0.8)
        panel.grid(axis="y", alpha=0.3)
        panel.set_xticks(range(len(counts)), [str(count) for count in counts])
        panel.set_xlabel("concurrent streams")
        panel.set_ylabel("added, ms (linear below 1)")
        panel.set_title(title)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize="small", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _report(cells: Sequence[Cell], args: argparse.Namespace, started: str, load_before: float) -> dict[str, Any]:
    return {
        "started": started,
        "machine": f"{os.cpu_count()} {platform.machine()} cores",
        "load_average_before": load_before,
        "versions": {name: version(name) for name in ("ray", "vllm", "torch", "pyzmq")}
        | {"python": platform.python_version()},
        "model": MODEL,
        "arguments": {key: value for key, value in vars(args).items() if key not in ("out", "png")},
        "units": "milliseconds, tokens per second, counts",
        "cells": [
            asdict(cell) | {"added": {metric: asdict(cell.added(metric)) for metric in METRICS}} for cell in cells
        ],
    }


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="conflux bench stack", description="Delay that the serving stack adds to the instance called directly."
    )
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="ways into Ray Serve")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 16, 64], help="concurrent streams")
    parser.add_argument("--tokens", type=int, default=64, help="mean tokens of a request")
    parser.add_argument("--seconds", type=float, default=2.0, help="measured time of each load")
    parser.add_argument("--repeats", type=int, default=3, help="of the pair direct, HTTP")
    parser.add_argument("--port", type=int, default=18200, help="first HTTP port; each way takes the next one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--png", type=Path, help="file for the plot")
    args = parser.parse_args(argv)
    if min(*args.streams, args.repeats) < 1 or args.tokens < 8 or args.seconds <= 0:
        parser.error("--streams, --repeats and --seconds must be positive, --tokens at least 8")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Start a server for each way, one after the other, and print the table.

    Args:
        argv: command line after `conflux bench stack`.

    Returns:
        Exit status.
    """
    args = _parse(argv)
    if ray_is_running():
        print("Ray is running on this machine; stop it first: its load would be measured", file=sys.stderr)
        return 1
    started, load_before = time.strftime("%Y-%m-%d %H:%M"), os.getloadavg()[0]
    cells: list[Cell] = []
    try:
        for index, way in enumerate(args.ways):
            if way == "haproxy" and haproxy_binary() is None:
                print("no HAProxy on this machine: left out", file=sys.stderr)
                continue
            port = args.port + index
            print(f"starting the server: {WAYS[way]}", file=sys.stderr, flush=True)
            with running_server(_config(port), environment_of(way)) as server:
                cells += asyncio.run(_measure_server(way, port, _find_instance(ray_address(server.process)), args))
            if args.out is not None:  # after each server: a later one may fail
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(json.dumps(_report(cells, args, started, load_before), indent=1) + "\n")
    finally:  # what was measured counts, even if a later server fails
        if cells:
            print(f"\n{MODEL}, {args.tokens} tokens a request, ms: median [min, max] of {args.repeats} repeats\n")
            print(format_table(cells))
            if args.png is not None:
                _plot(cells, args.png)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
