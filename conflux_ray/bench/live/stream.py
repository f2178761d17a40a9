"""One streamed answer: HTTP, server-sent events, and the time of every token.

The cost of a chunk is what limits how many streams one client process follows, so bytes go straight from the event loop
through a C parser of HTTP and a typed JSON decoder; no request has a task, a queue or a reader of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import httptools
import msgspec

DONE = b"[DONE]"
_ERROR_BYTES = 2000
"""Of an answer that is no stream, kept for its message."""


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Event).decode


@dataclass(slots=True)
class Reply:
    """An answer as its client saw it.

    Args:
        times: of each token, seconds on the client's clock; tokens that came together have one time.
        finish_reason: the server's; None while there is none.
        prompt_tokens: as the server counted them; 0 if it did not say.
        usage_tokens: output tokens as the server's last usage counted them; None if it did not say.
        complete: the answer came to its end.
        error: what went wrong; None if nothing did.
    """

    times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    prompt_tokens: int = 0
    usage_tokens: int | None = None
    complete: bool = False
    error: str | None = None

    def fault(self, prompt_tokens: int, output_tokens: int) -> str | None:
        """What is wrong with the answer to a request of these lengths; None if it is what was asked for."""
        if self.error is not None:
            return self.error
        if not self.complete:
            return f"ended after {len(self.times)} of {output_tokens} tokens"
        if self.usage_tokens is not None and self.usage_tokens != len(self.times):
            return f"usage says {self.usage_tokens} tokens, {len(self.times)} were counted"
        if len(self.times) != output_tokens:
            return f"{len(self.times)} tokens instead of {output_tokens}, finish_reason {self.finish_reason!r}"
        if self.finish_reason != "length":
            return f"finish_reason is {self.finish_reason!r} instead of 'length'"
        if self.prompt_tokens not in (0, prompt_tokens):
            return f"the server counts {self.prompt_tokens} prompt tokens instead of {prompt_tokens}"
        return None


class ReplyReader:
    """Turns the bytes of one HTTP response into a `Reply`.

    Args:
        reply: filled in.
    """

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self._parser = httptools.HttpResponseParser(self)
        self._now = 0.0
        self._rest = b""
        self._status = 0
        self._saw_done = False

    def feed(self, now: float, data: bytes) -> bool:
        """Take what was read at `now`; whether the response has ended."""
        self._now = now
        reply = self.reply
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            # An exception of the callbacks below comes wrapped in one of the parser's.
            reply.error = reply.error or f"not an HTTP response to rely on: {error.__context__ or error}"
        return reply.complete or reply.error is not None

    def closed(self) -> None:
        """The connection is gone."""
        reply = self.reply
        if not reply.complete and reply.error is None:
            if self._status == 200:
                reply.error = f"connection closed after {len(reply.times)} tokens"
            else:
                reply.error = self._refusal() if self._status else "connection closed without an answer"

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self._status != 200:
            self._rest = (self._rest + body)[:_ERROR_BYTES]
            return
        if b"\r" in body:
            body = body.replace(b"\r", b"")
        *events, self._rest = (self._rest + body).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    self._data(line[5:].strip())

    def on_message_complete(self) -> None:
        if self._status == 100:
            return
        if self._status != 200:
            self.reply.error = self._refusal()
        elif not self._saw_done and self.reply.error is None:
            self.reply.error = f"the stream ended without {DONE.decode()} after {len(self.reply.times)} tokens"
        else:
            self.reply.complete = self.reply.error is None

    def _refusal(self) -> str:
        return f"HTTP {self._status}: {self._rest.decode(errors='replace').strip()[:300]}"

    def _data(self, data: bytes) -> None:
        reply = self.reply
        if data == DONE:
            self._saw_done = True
            return
        try:
            event = _decode(data)
        except msgspec.MsgspecError as error:
            reply.error = f"an event is not what the API promises ({error}): {data[:200]!r}"
            return
        if event.error is not None:
            reply.error = (
                f"error event after {len(reply.times)} tokens: {msgspec.json.encode(event.error).decode()[:300]}"
            )
            return
        usage = event.usage
        new = 0
        if usage is not None and usage.completion_tokens is not None:
            reply.prompt_tokens, reply.usage_tokens = usage.prompt_tokens, usage.completion_tokens
        for choice in event.choices:
            if choice.finish_reason is not None:
                reply.finish_reason = choice.finish_reason
            if choice.token_ids is not None:
                new += len(choice.token_ids)
            elif usage is not None and usage.completion_tokens is not None:
                new += usage.completion_tokens - len(reply.times)
            elif choice.text:
                new += 1  # no count at all: the final usage shows whether a chunk is a token
        if new == 1:
            reply.times.append(self._now)
        elif new > 1:
            reply.times.extend([self._now] * new)


class StreamProtocol(asyncio.Protocol):
    """One request on one connection.

    Args:
        request: all its bytes.
        reply: filled in.
        clock: seconds.
        done: called once, when the answer has ended, well or not.
    """

    def __init__(self, request: bytes, reply: Reply, clock: Callable[[], float], done: Callable[[], None]) -> None:
        self._request = request
        self._reader = ReplyReader(reply)
        self._clock = clock
        self._done: Callable[[], None] | None = done
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance
        self._transport.write(self._request)
        self._request = b""

    def data_received(self, data: bytes) -> None:
        if self._reader.feed(self._clock(), data):
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        self._reader.closed()
        self._end()

    def cut(self, reason: str) -> None:
        """Leave: the server sees a client that is gone."""
        reply = self._reader.reply
        reply.error = reply.error or reason
        self._end()

    def _end(self) -> None:
        done, self._done = self._done, None
        if done is not None:
            if self._transport is not None:
                if self._reader.reply.complete:
                    self._transport.close()
                else:
                    self._transport.abort()
            done()


def request_bytes(host: str, path: str, body: bytes, api_key: str | None = None) -> bytes:
    """A POST of JSON that closes its connection afterwards."""
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    if api_key:
        lines.append(f"Authorization: Bearer {api_key}")
    return "\r\n".join([*lines, "", ""]).encode() + body
