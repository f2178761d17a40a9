"""`conflux bench serve` against the real server: it gets every token it asks for, and knows how many."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conflux_ray.bench import serve
from tests.e2e.server import Server

pytestmark = pytest.mark.heavy


def test_the_client_counts_every_token_of_the_real_server(server: Server, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 500 * i, "input_length": 20 + 7 * i, "output_length": 3 + i % 4} for i in range(12)]
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    # The promises are wide: what is shown is the protocol, not how fast this machine is.
    words = ["--url", server.url, "--trace", str(trace), "--unit", "ms", "--rate", "2", "--seconds", "5"]
    words += ["--ttft", "300", "--tbt", "60", "--max-lag", "60", "--clients", "1", "--out", str(tmp_path / "out")]
    assert serve.main(words) == 0
    report = json.loads((tmp_path / "out/report.json").read_text())
    (point,) = report["points"]
    assert report["settings"]["model"] == "smollm2-135m-instruct"
    assert report["settings"]["vocab_size"] == 49152  # from the served folder
    assert report["settings"]["max_model_len"] == 2048
    assert point["score"]["faults"] == {}
    assert point["score"]["compliant"] == point["score"]["counted"] == 9
