"""The pure parts of the stack benchmark: percentiles, token accounting, windows."""

from __future__ import annotations

import json

import pytest

from conflux_ray.bench.stack import Cell, Reply, Summary, environment_of, format_table, summarize
from conflux_ray.bench.stack import token_arrivals as arrivals_of

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(*token_ids: int) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": "x", "token_ids": list(token_ids)}]}).encode() + b"\n\n"


def chunk(body: bytes) -> bytes:
    return f"{len(body):x}\r\n".encode() + body + b"\r\n"


def test_a_window_without_tokens_has_no_percentiles() -> None:
    with pytest.raises(ValueError, match="measure longer"):
        summarize([], 0.0, 1.0)


def test_every_token_counts_at_the_read_that_completed_its_event() -> None:
    first, second = chunk(event(1)), chunk(event(2, 3, 4))
    reads = [
        (1.0, HEAD + first),
        (2.0, second[:20]),
        (3.0, second[20:] + chunk(event(5)) + chunk(event(6) + event(7))),
        (4.0, chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"),
    ]
    assert arrivals_of(reads) == [(1.0, 1), (3.0, 3), (3.0, 1), (3.0, 1), (3.0, 1)]


def test_an_event_may_span_chunks_and_have_no_tokens() -> None:
    body = event(1, 2)
    usage = b'data: {"choices": [], "usage": {}}\n\n'
    reads = [(1.0, HEAD[:30]), (2.0, HEAD[30:] + chunk(body[:5])), (3.0, chunk(body[5:]) + chunk(usage))]
    assert arrivals_of(reads) == [(3.0, 2)]


@pytest.mark.parametrize(
    ("response", "message"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "not a stream"),
        (HEAD + chunk(b'data: {"error": {"message": "lost"}}\n\n'), "error in the stream"),
    ],
)
def test_a_failed_response_is_an_error(response: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        arrivals_of([(1.0, response)])


def test_tokens_that_come_together_are_zero_apart() -> None:
    reply = Reply(0.0, [(1.0, 1), (1.5, 2), (2.0, 1), (9.0, 1)])
    assert reply.ttft == 1.0
    assert reply.num_tokens == 5
    assert reply.gaps(begin=1.2, end=3.0) == [0.5, 0.0, 0.5]


def test_only_the_window_is_summarized() -> None:
    early = Reply(0.0, [(0.25, 1), (0.75, 1), (1.5, 1)])
    inside = Reply(1.0, [(1.25, 1), (1.75, 1), (5.0, 1)])
    summary = summarize([early, inside], begin=1.0, end=3.0)
    assert summary == Summary(
        ttft_p50=250,
        ttft_p95=250,
        gap_p50=625,
        gap_p95=737.5,
        tokens_per_s=1.5,
        tokens_per_arrival=1,
        requests=1,
        gaps=2,
    )


def test_added_is_the_difference_within_each_repeat() -> None:
    direct = [Summary(ttft, 10, 5, 5, 100, 1, 1, 1) for ttft in (1.0, 2.0, 3.0)]
    http = [Summary(ttft, 14, 5, 6, 50, 1, 1, 1) for ttft in (2.0, 4.0, 9.0)]
    cell = Cell("grpc", 16, direct, http)
    assert str(cell.added("ttft_p50")) == "2.0 [1.0, 6.0]"
    row = "| Serve's gRPC proxy | 16 | 2.0 / 10.0 | 2.0 [1.0, 6.0] | 4.0 [4.0, 4.0] | 5.0 / 5.0 "
    assert format_table([cell]).splitlines()[-1].startswith(row)


def test_serves_own_proxy_is_serve_as_it_comes() -> None:
    assert environment_of("python") == {}
    assert "RAY_SERVE_ENABLE_HA_PROXY" not in environment_of("grpc")
