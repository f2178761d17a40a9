"""Reading, making and changing workloads."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from conflux_ray.simulator.trace import (
    TABLE_3,
    Quantiles,
    Trace,
    TraceError,
    TraceRequest,
    cap_lengths,
    debucket,
    read_mooncake,
    rescale,
    shrink,
    subsample,
    synthesize,
)
from conflux_ray.simulator.workload import Workload

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def row(timestamp: float, prompt: int = 10, output: int = 2, **more: object) -> dict[str, object]:
    return {"timestamp": timestamp, "input_length": prompt, "output_length": output, **more}


def trace(*arrivals: float) -> Trace:
    return Trace("test", tuple(TraceRequest(a, 100 + i, 5) for i, a in enumerate(arrivals)))


def test_milliseconds_are_detected_and_said(tmp_path: Path):
    read = read_mooncake(write(tmp_path / "t.jsonl", row(1000), row(1500), row(3000, hash_ids=[1, 2])))
    assert [r.arrival for r in read.requests] == [0.0, 0.5, 2.0]
    assert read.unit == "ms"
    assert "milliseconds" in read.notes[0]
    assert read.requests[2].hash_ids == (1, 2)


def test_seconds_are_detected_and_said(tmp_path: Path):
    read = read_mooncake(write(tmp_path / "t.jsonl", row(0.0), row(0.25), row(2.0)))
    assert [r.arrival for r in read.requests] == [0.0, 0.25, 2.0]
    assert read.unit == "s"
    assert "seconds" in read.notes[0]


def test_the_unit_can_be_given(tmp_path: Path):
    path = write(tmp_path / "t.jsonl", row(0), row(1000))
    assert read_mooncake(path, unit="s").requests[1].arrival == 1000.0


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("not json", "Expecting value"),
        ("[1]", "is a JSON object, this is list"),
        ({"timestamp": 1, "input_length": 5}, "'output_length' is missing"),
        (row(1, prompt=0), "input_length=0 must be a whole number"),
        (row(1, output=1.5), "output_length=1.5"),  # type: ignore[arg-type]
        (row(-1), "timestamp=-1 must not be negative"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5}', "timestamp=nan is no number"),
        (row(1, hash_ids="x"), "hash_ids must be a list"),
    ],
)
def test_bad_rows_are_counted_and_the_first_is_named(tmp_path: Path, bad: object, says: str):
    path = write(tmp_path / "t.jsonl", row(0), row(1), bad, bad)
    with pytest.raises(TraceError, match="2 of 4 rows are bad, the first in line 3") as caught:
        read_mooncake(path)
    assert says in str(caught.value)
    skipping = read_mooncake(path, skip_bad=True)
    assert (len(skipping), skipping.bad_rows) == (2, 2)


def test_an_empty_or_missing_file_is_an_error(tmp_path: Path):
    with pytest.raises(TraceError, match="no usable row"):
        read_mooncake(write(tmp_path / "t.jsonl"))
    with pytest.raises(TraceError, match="cannot read the trace"):
        read_mooncake(tmp_path / "none.jsonl")


def test_rescaling_keeps_the_ratios_of_gaps():
    scaled = rescale(trace(5.0, 6.0, 9.0), rate=4.0)
    # 2 gaps in 4 s are 0.5 requests/s; 8 times faster.
    assert [r.arrival for r in scaled.requests] == [0.0, 0.125, 0.5]
    assert scaled.rate == pytest.approx(4.0)


def test_a_burst_has_no_rate_to_rescale():
    with pytest.raises(TraceError, match="no rate to rescale"):
        rescale(trace(1.0, 1.0), rate=2.0)


def test_subsampling_keeps_order_and_follows_the_seed():
    whole = trace(*map(float, range(100)))
    few = subsample(whole, 10, np.random.default_rng(1))
    assert len(few) == 10
    assert [r.arrival for r in few.requests] == sorted(r.arrival for r in few.requests)
    assert few.requests == subsample(whole, 10, np.random.default_rng(1)).requests
    assert few.requests != subsample(whole, 10, np.random.default_rng(2)).requests
    assert set(few.requests) < set(subsample(whole, 20, np.random.default_rng(1)).requests)
    with pytest.raises(TraceError, match="cannot take 101 of 100"):
        subsample(whole, 101, np.random.default_rng(1))


def test_buckets_are_spread_inside_themselves():
    spread = debucket(trace(0.0, 0.0, 0.0, 3.0, 3.0), np.random.default_rng(0))
    arrivals = [r.arrival for r in spread.requests]
    assert len(set(arrivals)) == 5
    assert all(0 <= a < 3 for a in arrivals[:3])
    assert all(3 <= a < 6 for a in arrivals[3:])
    assert "2 buckets" in spread.notes[-1]


def test_distinct_arrivals_are_left_alone():
    whole = trace(0.0, 1.0, 5.0)
    assert debucket(whole, np.random.default_rng(0)) is whole


def test_lengths_are_capped_together():
    long = Trace("t", (TraceRequest(0, 90, 20), TraceRequest(1, 500, 20), TraceRequest(2, 10, 10)))
    capped = cap_lengths(long, 100)
    assert [(r.prompt_tokens, r.output_tokens) for r in capped.requests] == [(90, 10), (99, 1), (10, 10)]
    assert "2 requests cut" in capped.notes[-1]


def test_a_shortened_trace_keeps_its_arrivals_and_has_at_least_one_token():
    short = shrink(trace(0.0, 1.0), 0.25, 0.01)
    assert [(r.arrival, r.prompt_tokens, r.output_tokens) for r in short.requests] == [(0.0, 25, 1), (1.0, 25, 1)]
    assert short.notes == ("prompts times 0.25, outputs times 0.01",)
    with pytest.raises(TraceError, match="must be factors in"):
        shrink(trace(0.0), 2.0, 1.0)


def test_synthetic_lengths_have_the_quantiles_of_table_3():
    prompt, output = TABLE_3["qwen-a"]
    made = synthesize("qwen-a", prompt, output, 100_000, rate=5.0, rng=np.random.default_rng(3))
    prompts = np.array([r.prompt_tokens for r in made.requests])
    outputs = np.array([r.output_tokens for r in made.requests])
    assert np.percentile(prompts, 50) == pytest.approx(1046, rel=0.03)
    assert np.percentile(prompts, 95) == pytest.approx(8809, rel=0.03)
    assert np.percentile(outputs, 50) == pytest.approx(375, rel=0.03)
    assert np.percentile(outputs, 95) == pytest.approx(1032, rel=0.03)
    assert made.rate == pytest.approx(5.0, rel=0.05)


def test_quantiles_must_be_ordered():
    with pytest.raises(ValueError, match="p50=5 <= p95=4"):
        Quantiles(5, 4)


@pytest.mark.skipif(not TRACES.exists(), reason="needs the shared traces beside the repository")
def test_the_published_traces_are_read():
    conversation = read_mooncake(TRACES / "conversation_trace.jsonl")
    assert (len(conversation), conversation.unit, conversation.bad_rows) == (12_031, "ms", 0)
    assert conversation.requests[-1].arrival == pytest.approx(3536.999)
    surrogate = read_mooncake(TRACES / "toolagent_surrogate.jsonl")
    prompts = sorted(r.prompt_tokens for r in surrogate.requests)
    assert prompts[len(prompts) // 2] == pytest.approx(TABLE_3["toolagent"][0].p50, rel=0.02)


def test_a_workload_of_a_file_goes_to_another_process_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("".join(f'{{"timestamp": {k}, "input_length": {k + 1}, "output_length": 1}}\n' for k in range(9)))
    workload = Workload.from_file(path, 100, "s")
    sent = pickle.dumps(workload)
    assert len(sent) < 500
    assert pickle.loads(sent).draw(1, 5, 0) == workload.draw(1, 5, 0)
    short = workload.shrunk(0.5, 1.0)  # that is no file
    assert pickle.loads(pickle.dumps(short)).draw(1, 5, 0) == short.draw(1, 5, 0)
