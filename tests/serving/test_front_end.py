"""vLLM's OpenAI server over our core client: an unchanged `openai` client gets what an engine that is known emits.

One server and one event loop for the module; the engines are threads in this process, so that tests can look inside.
"""

import asyncio
import hashlib
import inspect
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fake_engine import FakeEngine, FakeEngineProcess, token, tokens

from conflux_ray.models import store
from conflux_ray.serving.directory import StaticDirectory
from conflux_ray.serving.options import IngressOptions
from conflux_ray.transport import TransportLimits
from conflux_ray.wire import FinishReason, RequestOutput, Slo

pytestmark = pytest.mark.heavy

MODEL = "smollm2"
PROMPT = [504, 3575, 282]  # engines look only at its length
N = len(PROMPT)


class Server:
    """The front end on a free port, in a thread with its own event loop."""

    def __init__(self, model_path: str) -> None:
        self.options = IngressOptions(
            model_path,
            MODEL,
            slo_classes={"default": Slo(2.0, 0.2), "chat": Slo(0.5, 0.05)},
            no_instance_timeout=1.0,
        )
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.started = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self.thread.start()

    async def _main(self) -> None:
        from conflux_ray.vllm_compat.frontend import build_front_end

        self.loop = asyncio.get_running_loop()
        self.directory = StaticDirectory()
        limits = TransportLimits(retry_first=0.01, retry_last=0.05)
        self.front_end = await build_front_end(self.options, self.directory, "ingress-test", limits)
        config = uvicorn.Config(self.front_end.app, host="127.0.0.1", port=self.port, log_level="warning")
        self.uvicorn = uvicorn.Server(config)
        self.started.set()
        await self.uvicorn.serve()

    def use(self, *engines: FakeEngine | FakeEngineProcess) -> None:
        """Put exactly these instances behind the server and wait until they are connected."""
        infos = [engine.info for engine in engines]
        self.loop.call_soon_threadsafe(self.directory.set, infos)
        wanted = {info.incarnation for info in infos}
        router = self.front_end.dispatcher.router
        until(lambda: {load.ready.incarnation for load in router.instances.values()} == wanted)

    def decode(self, token_ids: list[int]) -> str:
        return self.front_end.llm.get_tokenizer().decode(token_ids)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics/").text

    def stop(self) -> None:
        self.uvicorn.should_exit = True
        self.thread.join(20)


def until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"condition not met in {seconds} s"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    from conflux_ray.vllm_compat.plugin import use_cpu_platform

    use_cpu_platform()
    server = Server(str(store.model_dir(store.SMOLLM2)))
    assert server.started.wait(120)
    until(lambda: server.uvicorn.started)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def shared_engine() -> Iterator[FakeEngine]:
    engine = FakeEngine("i0").start()
    yield engine
    engine.stop()


@pytest.fixture
def engine(server: Server, shared_engine: FakeEngine) -> Iterator[FakeEngine]:
    usual = shared_engine.choose, shared_engine.interval
    server.use(shared_engine)
    yield shared_engine
    shared_engine.choose, shared_engine.interval = usual
    until(lambda: not shared_engine.running)
    assert server.front_end.dispatcher.in_flight == 0


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def stream_text(chunks: Any, index: int = 0) -> str:
    return "".join(c.choices[0].text for c in chunks if c.choices and c.choices[0].index == index)


def complete(client: openai.OpenAI, **changes: Any) -> Any:
    return client.completions.create(**({"model": MODEL, "prompt": PROMPT, "max_tokens": 12} | changes))


def test_a_completion_is_the_engine_s_tokens_streamed_or_not(server, engine, client):
    expected = server.decode(tokens(N, 12))
    whole = complete(client)
    assert whole.choices[0].text == expected
    assert whole.choices[0].finish_reason == "length"
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (N, 12)
    assert stream_text(complete(client, stream=True)) == expected


