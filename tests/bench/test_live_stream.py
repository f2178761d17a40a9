"""Tokens are counted, timed and checked as they come over a real connection; the clock is the test's."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from conflux_ray.bench.live.prompts import PromptSource, completion_body
from conflux_ray.bench.live.stream import Reply, StreamProtocol, request_bytes
from tests.bench.scripted import END, HEAD, ScriptedServer, chunk, event, tokens_so_far

DONE = chunk(event("[DONE]")) + END
Script = list[tuple[float, bytes]]


async def replay(script: Script, then_close: bool = True) -> Reply:
    """Send each piece at its time by a clock that only moves when the client has read the one before."""
    now, received = 0.0, 0
    reply, ended = Reply(), asyncio.Event()

    class Counting(StreamProtocol):
        def data_received(self, data: bytes) -> None:
            nonlocal received
            received += len(data)
            super().data_received(data)

    async def answer(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        nonlocal now
        sent = 0
        for when, data in script:
            now = when
            writer.write(data)
            sent += len(data)
            while received < sent and not ended.is_set():
                await asyncio.sleep(0)
        if not then_close:
            await ended.wait()

    server = ScriptedServer(answer)
    listener = await server.start()
    body = completion_body("m", [1, 2, 3], 4)
    protocol = Counting(request_bytes("h", "/v1/completions", body), reply, lambda: now, ended.set)
    await asyncio.get_running_loop().create_connection(lambda: protocol, "127.0.0.1", server.port)
    await asyncio.wait_for(ended.wait(), 20)
    listener.close()
    assert server.requests == [json.loads(body)]
    return reply


def run(script: Script) -> Reply:
    return asyncio.run(replay(script))


def test_every_token_has_the_time_of_the_read_that_completed_its_event() -> None:
    second = chunk(tokens_so_far(4))
    reply = run(
        [
            (1.0, HEAD[:20]),
            (2.0, HEAD[20:] + chunk(tokens_so_far(1))),
            (3.0, second[:30]),
            (4.0, second[30:]),  # three tokens in one event
            (5.0, chunk(tokens_so_far(5) + tokens_so_far(6, finish="length"))),
            (6.0, chunk(event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 6}})) + DONE),
        ]
    )
    assert reply.times == [2.0, 4.0, 4.0, 4.0, 5.0, 5.0]
    assert reply.fault(prompt_tokens=5, output_tokens=6) is None


def test_token_ids_and_text_count_where_there_is_no_usage() -> None:
    def choice(**fields: Any) -> bytes:
        return chunk(event({"choices": [{"index": 0, "text": "", **fields}]}))

    ids = run([(1.0, HEAD + choice(token_ids=[7, 8])), (2.0, choice(token_ids=[9], finish_reason="length") + DONE)])
    assert ids.times == [1.0, 1.0, 2.0]
    assert ids.fault(5, 3) is None
    usage = {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}}
    text = run(
        [
            (1.0, HEAD + choice(text="a")),
            (2.0, choice(text="bc", finish_reason="length")),
            (3.0, chunk(event(usage)) + DONE),
        ]
    )
    assert text.times == [1.0, 2.0]
    assert text.fault(5, 3) == "usage says 3 tokens, 2 were counted"


def test_events_may_end_in_carriage_returns_and_have_comments() -> None:
    body = (b": ping\r\n\r\nevent: x\r\n" + tokens_so_far(1, finish="length") + event("[DONE]")).replace(b"\n", b"\r\n")
    assert run([(1.0, HEAD + chunk(body) + END)]).fault(5, 1) is None


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ([(1.0, HEAD + chunk(tokens_so_far(1)))], "connection closed after 1 tokens"),
        ([(1.0, b"HTTP/1.1 200")], "connection closed without an answer"),
        ([(1.0, HEAD + chunk(tokens_so_far(1)) + END)], "the stream ended without [DONE] after 1 tokens"),
        (
            [(1.0, HEAD + chunk(tokens_so_far(1)) + chunk(event({"error": {"message": "lost"}})))],
            'error event after 1 tokens: {"message":"lost"}',
        ),
        ([(1.0, HEAD + chunk(event("[]")))], "an event is not what the API promises"),
        ([(1.0, b"HTTP/1.1 429 Too Many\r\ncontent-length: 4\r\n\r\nfull")], "HTTP 429: full"),
        ([(1.0, b"SSH-2.0\r\n\r\n")], "not an HTTP response to rely on"),
        ([(1.0, HEAD + chunk(tokens_so_far(2, finish="stop")) + DONE)], "2 tokens instead of 3, finish_reason 'stop'"),
        ([(1.0, HEAD + chunk(tokens_so_far(4, finish="length")) + DONE)], "4 tokens instead of 3"),
        ([(1.0, HEAD + chunk(tokens_so_far(3, finish="stop")) + DONE)], "finish_reason is 'stop' instead of 'length'"),
        (
            [(1.0, HEAD + chunk(tokens_so_far(3, prompt=9, finish="length")) + DONE)],
            "the server counts 9 prompt tokens instead of 5",
        ),
    ],
)
def test_what_is_wrong_with_an_answer_is_said(script: Script, fault: str) -> None:
    assert fault in (run(script).fault(prompt_tokens=5, output_tokens=3) or "")


def test_a_request_that_is_cut_says_why() -> None:
    reply = Reply()
    ended: list[bool] = []
    StreamProtocol(b"", reply, lambda: 0.0, lambda: ended.append(True)).cut("enough")
    assert reply.fault(5, 3) == "enough"
    assert ended == [True]


def test_prompts_depend_on_key_and_place_alone_and_share_what_their_blocks_share() -> None:
    source = PromptSource(vocab_size=100, key=(1, 5), block_tokens=4)
    assert source.tokens(3, 10) == source.tokens(3, 10)
    assert source.tokens(3, 10) != source.tokens(4, 10)
    assert PromptSource(100, (1, 6), 4).tokens(3, 10) != source.tokens(3, 10)
    assert all(3 <= token < 100 for token in source.tokens(5, 1000))
    first, second = source.tokens(0, 10, (7, 8, 9)), source.tokens(1, 11, (7, 8, 10))
    assert first[:8] == second[:8]
    assert first[8:] != second[8:10]
    assert len(source.tokens(2, 6, (7, 8, 9))) == 6  # cut to the model's length
    assert len(source.tokens(2, 20, (7,))) == 20
    assert PromptSource(100, (1, 5), 4, shared=False).tokens(0, 8, (7, 8)) != first[:8]
    with pytest.raises(ValueError, match="vocab_size=4"):
        PromptSource(4, (1,))


def test_a_request_asks_for_exactly_its_tokens_and_for_their_count() -> None:
    body = json.loads(completion_body("m", [5, 6], 7, priority=2))
    assert (body["prompt"], body["max_tokens"], body["priority"]) == ([5, 6], 7, 2)
    assert body["ignore_eos"]
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert "priority" not in json.loads(completion_body("m", [5, 6], 7))
