"""`conflux serve` ends like a good citizen: SIGTERM lets streams run to their end and refuses new requests."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import httpx
import pytest

from conflux_ray.models import store
from tests.e2e.server import stop, wait_for
from tests.e2e.tiny import leftovers, start_stream, tiny_server

pytestmark = pytest.mark.heavy


def test_sigterm_in_mid_stream_cuts_no_stream_and_refuses_new_requests(tmp_path: Path) -> None:
    from conflux_ray.models.reference import Reference

    before = leftovers()
    with tiny_server(tmp_path, 18300, launcher=True) as server:
        log = server.log.read_text(errors="replace")
        for step in ("starting 2 workers", "weights loaded", "ready: "):  # what somebody who waits sees
            assert re.search(rf"\[ *[0-9.]+ s\] {step}", log), step
        stream = start_stream(server, max_tokens=900)
        server.signal(signal.SIGTERM)
        refused: list[httpx.Response] = []

        def refuses() -> bool:
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1}
            answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
            if answer.status_code != 200:
                refused.append(answer)
            return bool(refused)

        wait_for(refuses, 30)
        assert not stream.done, "the stream was too short to show anything"
        assert refused[0].status_code == 503
        assert refused[0].headers["retry-after"]
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 503
        stream.join(120)
        assert stream.error is None, stream.error
        assert stream.done
        assert stream.tokens == Reference(store.model_dir("tiny-llama")).greedy([7, 8, 9, 10], 900)
        server.process.wait(90)
        assert stop(server) == []
    wait_for(lambda: leftovers() <= before, 20, lambda: f"left behind: {leftovers() - before}")