def test_a_chat_is_the_engine_s_tokens_streamed_or_not(server, engine, client):
    question = {"model": MODEL, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    whole = client.chat.completions.create(**question, max_tokens=9)
    length = len(engine.added[-1].prompt_token_ids)
    assert whole.usage.prompt_tokens == length
    assert whole.choices[0].message.content == server.decode(tokens(length, 9))
    chunks = client.chat.completions.create(**question, max_tokens=9, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content


def test_two_choices_complete_both_streamed_or_not(server, engine, client):
    expected = server.decode(tokens(N, 12))
    assert [c.text for c in complete(client, n=2, temperature=1).choices] == [expected, expected]
    chunks = list(complete(client, n=2, temperature=1, stream=True))
    assert [stream_text(chunks, index) for index in (0, 1)] == [expected, expected]


def test_logprobs_are_the_engine_s(server, engine, client):
    logprobs = complete(client, max_tokens=2, logprobs=2).choices[0].logprobs
    assert logprobs.tokens == [server.decode([t]) for t in tokens(N, 2)]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert sorted(logprobs.top_logprobs[0].values()) == [-1.5, -0.5]


def test_a_stop_string_over_several_tokens_is_never_sent_and_stops_the_engine(server, engine, client):
    text = server.decode(tokens(N, 40))
    first, last = len(server.decode(tokens(N, 20))) - 2, len(server.decode(tokens(N, 22))) + 2
    stop = text[first:last]
    for stream in (False, True):
        aborts = len(engine.aborted)
        answer = complete(client, max_tokens=1000, stop=[stop], stream=stream)
        assert (stream_text(answer) if stream else answer.choices[0].text) == text[: text.index(stop)]
        until(lambda seen=aborts: len(engine.aborted) > seen)


def test_a_stop_token_ends_the_request_in_the_engine(engine, client):
    stop = token(N, 5)
    answer = complete(client, max_tokens=100, extra_body={"stop_token_ids": [stop]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].stop_reason == stop
    assert answer.usage.completion_tokens == 6


def test_usage_comes_in_exactly_one_last_chunk(engine, client):
    chunks = list(complete(client, stream=True, stream_options={"include_usage": True}))
    assert [bool(c.usage) for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12


def test_ignoring_end_of_sequence_gives_exactly_max_tokens(engine, client):
    assert complete(client, max_tokens=64, extra_body={"ignore_eos": True}).usage.completion_tokens == 64
    assert engine.added[-1].sampling.eos_token_id is None


def test_echo_repeats_the_prompt(server, engine, client):
    text = complete(client, prompt="The capital", echo=True, max_tokens=1).choices[0].text
    assert text.startswith("The capital")


def test_korean_and_emoji_stream_without_broken_characters(server, engine, client):
    text = "안녕하세요, 세계! 👩‍👩‍👧‍👦🏳️‍🌈 끝"
    ids = server.front_end.llm.get_tokenizer().encode(text, add_special_tokens=False)
    engine.choose = lambda _, position: ids[position]
    whole = complete(client, max_tokens=len(ids)).choices[0].text
    pieces = [c.choices[0].text for c in complete(client, max_tokens=len(ids), stream=True)]
    assert whole == "".join(pieces) == text
    assert not any("�" in piece for piece in pieces)


def test_parameters_and_promises_reach_the_engine(engine, client):
    complete(
        client,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.25,
        extra_headers={"x-conflux-slo-class": "chat", "x-conflux-tbt-ms": "80"},
        extra_body={"top_k": 5, "min_tokens": 2, "priority": -3, "vllm_xargs": {"ttft_ms": 700}},
    )
    added = engine.added[-1]
    sampling = added.sampling
    assert (added.prompt_token_ids, added.priority, added.slo) == (PROMPT, -3, Slo(0.7, 0.08, "chat"))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.9, 5, 7)
    assert (sampling.presence_penalty, sampling.min_tokens, sampling.max_tokens) == (0.25, 2, 12)
    assert sampling.eos_token_id is not None
    assert sampling.eos_token_id in sampling.all_stop_token_ids


def test_32_concurrent_streams_are_right(server, engine, client):
    def one(length: int) -> bool:
        chunks = complete(client, prompt=[1] * length, max_tokens=40, stream=True)
        return stream_text(chunks) == server.decode(tokens(length, 40))

    with ThreadPoolExecutor(32) as pool:
        assert all(pool.map(one, range(1, 33)))


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_request(server, engine, stream):
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        body = f'{{"model": "{MODEL}", "prompt": [1, 2], "max_tokens": 1500, "stream": {str(stream).lower()}}}'
        connection.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
        )
        time.sleep(0.05)  # headers and body in segments of their own, as many clients send them
        connection.sendall(body.encode())
        until(lambda: engine.running)
    until(lambda: not engine.running, seconds=2)
    labels = f'engine="0",model_name="{MODEL}",replica="ingress-test"'
    until(lambda: f"vllm:num_requests_running{{{labels}}} 0.0" in server.metrics(), seconds=5)


@pytest.mark.parametrize("body", ["[]", "null", '"x"', "{broken", "", "7", '{"model": 7}'])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_bodies_get_400(server, engine, path, body):
    answer = httpx.post(server.url + path, content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"min_p": 0.1, "temperature": 1}, "min_p"),
        ({"response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"patternProperties": 3}}}, "structured_outputs"),
        ({"vllm_xargs": {"ttft_ms": -1}}, "ttft_ms"),
        ({"vllm_xargs": {"slo_class": "unknown"}}, "slo_class"),
    ],
)
def test_what_the_engines_do_not_support_gets_400_that_names_it(server, engine, fields, param, stream):
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "stream": stream} | fields
    answer = httpx.post(f"{server.url}/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert engine.running == {}


@pytest.mark.parametrize("stream", [True, False])
def test_a_prompt_that_is_too_long_gets_400_before_any_event(server, engine, stream):
    answer = httpx.post(
        f"{server.url}/v1/completions",
        json={"model": MODEL, "prompt": [5] * 2048, "max_tokens": 1, "stream": stream},
    )
    assert answer.status_code == 400
    assert "2048" in answer.json()["error"]["message"]


def test_the_instances_limit_is_the_one_promised(server, engine, client):
    assert client.models.list().data[0].max_model_len == 2048


def test_an_empty_prompt_gets_400_and_the_next_request_works(engine, client):
    with pytest.raises(openai.BadRequestError):
        complete(client, prompt=[""])
    assert complete(client).usage.completion_tokens == 12


def test_unknown_models_get_404_and_no_metric_series(server, engine, client):
    def series() -> int:
        return len({line.split(" ")[0] for line in server.metrics().splitlines() if not line.startswith("#")})

    with pytest.raises(openai.NotFoundError):
        complete(client, model="warm-up")
    before = series()
    with httpx.Client(base_url=server.url) as http:
        for i in range(1000):
            answer = http.post("/v1/completions", json={"model": f"unknown-{i}", "prompt": PROMPT})
            assert answer.status_code == 404
    assert series() == before


def test_a_killed_instance_is_a_pause_not_an_error(server, client):
    victim, heir = FakeEngineProcess("i1"), FakeEngine("i2", interval=0.02).start()
    try:
        server.use(victim)
        text: list[str] = []
        chunks = complete(client, max_tokens=60, stream=True, logprobs=1)
        for number, chunk in enumerate(chunks):
            text.append(chunk.choices[0].text)
            if number == 3:
                server.loop.call_soon_threadsafe(server.directory.set, [victim.info, heir.info])
                until(lambda: len(server.front_end.dispatcher.router.instances) == 2)
                victim.kill()
        assert "".join(text) == server.decode(tokens(N, 60))
        assert len(heir.added) == 1
        assert heir.added[0].output_token_ids == tokens(N, len(heir.added[0].output_token_ids))
    finally:
        victim.kill()
        heir.stop()


def test_a_killed_instance_without_an_heir_ends_the_stream_with_an_error_event(server):
    victim = FakeEngineProcess("i1")
    server.use(victim)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1000, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=20) as answer:
        lines = answer.iter_lines()
        next(lines)
        victim.kill()
        rest = [line for line in lines if line]
    assert '"code": 503' in rest[-2]
    assert "try again later" in rest[-2]
    assert rest[-1] == "data: [DONE]"


