"""Instances come under load and go when it is over, and no request notices; two ingresses share them."""

from __future__ import annotations

import threading
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from conflux_ray.metrics.definitions import OUTPUT_TOKENS
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


def tokens_of_ingresses(server: Server) -> dict[str, float]:
    """Tokens that each ingress gave; a connection reaches one or the other."""
    served: dict[str, float] = {}
    for _ in range(20):
        for family in text_string_to_metric_families(httpx.get(f"{server.url}/metrics", timeout=30).text):
            if f"{family.name}_total" == OUTPUT_TOKENS.name:
                for sample in family.samples:
                    if sample.name == OUTPUT_TOKENS.name:
                        served[sample.labels["replica"]] = sample.value
    return served


def test_an_instance_comes_under_load_and_goes_again_and_no_request_notices(tmp_path: Path) -> None:
    changes = {
        # The instance that goes may not wait for its streams: they have to go on at the other one.
        "instance": {"num_replicas": 1, "autoscaling": AUTOSCALING, "drain_timeout_s": 1},
        "model": {"served_model_name": "tiny"},
        "ingress": {"num_replicas": 2},
    }
    with running(tmp_path, 18400, deployment="two-instances.yaml", **changes) as server:
        assert len(server.all_stats(2)) == 1
        with Load(server, clients=24) as load:
            wait_for(lambda: len(server.all_stats(2)) == 2, 150, lambda: "no second instance")
        assert set(load.statuses) == {200}
        finished: list[Stream] = []
        gone = threading.Event()

        def stream_on(number: int) -> None:
            """One long stream after the other, so that some are under way when an instance is told to go."""
            while not gone.is_set():
                stream = Stream(server, [7 + number, 8, 9, 10], 900)
                stream.run()
                finished.append(stream)

        threads = [threading.Thread(target=stream_on, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: len(server.all_stats(2)) == 1, 150, lambda: "both instances stay")
        finally:
            gone.set()
        for thread in threads:
            thread.join(150)
        reference = Reference(store.model_dir("tiny-llama"))
        for stream in finished:
            assert stream.error is None, stream.error
            assert stream.tokens == reference.greedy(stream.body["prompt"], 900)
        served = tokens_of_ingresses(server)
        assert len(served) == 2
        assert min(served.values()) > 0, f"one ingress served everything: {served}"
        assert "moves from instance" in server.log.read_text(errors="replace"), "no stream was under way"
        server.wait_idle()
