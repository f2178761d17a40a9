"""Instances come under load and go when it is over, and no request notices."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest

from conflux_ray.models import store
from conflux_ray.models.reference import Reference
from tests.e2e.server import Server, running, wait_for
from tests.e2e.tiny import Stream

pytestmark = pytest.mark.heavy

AUTOSCALING = {"max_replicas": 2, "target_queued_s": 0.2, "upscale_delay_s": 1, "downscale_delay_s": 3}


class Load:
    """Clients that send one long prompt after the other until they are told to stop."""

    def __init__(self, server: Server, clients: int) -> None:
        self._url = f"{server.url}/v1/completions"
        self._stop = threading.Event()
        self.statuses: list[int | str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        body = {"model": "tiny", "prompt": [5 + number] * 1000, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
        while not self._stop.is_set():
            try:
                self.statuses.append(httpx.post(self._url, json=body, timeout=120).status_code)
            except httpx.HTTPError as error:
                self.statuses.append(repr(error))


def test_an_instance_comes_under_load_and_goes_again_and_no_request_notices(tmp_path: Path) -> None:
    changes = {
        # The instance that goes may not wait for its streams: they have to go on at the other one.
        "instance": {"num_replicas": 1, "autoscaling": AUTOSCALING, "drain_timeout_s": 1},
        "model": {"served_model_name": "tiny"},
    }
    with running(tmp_path, 18400, deployment="two-instances.yaml", **changes) as server:
        assert len(server.all_stats(2)) == 1
        with Load(server, clients=24) as load:
            wait_for(lambda: len(server.all_stats(2)) == 2, 150, lambda: "no second instance")
        assert set(load.statuses) == {200}
        # Long enough to be under way, on both, when one of them is told to go.
        streams = [Stream(server, [7 + i, 8, 9, 10], 900) for i in range(4)]
        for stream in streams:
            stream.start()
        reference = Reference(store.model_dir("tiny-llama"))
        wait_for(lambda: len(server.all_stats(2)) == 1, 150, lambda: "both instances stay")
        for stream in streams:
            stream.join(150)
            assert stream.error is None, stream.error
            assert stream.tokens == reference.greedy(stream.body["prompt"], 900)
        server.wait_idle()