def test_a_killed_instance_without_an_heir_ends_a_request_that_is_not_streamed_with_503(server):
    victim = FakeEngineProcess("i1")
    server.use(victim)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1000, "n": 2, "temperature": 1}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=20)
        until(lambda: server.front_end.dispatcher.in_flight == 2)
        victim.kill()
        assert answer.result().status_code == 503
    until(lambda: server.front_end.dispatcher.in_flight == 0)
    assert server.front_end.llm.engine_core.unserved == {}


def test_a_full_queue_gets_429_with_retry_after(server, engine):
    engine.tamper = lambda o: RequestOutput(o.request_id, o.attempt, o.token_index, [], FinishReason.OVERLOADED)
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=20)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1
    assert "try again later" in answer.json()["error"]["message"]
    assert server.front_end.llm.engine_core.unserved == {}
    engine.tamper = lambda output: output
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=20).status_code == 200


def test_without_an_instance_health_is_503_and_requests_get_503(server):
    server.use()
    assert httpx.get(f"{server.url}/health").status_code == 503
    assert httpx.get(f"{server.url}/live").status_code == 200
    answer = httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": PROMPT})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]


def test_vllm_s_metrics_are_there(server, engine, client):
    complete(client)
    names = set(re.findall(r"^# TYPE (vllm:\w+)", server.metrics(), re.MULTILINE))
    assert len(names) >= 60
    assert "vllm:time_to_first_token_seconds" in names


