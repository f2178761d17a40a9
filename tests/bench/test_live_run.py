"""Whole runs of the client's processes against a server in this process, and what is kept of them."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conflux_ray.bench import serve
from conflux_ray.bench.live.client import CUT, UNDECIDED, Board, Endpoint, Job, Report, Sent, Target
from conflux_ray.bench.live.point import Load, Point, record_of, run_point, unfinished
from conflux_ray.bench.live.score import Lag, Record
from conflux_ray.bench.live.search import OutOfTimeError, search
from conflux_ray.bench.live.store import Store, StoreError
from conflux_ray.bench.live.stream import Reply
from conflux_ray.simulator.request import Slo
from conflux_ray.simulator.trace import Trace, TraceRequest
from conflux_ray.simulator.workload import Workload
from tests.bench.scripted import ScriptedServer, answer_at_once, in_thread

PATIENT = Slo(ttft=600.0, tbt=10.0)
LATE = 1e6
"""A client lag that no run reaches, seconds."""


def workload(count: int = 12, output: int = 3) -> Workload:
    requests = tuple(TraceRequest(0.1 * i, 5 + i, output) for i in range(count))
    return Workload("small", 4096, Trace("small", requests))


def load(slo: Slo = PATIENT, **changes: Any) -> Load:
    return replace(Load(workload(), slo, seconds=0.5, max_lag=LATE, clients=1, vocab_size=100), **changes)


def made(rate: float, seed: int, outcomes: str, invalid: str | None = None, stopped: bool = False) -> Point:
    """A point whose request i is compliant where `outcomes` has a '+'."""
    records = tuple(
        Record(i, float(i), 10, 1, (i + (0.5 if outcome == "+" else 5.0),)) for i, outcome in enumerate(outcomes)
    )
    return Point(rate, seed, records, 0, Slo(1.0, 0.1), Lag(0.0, 0.0, 0.0, 0.0), invalid, stopped)


def test_no_request_waits_for_the_answer_to_another() -> None:
    everyone = asyncio.Event()
    server = ScriptedServer()

    async def answer(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if len(server.requests) == 10:
            everyone.set()
        await everyone.wait()  # the first answers come after the last request: others would hang
        await answer_at_once(request, writer)

    server.answer = answer
    with in_thread(server):
        point = run_point(load(clients=2), Target((server.url,), "m"), rate=20.0, seed=0, say=lambda line: None)
    assert [r.fault for r in point.records] == [None] * 10
    assert [len(r.times) for r in point.records] == [3] * 10
    assert (point.warm_up, point.attainment, point.invalid, point.stopped) == (1, 1.0, None, False)
    drawn = load().draw(20.0, 0).requests
    assert sorted(len(r["prompt"]) for r in server.requests) == sorted(r.prompt_tokens for r in drawn)
    assert Point.from_json(json.loads(json.dumps(point.to_json()))) == point


def test_a_run_ends_when_no_promise_can_be_kept_any_more() -> None:
    async def answer(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    with in_thread(ScriptedServer(answer)) as server:
        point = run_point(load(Slo(1e-3, 1e-3)), Target((server.url,), "m"), 20.0, 0, say=lambda line: None)
    assert {r.fault for r in point.records} == {CUT}
    assert point.attainment == 0.0
    assert point.invalid is None


def test_a_run_that_is_certain_to_miss_can_stop_early() -> None:
    async def answer(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 2\r\n\r\nno")

    with in_thread(ScriptedServer(answer)) as server:
        slow = load(workload=workload(1000), seconds=1e4, warm_up=0.0)
        point = run_point(slow, Target((server.url,), "m"), 0.1, 0, floor=0.9995, say=lambda line: None)
    assert point.stopped
    assert point.records[0].fault == "HTTP 503: no"
    assert point.records[-1].fault == "never sent"


def test_shortest_queue_then_fewest_prompt_tokens() -> None:
    board = Board(multiprocessing.get_context("spawn"), clients=1, replicas=2)
    assert board.pick(1000) == 0
    assert board.pick(10) == 1
    assert board.pick(10) == 1  # one request each; the second has fewer tokens
    assert board.pick(10) == 0
    board.release(0, 1000)
    board.release(0, 10)
    assert board.pick(5) == 0


def test_records_are_relative_to_the_start_and_missing_requests_are_misses() -> None:
    jobs = [Job(0, 0.25, 5, 2), Job(1, 0.5, 6, 2)]
    reply = Reply([101.0, 102.000004], "length", 5, 2, complete=True)
    records = record_of([Report([Sent(jobs[0], 1, 0.002, reply)], [])], jobs, start=100.0)
    assert records[0] == Record(0, 0.25, 5, 2, (1.0, 2.0), 1, 0.002, None)
    assert records[1].fault == "never sent"


def test_every_rate_of_a_seed_has_the_same_requests_and_poisson_the_same_gaps() -> None:
    poisson = load(arrivals="poisson", least=10)
    slow, fast = poisson.draw(1.0, 3).requests, poisson.draw(2.0, 3).requests
    assert [r.prompt_tokens for r in slow] == [r.prompt_tokens for r in fast]
    assert [r.arrival for r in slow] == pytest.approx([2 * r.arrival for r in fast])
    assert slow[0].arrival == 0.0
    assert [r.arrival for r in poisson.draw(1.0, 4).requests] != [r.arrival for r in slow]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arrivals": "steady"}, "arrivals='steady'"),
        ({"warm_up": 1.0}, "warm_up=1.0"),
        ({"clients": 0}, "clients=0"),
        ({"max_lag": 0.0}, "max_lag=0.0"),
    ],
)
def test_impossible_loads_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load(**changes)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://127.0.0.1:1/v1"])
def test_impossible_urls_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="url="):
        Endpoint.of(url)


def test_the_search_brackets_and_bisects() -> None:
    def measure(rate: float) -> Point:
        return made(rate, 0, "+" * 20 if rate <= 3.3 else "+" * 18 + "--")

    found = search(measure, 0.95, guess=2.0, tolerance=0.02)
    assert found.complete
    assert found.passed <= 3.3 < (found.failed or 0)
    assert (found.failed or 0) / found.passed <= 1.021


def test_a_search_without_time_says_what_it_knows() -> None:
    rates: list[float] = []

    def measure(rate: float) -> Point:
        if len(rates) == 2:
            raise OutOfTimeError
        rates.append(rate)
        return made(rate, 0, "++++")

    found = search(measure, 0.95, guess=1.0, tolerance=0.02)
    assert (found.passed, found.failed, found.complete) == (1.3, None, False)


def test_a_search_does_not_build_on_an_invalid_point() -> None:
    with pytest.raises(RuntimeError, match="2 requests/s: the client lagged"):
        search(lambda rate: made(rate, 0, "++", invalid="the client lagged"), 0.95, 2.0, 0.02)
    stopped = search(lambda rate: made(rate, 0, "++", stopped=True), 0.95, 1.0, 0.02, lowest=0.5)
    assert stopped.passed == 0.0


def test_a_store_keeps_valid_points_and_refuses_other_settings(tmp_path: Path) -> None:
    store = Store(tmp_path, {"seconds": 10.0, "slo": {"ttft": 2.0}})
    store.put("a", made(2.0, 1, "+-"))
    store.put("a", made(1.0, 0, "++", invalid="the client lagged"))
    again = Store(tmp_path, {"seconds": 10.0, "slo": {"ttft": 2.0}})
    assert again.get("a", 2.0, 1) == made(2.0, 1, "+-")
    assert again.get("a", 1.0, 0) is None
    assert again.get("a", 2.0, 0) is None
    assert [p.rate for p in again.points("a")] == [1.0, 2.0]
    assert Store(tmp_path, None).settings["seconds"] == 10.0
    with pytest.raises(StoreError, match=r"seconds=10\.0, not 20\.0; choose another --out"):
        Store(tmp_path, {"seconds": 20.0, "slo": {"ttft": 2.0}})
    with pytest.raises(StoreError, match="no points in it"):
        Store(tmp_path / "none", None)


def trace_file(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    rows = [{"timestamp": 100 * i, "input_length": 4 + i, "output_length": 2} for i in range(40)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_the_command_measures_each_point_once_and_prints_its_table_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--trace", str(trace_file(tmp_path)), "--unit", "ms", "--seconds", "0.5", "--rate", "20", "--max-lag", "9"]
    words += ["--ttft", "600", "--vocab-size", "50", "--clients", "1", "--out", str(tmp_path / "out")]
    with in_thread(ScriptedServer()) as server:
        words += ["--url", server.url]
        assert serve.main(words) == 0
        assert len(server.requests) == 10
        assert serve.main(words) == 0
        assert len(server.requests) == 10
        assert serve.main([*words, "--ttft", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith("|   20 |    0 |       9 |       100.0 |")
    assert "its points have slo={'ttft': 600.0, 'tbt': 0.1}" in printed.err
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert report["points"][0]["score"]["compliant"] == 9
    assert "records" not in report["points"][0]
    assert (tmp_path / "out/report.png").stat().st_size > 1000


def test_a_server_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trace", str(trace_file(tmp_path)), "--rate", "1", "--out", str(tmp_path / "out")]
    assert serve.main([*words, "--url", "http://127.0.0.1:9"]) == 2
    assert "start the server, or correct --url" in capsys.readouterr().err
    with in_thread(ScriptedServer()) as server:
        assert serve.main([*words, "--url", server.url, "--model", "other"]) == 2
        assert serve.main([*words, "--url", server.url]) == 2
    errors = capsys.readouterr().err
    assert "serves scripted, not 'other'; correct --model" in errors
    assert "give --vocab-size" in errors


def test_what_was_cut_undecided_is_missed_and_makes_a_point_invalid_if_it_is_much() -> None:
    async def answer(request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    with in_thread(ScriptedServer(answer)) as server:
        point = run_point(
            load(Slo(1e-3, 600.0), drain=0.0, workload=workload(output=1)),
            Target((server.url,), "m"),
            20.0,
            0,
            say=lambda line: None,
        )
        assert point.invalid is None  # every first token was late: nothing was undecided

    jobs = [Job(0, 0.0, 5, 2)]
    cut = record_of([Report([Sent(jobs[0], 0, 0.0, Reply(error=UNDECIDED))], [])], jobs, 0.0)
    assert not cut[0].compliant(PATIENT)
    whole = [replace(cut[0], fault=None)]
    assert unfinished([*cut, *whole * 199], "drained") is None
    assert "2 requests were cut" in (unfinished([*cut * 2, *whole * 198], "drained") or "")
    assert unfinished(cut * 2, "certain miss") is None
