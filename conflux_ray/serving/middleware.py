"""What stands between HTTP and vLLM's OpenAI application: health, limits, sane bodies, disconnects.

One pure ASGI middleware, outermost, so that what it answers itself stays fast whatever the application does:

* `/live`: the process answers. `/health`: at least one instance takes requests (else 503).
* A POST beyond `max_in_flight` gets 429, one that finds no instance in time 503; every 429 and 503 has Retry-After.
* A body that is too large gets 413; one that is no JSON object gets 400 (vLLM answers 500 to `[]` and `null`).
* `/metrics` is this replica's, labelled as such (`metrics.exposition`).
* When the client leaves, the handler is cancelled, streaming or not. vLLM's own way of noticing does not work behind
  Ray Serve: Ray cancels the request's task, which vLLM's `with_cancellation` does not pass on to the handler.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from conflux_ray.metrics.exposition import CONTENT_TYPE as METRICS_CONTENT_TYPE
from conflux_ray.metrics.ingress import IngressMetrics, RequestRecord, current_request
from conflux_ray.serving.options import IngressOptions
from conflux_ray.serving.slo import FIELDS, SloError, request_headers_slo, resolve

logger = logging.getLogger(__name__)

Message = Any  # ASGI messages and scopes are dictionaries that are changed in place
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Any, Receive, Send], Awaitable[None]]

_CANCEL_GRACE = 5.0  # seconds for the application to end by itself once it has been told of the disconnect


class Availability(Protocol):
    """What the middleware asks about the instances behind the application."""

    def is_ready(self) -> bool:
        """Whether some instance takes new requests."""
        ...

    async def wait_ready(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds for that."""
        ...


class HttpError(Exception):
    """An answer in OpenAI's error format."""

    def __init__(
        self, status: int, kind: str, message: str, param: str | None = None, retry_after: float | None = None
    ) -> None:
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": status}}
        self.retry_after = retry_after
        super().__init__(message)


