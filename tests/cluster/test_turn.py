"""One turn of an instance's iteration thread while the next iteration is not due yet, and what it turns away."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from conflux_ray.cluster import instance as module
from conflux_ray.cluster.instance import Instance
from conflux_ray.config import LimitsConfig
from conflux_ray.execution.request import Request
from conflux_ray.wire import AddRequest, FinishReason, RequestOutput, Sampling
from conflux_ray.wire import Slo as SloOfRequest

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


def arriving(made: SimpleNamespace, **fields: Any) -> RequestOutput | None:
    """What the instance says at once to a new request."""
    message = AddRequest(
        "r", 0, [1] * 100, Sampling(max_tokens=5, temperature=0.0), SloOfRequest(2.0, 0.1), **{"age_s": 0.5, **fields}
    )
    return Instance._add(made, "peer", message)  # type: ignore[arg-type]


def instance_with(limits: LimitsConfig) -> SimpleNamespace:
    """As much of an instance as a new request meets; `asked` has the requests whose chances it was asked for."""
    asked: list[tuple[Request, float]] = []

    def can_meet(request: Request, now: float) -> bool:
        asked.append((request, now))
        return request.priority < 0

    return SimpleNamespace(
        asked=asked,
        _ending=False,
        _drain=False,
        _requests={},
        _config=SimpleNamespace(limits=limits),
        _loop=SimpleNamespace(clock=lambda: 7.0),
        _meter=SimpleNamespace(can_meet=can_meet),
        _engine=SimpleNamespace(add=lambda request: None),
        _refusal=Instance._refusal,
    )


def test_a_hopeless_request_is_refused_where_that_is_asked_for() -> None:
    made = instance_with(LimitsConfig(reject_hopeless=True))
    refusal = arriving(made)
    assert refusal is not None
    assert refusal.finish_reason is FinishReason.OVERLOADED
    ((request, now),) = made.asked
    assert (now, request.arrival, request.deadline, len(request.prompt)) == (7.0, 6.5, 8.5, 100)
    assert arriving(made, priority=-1) is None
    assert arriving(made, output_token_ids=[4]) is None  # it has begun elsewhere
    assert len(made.asked) == 2
    usual = instance_with(LimitsConfig())
    assert arriving(usual) is None
    assert not usual.asked


def test_an_instance_that_goes_refuses_and_one_that_is_drained_with_all_others_does_not() -> None:
    made = instance_with(LimitsConfig())
    made._drain = True
    assert arriving(made) is None
    made._ending = True
    refusal = arriving(made)
    assert refusal is not None
    assert refusal.finish_reason is FinishReason.REJECTED