def counts(server) -> dict[str, float]:
    """Requests by outcome, goodput and misses of all classes."""
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^(conflux_\w+_total)\{(.*)\} (\S+)$", server.metrics(), re.MULTILINE):
        outcome = re.search(r'(?:outcome|kind)="(\w+)"', labels)
        key = f"{name.removeprefix('conflux_')} {outcome[1]}" if outcome else name.removeprefix("conflux_")
        found[key] = found.get(key, 0) + float(value)
    return found


def changed(server, before: dict[str, float]) -> dict[str, float]:
    """What has been counted since, tokens and the router's own counters aside."""
    names = ("requests_total", "goodput_requests_total", "slo_misses_total", "migrations_total")
    return {k: v - before[k] for k, v in counts(server).items() if v != before[k] and k.startswith(names)}


def test_a_request_of_several_choices_counts_once_and_all_its_tokens_do(server, engine, client):
    before = counts(server)
    complete(client, n=3, max_tokens=5, temperature=1)
    assert changed(server, before) == {"requests_total completed": 1, "goodput_requests_total": 1}
    assert counts(server)["output_tokens_total"] - before["output_tokens_total"] == 15


def test_promises_in_headers_and_bodies_decide_what_is_goodput(server, engine, client):
    before = counts(server)
    complete(client, extra_headers={"x-conflux-ttft-ms": "0.001"})
    complete(client, extra_headers={"x-conflux-slo-class": "chat", "x-conflux-ttft-ms": "60000"})
    complete(client, extra_body={"vllm_xargs": {"ttft_ms": 0.001}})
    result = changed(server, before)
    assert result["slo_misses_total ttft"] == 2
    assert result["requests_total completed"] == 3
    assert f'conflux_requests_total{{model="{MODEL}",outcome="completed",replica="ingress-test",slo_class="chat"}}' in (
        server.metrics()
    )


def test_wrong_requests_and_those_nobody_serves_are_told_apart(server, engine, client):
    before = counts(server)
    with pytest.raises(openai.NotFoundError):
        complete(client, model="nobody")
    server.use()
    assert httpx.post(f"{server.url}/v1/completions", json={"model": MODEL, "prompt": PROMPT}).status_code == 503
    assert changed(server, before) == {
        "requests_total invalid": 1,
        "requests_total unavailable": 1,
        "slo_misses_total unavailable": 1,
    }


def test_the_constructor_that_ours_replaces_is_the_one_it_was_written_against(server):
    from vllm.v1.engine.async_llm import AsyncLLM

    from conflux_ray.vllm_compat.frontend import ConfluxLLM

    source = inspect.getsource(AsyncLLM.__init__)
    assert hashlib.sha256(source.encode()).hexdigest().startswith("21de44c03440aa87"), "read the new one"
    ours = inspect.getsource(ConfluxLLM.__init__)
    attribute = re.compile(r"^\s+self\.(\w+)(?::[^=]+)? = ", re.MULTILINE)
    assert set(attribute.findall(ours)) == set(attribute.findall(source))


def test_every_sampling_parameter_of_vllm_is_accounted_for(server):
    from vllm.sampling_params import SamplingParams

    from conflux_ray.wire import Sampling

    of_the_front_end = {
        *("n", "stop", "detokenize", "skip_special_tokens", "spaces_between_special_tokens", "skip_clone"),
        *("include_stop_str_in_output", "output_kind", "output_text_buffer_length", "flat_logprobs", "bad_words"),
        *("extra_args", "routed_experts_prompt_start"),
    }
    of_the_engine = {name.removeprefix("_") for name in SamplingParams.__struct_fields__} - of_the_front_end
    assert of_the_engine == set(Sampling.__struct_fields__)


def test_api_keys_and_further_arguments_reach_vllm(server):
    from conflux_ray.vllm_compat.frontend import parse_arguments

    options = IngressOptions("m", "name", api_keys=("a", "b"), extra_args=("--enable-prompt-tokens-details",))
    args = parse_arguments(options)
    assert args.api_key == ["a", "b"]
    assert args.enable_prompt_tokens_details
