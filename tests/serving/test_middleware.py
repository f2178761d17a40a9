"""The front middleware answers for health, limits and bad bodies, and ends handlers whose client has left."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from conflux_ray.serving import slo
from conflux_ray.serving.middleware import FrontMiddleware
from conflux_ray.serving.options import IngressOptions
from conflux_ray.wire import Slo

JSON = {"content-type": "application/json"}


class Instances:
    ready = True

    def is_ready(self) -> bool:
        return self.ready

    async def wait_ready(self, timeout: float) -> bool:
        return self.ready


class Application:
    """Reads the body, then does what the test says; the handler ignores cancellation of its caller, as vLLM's does."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.release = asyncio.Event()
        self.ended: list[str] = []
        self.slo: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        if scope["method"] == "POST":
            body = (await receive())["body"]
            self.slo = slo.request_headers_slo.get()
            self.started.set()
            waits = [asyncio.create_task(self.release.wait()), asyncio.create_task(receive())]
            done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for task in pending:
                task.cancel()
            self.ended.append("finished" if waits[0] in done else "client left")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


def options(**changes: Any) -> IngressOptions:
    return IngressOptions("model", "name", **changes)


def client(middleware: FrontMiddleware) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=middleware), base_url="http://test")  # type: ignore[arg-type]


def post(
    body: bytes, headers: dict[str, str] = JSON, instances: Instances | None = None, **changes: Any
) -> httpx.Response:
    async def scenario() -> httpx.Response:
        app = Application()
        app.release.set()
        async with client(FrontMiddleware(app, instances or Instances(), options(**changes))) as http:
            return await http.post("/v1/completions", content=body, headers=headers)

    return asyncio.run(scenario())


def get(path: str, instances: Instances) -> httpx.Response:
    async def scenario() -> httpx.Response:
        async with client(FrontMiddleware(Application(), instances, options())) as http:
            return await http.get(path)

    return asyncio.run(scenario())


@pytest.mark.parametrize(("ready", "health"), [(True, 200), (False, 503)])
def test_health_tells_readiness_and_live_tells_the_process(ready, health):
    instances = Instances()
    instances.ready = ready
    assert get("/health", instances).status_code == health
    assert get("/live", instances).status_code == 200


def test_a_json_object_reaches_the_application_unchanged():
    assert post(b' {"model": "name"}').content == b' {"model": "name"}'


@pytest.mark.parametrize("body", [b"[]", b"null", b'"x"', b"1", b"true", b"", b"nonsense"])
def test_what_is_no_json_object_gets_400_in_openai_format(body):
    response = post(body)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_body_beyond_the_limit_gets_413_announced_or_not():
    assert post(b'{"a": 1}', max_body_bytes=4).status_code == 413

    async def chunks():
        yield b'{"a"'
        yield b": 1}"

    assert post(chunks(), max_body_bytes=4).status_code == 413  # type: ignore[arg-type]


def test_no_instance_gets_503_and_retry_after():
    instances = Instances()
    instances.ready = False
    response = post(b"{}", instances=instances, retry_after=2.5)
    assert (response.status_code, response.headers["retry-after"]) == (503, "3")


def test_one_request_too_many_gets_429_at_once_and_health_still_answers():
    async def scenario() -> None:
        app = Application()
        middleware = FrontMiddleware(app, Instances(), options(max_in_flight=1))
        async with client(middleware) as http:
            first = asyncio.create_task(http.post("/v1/completions", content=b"{}", headers=JSON))
            await app.started.wait()
            second = await http.post("/v1/completions", content=b"{}", headers=JSON)
            assert (second.status_code, second.headers["retry-after"]) == (429, "1")
            assert (await http.get("/health")).status_code == 200
            app.release.set()
            assert (await first).status_code == 200
            assert middleware.in_flight == 0

    asyncio.run(scenario())


def test_health_does_not_wait_until_every_request_of_a_burst_has_started():
    async def scenario() -> None:
        started = 0

        async def application(scope: Any, receive: Any, send: Any) -> None:
            nonlocal started
            started += 1
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b""})

        async with client(FrontMiddleware(application, Instances(), options())) as http:
            burst = [asyncio.create_task(http.post("/x", content=b"{}", headers=JSON)) for _ in range(500)]
            await asyncio.sleep(0)
            assert (await http.get("/health")).status_code == 200
            assert started < 100
            await asyncio.gather(*burst)
            assert started == 500

    asyncio.run(scenario())


def scope() -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [(b"content-type", b"application/json")],
    }


@pytest.mark.parametrize("way", ["disconnect message", "task cancelled"])
def test_a_client_that_leaves_ends_the_handler(way):
    async def scenario() -> None:
        app, gone, sent = Application(), asyncio.Event(), []
        middleware = FrontMiddleware(app, Instances(), options())
        messages = [{"type": "http.request", "body": b"{}", "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        task = asyncio.create_task(middleware(scope(), receive, send))
        await app.started.wait()
        if way == "disconnect message":
            gone.set()
        else:
            task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert (app.ended, sent, middleware.in_flight) == (["client left"], [], 0)

    asyncio.run(scenario())


def test_an_error_of_the_application_is_passed_on():
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("bug")

    async def scenario() -> None:
        async with client(FrontMiddleware(broken, Instances(), options())) as http:
            with pytest.raises(RuntimeError, match="bug"):
                await http.post("/x", content=b"{}", headers=JSON)

    asyncio.run(scenario())


def test_slo_headers_reach_the_application_and_wrong_ones_get_400():
    async def scenario() -> None:
        app = Application()
        app.release.set()
        async with client(FrontMiddleware(app, Instances(), options())) as http:
            await http.post("/x", content=b"{}", headers=JSON | {"X-Conflux-TTFT-Ms": "500"})
            assert app.slo == {"ttft_ms": "500"}
            wrong = await http.post("/x", content=b"{}", headers=JSON | {"x-conflux-slo-class": "unknown"})
            assert wrong.status_code == 400
            assert "x-conflux-slo-class" in json.loads(wrong.content)["error"]["message"]

    asyncio.run(scenario())


def test_an_slo_is_resolved_from_class_and_overrides():
    classes = {"default": Slo(2.0, 0.2), "chat": Slo(0.5, 0.05)}
    assert slo.resolve(classes) == Slo(2.0, 0.2, "default")
    assert slo.resolve(classes, {"slo_class": "chat", "tbt_ms": "80"}, {"tbt_ms": 70}) == Slo(0.5, 0.07, "chat")


@pytest.mark.parametrize("value", [0, -1, "x", float("nan"), True, [1], 1e12])
def test_a_target_that_is_no_positive_time_is_refused(value):
    with pytest.raises(slo.SloError, match="ttft_ms"):
        slo.resolve({"default": Slo(2.0, 0.2)}, {"ttft_ms": value})
