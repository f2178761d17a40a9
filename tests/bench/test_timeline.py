"""The timeline of an iteration log whose figures a reader can add up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conflux_ray.bench import timeline as command
from conflux_ray.bench.live.point import Point, write_json
from conflux_ray.bench.live.score import Lag, Record
from conflux_ray.bench.live.timeline import (
    Iteration,
    LogError,
    Prompt,
    against,
    gap_between,
    misses,
    of_points,
    on_device,
    prompts,
    read,
    summarize,
    text,
)
from conflux_ray.planning.latency_model import IterationLoad
from conflux_ray.simulator.request import Slo
from tests.planning.build import per_token_model

EPOCH = 1_000_000.0


def line(number: int, began: float, seconds: float, **more: Any) -> dict[str, Any]:
    """An iteration that runs from `began` for `seconds`, planned 10 ms before, as its log has it."""
    values = {
        "iteration": number,
        "planned": EPOCH + began - 0.01,
        "planning": 0.001,
        "predicted": seconds,
        "collected": EPOCH + began + seconds,
        "elapsed": [seconds, seconds],
        "decodes": [1, 0],
        "chunks": [],
        "overlap": True,
        "decode_sms": None,
        "transfers": 0,
        "pending": 0,
        "resident": 1,
    }
    if "planned" in more:
        more["planned"] += EPOCH
    return values | more


def iterations(*lines: dict[str, Any]) -> list[Iteration]:
    return [Iteration.from_json(values) for values in lines]


def chunk(start: int, end: int) -> list[Any]:
    return [start, end, [end - start, 0]]


def test_a_gap_comes_from_an_empty_instance_the_instance_or_the_workers() -> None:
    first = line(0, 0.0, 0.1)
    cases = {
        # Planned in time, 30 ms to start.
        "workers late": line(1, 0.13, 0.1, planned=0.09),
        # Planned 25 ms after the end though a decode was there, 5 ms to start.
        "instance late": line(1, 0.13, 0.1, planned=0.125),
        # Nothing but first chunks: they have just come.
        "nothing to do": line(1, 0.13, 0.1, planned=0.125, decodes=[0, 0], chunks=[chunk(0, 10)]),
    }
    parts = {"workers late": (0, 0, 0.03), "instance late": (0, 0.025, 0.005), "nothing to do": (0.025, 0, 0.005)}
    for cause, after in cases.items():
        gap = gap_between(*iterations(first, after))
        assert gap.cause == cause
        assert gap.parts == pytest.approx(parts[cause], abs=1e-6)
    # Prompts waited already before.
    before, after = iterations(first | {"pending": 1}, cases["nothing to do"])
    assert gap_between(before, after).cause == "instance late"
    # Clocks of worker and instance overlap: no gap.
    assert gap_between(*iterations(first, line(1, 0.099, 0.1))).seconds == 0


def test_an_iteration_had_ended_when_the_next_one_began() -> None:
    # The second one is reported 40 ms late, the third one in time; the first one's end shows through both.
    lines = [line(0, 0.0, 0.1), line(1, 0.14, 0.1, planned=0.09), line(2, 0.2, 0.1, planned=0.19)]
    late = iterations(*lines)[1]
    assert late.end == late.collected
    first, second, third = on_device(iterations(*lines))
    assert second.end == pytest.approx(EPOCH + 0.2, abs=1e-6)
    assert second.collected - second.end == pytest.approx(0.04, abs=1e-6)
    assert (first.end, third.end) == pytest.approx((EPOCH + 0.1, EPOCH + 0.3), abs=1e-6)
    assert gap_between(first, second).seconds == pytest.approx(0.0, abs=1e-6)
    found = summarize([first, second, third], tbt=0.5)
    assert found["reported_late"]["p99"] == pytest.approx(0.04, rel=0.05)
    assert found["reported_late"]["share_above_5_ms"] == pytest.approx(1 / 3)
    assert found["gaps"]["seconds"]["workers late"] == pytest.approx(0.0, abs=1e-6)


def test_chunks_of_one_allocation_belong_together_whatever_their_bounds() -> None:
    both = {"chunks": [chunk(0, 100), chunk(0, 100)], "allocations": [7, 8]}
    lines = [
        line(0, 0.0, 0.1, **both),
        line(1, 0.1, 0.1, chunks=[chunk(100, 150)], allocations=[8]),
        line(2, 0.2, 0.1, chunks=[chunk(100, 220)], allocations=[7]),
    ]
    assert prompts(iterations(*lines)) == [Prompt(220, (0, 2)), Prompt(150, (0, 1))]


def test_a_request_s_chunks_begin_after_it_arrived() -> None:
    # Without allocations, two chains of the same length that end together: the one that began before is another's.
    lines = [line(k, 0.1 * k, 0.1) for k in range(6)]
    lines[0]["chunks"], lines[4]["chunks"] = [chunk(0, 60)], [chunk(0, 60)]
    lines[5]["chunks"] = [chunk(60, 100), chunk(60, 100)]
    record = Record(0, 0.35, 100, 1, (0.6,))
    point = Point(1.0, 0, (record,), 0, Slo(0.1, 0.1), Lag(0, 0, 0, 0), epoch=EPOCH)
    (found,) = misses(iterations(*lines), point)
    assert found["waited"] == pytest.approx(0.05, abs=1e-6)
    assert found["chunks"] == 2


def test_workers_are_followed_each_by_itself() -> None:
    # In turn one takes 100 and the other 90 ms; no worker waits, and an iteration ends every 95 ms.
    lines = [line(k, 0.0, 0.0, collected=EPOCH + 0.095 * (k + 1), planned=0.095 * k - 0.005) for k in range(40)]
    for k, values in enumerate(lines):
        values["elapsed"] = [0.1, 0.09] if k % 2 else [0.09, 0.1]
    found = summarize(on_device(iterations(*lines)), tbt=0.2)
    assert found["busy"] == pytest.approx(1.0, rel=0.01)
    assert found["seconds"] == pytest.approx(40 * 0.095, rel=0.01)
    assert found["reported_late"]["p99"] < 0.006
    assert found["lead"]["p50"] == pytest.approx(0.005, abs=0.006)
    # A second worker that has half as much to do is idle half of the time.
    lines = [line(k, 0.1 * k, 0.1, elapsed=[0.1, 0.05]) for k in range(40)]
    assert summarize(on_device(iterations(*lines)), tbt=0.2)["busy"] == pytest.approx(0.75, rel=0.01)


def test_a_log_is_held_against_a_profile_without_its_correction() -> None:
    model = per_token_model(2)
    mixed = IterationLoad((1, 0), (300, 0), (40, 24), ((64, 100),))
    seconds = model.predict(mixed).seconds
    more = {"context": [300, 0], "chunks": [[100, 164, [40, 24]]], "predicted": 1.3 * seconds}
    lines = [line(k, k, 1.25 * seconds, **more) for k in range(3)]
    assert against(iterations(*lines), model) == {"mixed": pytest.approx({"p5": 1.25, "p50": 1.25, "p95": 1.25})}
    with pytest.raises(LogError, match="2 ranks"):
        against(iterations(*lines), per_token_model(3))
    with pytest.raises(LogError, match="context"):
        against(iterations(line(0, 0.0, 0.1)), model)


def test_busy_shares_of_the_whole_and_of_its_fullest_half_minute() -> None:
    # 40 s of back-to-back iterations, 10 s of nothing, then 20 s of iterations of 1 s with gaps of 1 s.
    busy = [line(k, k, 1.0, pending=k >= 5) for k in range(40)]
    idle = [line(40, 50.0, 1.0, planned=49.9, decodes=[0, 0], chunks=[chunk(0, 9)])]
    slow = [line(41 + k, 52.0 + 2 * k, 1.0, planned=52.0 + 2 * k) for k in range(9)]
    found = summarize(iterations(*busy, *idle, *slow), tbt=0.5)
    assert found["seconds"] == pytest.approx(69.0)
    assert found["busy"] == pytest.approx(50 / 69)
    assert found["window"]["busy"] == pytest.approx(1.0)
    assert found["window"]["seconds"] == pytest.approx(31.0, abs=1.01)
    # The last prompts waited when it was planned: 9.9 s of the 10 s are the instance's.
    assert found["gaps"]["seconds"]["instance late"] == pytest.approx(9.9 + 9.0, abs=1e-4)
    assert sum(b["instance late"] for b in found["gaps"]["histogram"]) == 10
    assert sum(sum(v for k, v in b.items() if k not in ("from", "to")) for b in found["gaps"]["histogram"]) == 10


def test_a_log_shorter_than_the_window_shows_its_longest_stretch() -> None:
    lines = [line(k, 0.1 * k, 0.1) for k in range(20)]
    late = line(20, 9.0, 0.1, planned=8.99, decodes=[0, 0], chunks=[chunk(0, 9)])
    found = summarize(iterations(*lines, late), tbt=0.1)
    assert found["window"] == {"seconds": pytest.approx(2.0), "busy": pytest.approx(1.0), "iterations": 20}
    assert found["gaps"]["seconds"]["nothing to do"] == pytest.approx(6.99)


def test_prediction_errors_are_by_kind() -> None:
    mixed = [line(k, 0.2 * k, 0.11, predicted=0.1, chunks=[chunk(0, 100)]) for k in range(3)]
    decode = [line(3, 0.6, 0.02, predicted=0.025), line(4, 0.62, 0.02, predicted=None)]
    alone = [line(5, 0.7, 0.12, predicted=0.12, decodes=[0, 0], chunks=[chunk(0, 50), chunk(0, 70)])]
    found = summarize(iterations(*mixed, *decode, *alone), tbt=0.1)
    kinds = found["kinds"]
    assert kinds["mixed"]["measured_over_predicted"]["p50"] == pytest.approx(1.1)
    assert (kinds["mixed"]["above_tbt"], kinds["mixed"]["predicted_above_tbt"]) == (1.0, 0.0)
    assert kinds["decode only"]["measured_over_predicted"]["p95"] == pytest.approx(0.8)
    assert (kinds["prefill only"]["above_tbt"], kinds["prefill only"]["predicted_above_tbt"]) == (1.0, 1.0)
    assert found["planning"]["p50"] == pytest.approx(0.001)
    assert found["prefill"]["tokens_an_iteration"]["p50"] == 100
    assert found["prefill"]["chunks_an_iteration"]["p50"] == 1
    page = text(found, "# log")
    assert "| mixed        |     3 |     0.3 |" in page
    assert "1.100 [1.100, 1.100]" in page


def test_chunks_are_joined_to_prompts() -> None:
    log = iterations(
        line(0, 0.0, 0.1, chunks=[chunk(0, 100), chunk(0, 30)]),
        line(1, 0.1, 0.1, chunks=[chunk(0, 100)]),
        line(2, 0.2, 0.1, chunks=[chunk(100, 150), chunk(100, 180)]),
    )
    # Both that had got to 100 go on; the older one is taken first.
    assert sorted(prompts(log), key=lambda p: p.tokens) == [Prompt(30, (0,)), Prompt(150, (0, 2)), Prompt(180, (1, 2))]


SLO = Slo(0.5, 0.1)


def point(*records: Record, epoch: float | None = EPOCH) -> Point:
    return Point(1.0, 0, records, 0, SLO, Lag(0, 0, 0, 0), epoch=epoch)


def test_late_first_tokens_waited_or_were_spread() -> None:
    log = iterations(
        line(0, 0.0, 0.3, chunks=[chunk(0, 50)]),
        line(1, 0.3, 0.3),
        line(2, 0.6, 0.3, chunks=[chunk(50, 80), chunk(0, 20)]),
    )
    spread = Record(0, 0.0, 80, 1, (0.901,))
    waited = Record(1, 0.05, 20, 1, (0.902,))
    unknown = Record(2, 0.1, 99, 1, (0.95,))
    on_time = Record(3, 0.8, 33, 1, (0.9,))
    silent = Record(4, 0.1, 44, 1, (), fault="HTTP 503")
    rows = misses(log, point(spread, waited, unknown, on_time, silent))
    assert [row["request"] for row in rows] == [0, 1, 2, 4]
    assert rows[0]["cause"] == "first token late: in chunks"
    assert (rows[0]["chunks"], rows[0]["between"]) == (2, 1)
    assert (rows[0]["waited"], rows[0]["spread"]) == (pytest.approx(0.0, abs=1e-6), pytest.approx(0.9))
    assert rows[0]["delivery"] == pytest.approx(0.001)
    assert rows[1]["cause"] == "first token late: waited for its first chunk"
    assert (rows[1]["waited"], rows[1]["late"]) == (pytest.approx(0.55), pytest.approx(0.352))
    assert rows[2]["cause"] == "first token late, not found in the log"
    assert (rows[3]["cause"], rows[3]["fault"]) == ("no first token", "HTTP 503")


@pytest.mark.parametrize(
    ("predicted", "seconds", "cause"),
    [
        (0.1, 0.12, "token late: iterations overran"),
        (0.12, 0.12, "token late: iterations planned too long"),
        (0.1, 0.1, "token late: gaps or delivery"),
    ],
)
def test_late_tokens_after_a_first_one_on_time(predicted: float, seconds: float, cause: str) -> None:
    log = iterations(*[line(k, 0.49 - seconds + 0.13 * k, seconds, predicted=predicted) for k in range(4)])
    record = Record(0, 0.0, 10, 4, (0.491, 0.621, 0.751, 0.881))
    (row,) = misses(log, point(record))
    assert row["cause"] == cause
    assert (row["token"], row["iterations"]) == (1, 1)
    assert row["late"] == pytest.approx(0.021)
    assert row["slack"] == pytest.approx(0.009)


def test_a_token_that_was_left_out_of_iterations_is_named_so() -> None:
    log = iterations(*[line(k, 0.39 + 0.1 * k, 0.1) for k in range(9)])
    (row,) = misses(log, point(Record(0, 0.0, 10, 2, (0.491, 0.991))))
    assert row["cause"] == "token late: it was left out of iterations"
    assert row["iterations"] == 5


def test_points_without_a_clock_are_refused_and_others_take_their_own_part_of_the_log() -> None:
    log = iterations(*[line(k, 0.1 * k, 0.1) for k in range(30)])
    with pytest.raises(LogError, match="do not say when they began"):
        misses(log, point(Record(0, 0.0, 10, 1, (0.2,)), epoch=None))
    late = point(Record(0, 0.0, 10, 1, (0.95,)), epoch=EPOCH + 1.05)
    ((_, mine),) = of_points(log, [late, point(Record(0, 0.0, 10, 1, (0.2,)), epoch=EPOCH + 99)])
    assert [i.number for i in mine] == list(range(11, 20))


def test_the_command_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "a.iterations.jsonl"
    lines = [line(k, 0.3 * k, 0.3, chunks=[chunk(0, 20 + k)], pending=1) for k in range(8)]
    log.write_text("".join(json.dumps(values) + "\n" for values in lines) + '{"iteration": 9')
    folder = tmp_path / "points"
    write_json(folder / "a" / "rate-1.0000-seed-0.json", point(Record(0, 0.0, 23, 1, (1.201,))).to_json())
    out = tmp_path / "out"
    assert command.main([str(log), "--points", str(folder), "--out", str(out)]) == 0
    assert "first token late: waited for its first chunk" in capsys.readouterr().out
    found = json.loads((out / "timeline.json").read_text())
    assert found["whole"]["iterations"] == 8
    assert found["points"][0]["misses"][0]["request"] == 0
    assert (out / "timeline.png").stat().st_size > 1000
    assert "8 iterations" in (out / "timeline.md").read_text()
    assert command.main([str(log), "--points", str(out), "--out", str(out)]) == 2
    assert "no points in it" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", '{"a": 1}\n{"a": 1}\n'])
def test_what_is_no_log_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "log").write_text(content)
    with pytest.raises(LogError):
        read(tmp_path / "log")