class FrontMiddleware:
    """Guards `app`, the OpenAI application.

    Args:
        app: the application.
        instances: tells whether requests can be served.
        close: awaited once, after the application's lifespan has ended.
        metrics: counts requests; its own where none is given.
        exposition: the text of `/metrics`; without it the application answers.
    """

    def __init__(
        self,
        app: App,
        instances: Availability,
        options: IngressOptions,
        close: Callable[[], Awaitable[None]] | None = None,
        metrics: IngressMetrics | None = None,
        exposition: Callable[[], bytes] | None = None,
    ) -> None:
        self._app = app
        self._instances = instances
        self._options = options
        self._close = close
        self._metrics = metrics or IngressMetrics(options.served_model_name, "ingress", options.slo_classes)
        self._exposition = exposition
        self._in_flight = 0
        self._waiting = 0
        self._entry = asyncio.Lock()

    @property
    def in_flight(self) -> int:
        """Requests to the application that have not ended."""
        return self._in_flight

    @property
    def waiting(self) -> int:
        """Of them, those that wait for the first instance."""
        return self._waiting

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            try:
                await self._app(scope, receive, send)
            finally:
                if self._close is not None:
                    await self._close()
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if path == "/live":
            await _respond(send, 200, {"status": "live"})
        elif path == "/health":
            ready = self._instances.is_ready()
            await _respond(send, 200 if ready else 503, {"status": "ready" if ready else "no instance is ready"})
        elif path.rstrip("/") == "/metrics" and self._exposition is not None:
            await _send(send, 200, self._exposition(), METRICS_CONTENT_TYPE)
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            record = self._metrics.arrived(path)
            token = current_request.set(record)
            try:
                await self._post(scope, receive, send, record)
            except HttpError as error:
                record.status = error.status
                await _respond(send, error.status, error.body, error.retry_after)
            finally:
                current_request.reset(token)
                self._metrics.ended(record)

    async def _post(self, scope: Any, receive: Receive, send: Send, record: RequestRecord) -> None:
        if self._in_flight >= self._options.max_in_flight:
            raise HttpError(
                429,
                "RateLimitError",
                f"{self._in_flight} requests are in progress here, the most allowed; try again later",
                retry_after=self._options.retry_after,
            )
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        self._in_flight += 1
        try:
            slo = self._slo_fields(headers, record)
            body = await self._read_body(headers, receive)
            if body is None:
                record.left = True
                return  # the client left before it had sent everything
            if headers.get("content-type", "").startswith("application/json"):
                _require_json_object(body)
            await self._require_instance()
            token = request_headers_slo.set(slo)
            try:
                await self._enter(scope, body, receive, send, record)
            finally:
                request_headers_slo.reset(token)
        finally:
            self._in_flight -= 1

    async def _enter(self, scope: Any, body: bytes, receive: Receive, send: Send, record: RequestRecord) -> None:
        """Run the application on a body already read; when the client leaves or this task is cancelled, end it.

        The application is told by `http.disconnect`, which ends vLLM's handlers and Starlette's streams; one that has
        not ended after a grace period is cancelled.

        One handler starts per turn of the event loop: a thousand that start in one turn, at milliseconds of parsing
        each, would keep everything else waiting, health first.
        """
        gone = asyncio.Event()
        unread = [{"type": "http.request", "body": body, "more_body": False}]

        async def app_receive() -> Message:
            if unread:
                return unread.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def app_send(message: Message) -> None:
            if gone.is_set():
                return
            if message["type"] == "http.response.start":
                record.status = message["status"]
                if record.status in (429, 503):
                    message["headers"] = [*message["headers"], _retry_after(self._options.retry_after)]
            await send(message)

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        await self._entry.acquire()
        handler = asyncio.create_task(_call(self._app, scope, app_receive, app_send))
        asyncio.get_running_loop().call_soon(self._entry.release)  # after the handler's first step
        watcher = asyncio.create_task(watch())
        try:
            await asyncio.wait({handler, watcher}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watcher.cancel()
            if not handler.done():
                gone.set()
                record.left = True
                await asyncio.wait({handler}, timeout=_CANCEL_GRACE)
                if not handler.done():
                    logger.warning("%s did not end after its client had left; cancelled", scope["path"])
                    handler.cancel()
            await asyncio.gather(handler, watcher, return_exceptions=True)
        if not gone.is_set() and not handler.cancelled() and (error := handler.exception()) is not None:
            raise error

    def _slo_fields(self, headers: Mapping[str, str], record: RequestRecord) -> dict[str, str]:
        names = {field: f"x-conflux-{field.replace('_', '-')}" for field in FIELDS}
        fields = {field: headers[name] for field, name in names.items() if name in headers}
        if fields:
            try:
                record.slo = resolve(self._options.slo_classes, fields)
            except SloError as error:
                raise HttpError(400, "BadRequestError", f"header {names[error.field]}: {error}") from None
        return fields

    async def _read_body(self, headers: Mapping[str, str], receive: Receive) -> bytes | None:
        limit = self._options.max_body_bytes
        too_large = HttpError(413, "BadRequestError", f"the body is larger than {limit} bytes")
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > limit:
            raise too_large
        parts: list[bytes] = []
        size, more = 0, True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > limit:
                raise too_large
            more = message.get("more_body", False)
        return b"".join(parts)

    async def _require_instance(self) -> None:
        if self._instances.is_ready():
            return
        unavailable = HttpError(
            503, "ServiceUnavailableError", "no instance is ready; try again later", None, self._options.retry_after
        )
        if self._waiting >= self._options.max_waiting_for_instance:
            raise unavailable
        self._waiting += 1
        try:
            if not await self._instances.wait_ready(self._options.no_instance_timeout):
                raise unavailable
        finally:
            self._waiting -= 1


def _require_json_object(body: bytes) -> None:
    """Let pass only what can be a JSON object; the application finds other mistakes in it itself."""
    if body.lstrip()[:1] == b"{":
        return
    try:
        found = type(json.loads(body)).__name__
    except ValueError:
        raise HttpError(400, "BadRequestError", "the body is not JSON") from None
    names = {"list": "an array", "str": "a string", "NoneType": "null", "bool": "a boolean"}
    raise HttpError(400, "BadRequestError", f"the body must be a JSON object, not {names.get(found, 'a number')}")


async def _call(app: App, scope: Any, receive: Receive, send: Send) -> None:
    await app(scope, receive, send)


def _retry_after(seconds: float) -> tuple[bytes, bytes]:
    return b"retry-after", str(max(1, math.ceil(seconds))).encode()


async def _respond(send: Send, status: int, body: object, retry_after: float | None = None) -> None:
    more = () if retry_after is None else (_retry_after(retry_after),)
    await _send(send, status, json.dumps(body).encode(), "application/json", *more)


async def _send(send: Send, status: int, data: bytes, content_type: str, *more: tuple[bytes, bytes]) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(data)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})
