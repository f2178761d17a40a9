"""A completions server by hand: it sends what it is told to, when it is told to. Runs in a thread or as a process."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Answer = Callable[[dict[str, Any], asyncio.StreamWriter], Any]

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(body: bytes) -> bytes:
    """One chunk of HTTP."""
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def event(value: dict[str, Any] | str) -> bytes:
    """One server-sent event."""
    return b"data: " + (value if isinstance(value, str) else json.dumps(value)).encode() + b"\n\n"


def tokens_so_far(count: int, prompt: int = 5, finish: str | None = None) -> bytes:
    """The event after which `count` tokens have come."""
    usage = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
    return event({"choices": [{"index": 0, "text": "", "finish_reason": finish}], "usage": usage})


async def answer_at_once(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """All tokens in one event each, without a pause."""
    count, prompt = request["max_tokens"], len(request["prompt"])
    writer.write(HEAD)
    for i in range(1, count + 1):
        writer.write(chunk(tokens_so_far(i, prompt, "length" if i == count else None)))
    usage = {"prompt_tokens": prompt, "completion_tokens": count}
    writer.write(chunk(event({"choices": [], "usage": usage})) + chunk(event("[DONE]")) + END)
    await writer.drain()


class ScriptedServer:
    """Answers `/health`, `/v1/models` and completions.

    Args:
        answer: writes the response to a completion request.
    """

    def __init__(self, answer: Answer = answer_at_once) -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> asyncio.Server:
        server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            if path == "/v1/completions":
                length = next(line for line in head.lower().split("\r\n") if line.startswith("content-length:"))
                request = json.loads(await reader.readexactly(int(length.split(":")[1])))
                self.requests.append(request)
                await self.answer(request, writer)
            else:
                body = json.dumps({"data": [{"id": "scripted", "max_model_len": 4096}]}).encode()
                writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n".encode())
                writer.write(body)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@contextmanager
def in_thread(server: ScriptedServer) -> Iterator[ScriptedServer]:
    """Serve beside the test."""
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def run() -> None:
        listener = await server.start()
        started.set()
        async with listener:
            await listener.serve_forever()

    def main() -> None:
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(run())
        except asyncio.CancelledError:
            pass
        finally:
            for task in asyncio.all_tasks(loop):
                task.cancel()
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()

    thread = threading.Thread(target=main, daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loop)])
        thread.join(10)


if __name__ == "__main__":

    async def serve() -> None:
        listener = await ScriptedServer().start(int(sys.argv[1]))
        await listener.serve_forever()

    asyncio.run(serve())
