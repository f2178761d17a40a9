"""One turn of an instance's iteration thread while the next iteration is not due yet."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conflux_ray.cluster import instance as module
from conflux_ray.cluster.instance import Instance

pytestmark = pytest.mark.heavy


class Endpoint:
    def __init__(self) -> None:
        self.reports: list[str] = []

    def poll(self, timeout: float) -> list[Any]:
        assert timeout <= 0.002  # an iteration that ends early is noticed
        return []

    def publish(self, messages: dict[str, Any], load: str) -> None:
        assert messages == {}
        self.reports.append(load)


def test_ingresses_hear_of_an_instance_whose_iterations_give_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    made = SimpleNamespace(_ending=False, _drain=False, _published=0.0, _to_wire=lambda outputs: {})
    made._engine = SimpleNamespace(has_work=True, timings=[])
    made._loop = SimpleNamespace(pause=lambda: 0.08, step=list)  # prefill alone: one runs, the next one is not due
    made._endpoint = endpoint = Endpoint()
    made._meter = SimpleNamespace(observe=lambda timings: None, report=lambda draining, closing: "load")
    made._metrics = SimpleNamespace(sample=lambda load, now: None)
    for _ in range(500):  # a second of turns of 2 ms
        Instance._turn(made)  # type: ignore[arg-type]
        now[0] += 0.002
    assert 15 <= len(endpoint.reports) <= 25
    assert made._last_progress == pytest.approx(now[0] - 0.002)
