"""Goodput by hand: every deadline and every outcome is a literal of the test."""

from __future__ import annotations

import pytest

from conflux_ray.metrics import definitions as m
from conflux_ray.metrics.ingress import IngressMetrics, RequestRecord
from conflux_ray.wire import FinishReason, Slo

CLASSES = {"default": Slo(2.0, 0.5), "chat": Slo(1.0, 0.1, "chat")}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Ingress:
    """An ingress whose clock the test turns. Requests arrive at 100."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.metrics = IngressMetrics("tiny", "ingress-1", CLASSES, 0.99, self.clock)

    def request(self, tokens: list[float], slo: Slo | None = None, choices: int = 1) -> RequestRecord:
        """A request whose tokens come at these times after its arrival; every choice gets the same."""
        self.clock.now = 100.0
        slo = slo or CLASSES["default"]
        record = self.metrics.arrived("/v1/completions")
        made = [self.metrics.submitted(record, slo, 7) for _ in range(choices)]
        record.status = 200
        for at in tokens:
            self.clock.now = 100.0 + at
            for choice in made:
                choice.took(1, self.clock.now)
        return record

    def end(self, record: RequestRecord) -> tuple[str, str]:
        """End it; returns its outcome, and "goodput", the kind of its miss, or "" for neither."""
        before = self._counts(record.slo.slo_class)
        self.metrics.ended(record)
        after = self._counts(record.slo.slo_class)
        changed = [name for name in after if after[name] != before[name]]
        outcome = next(name for kind, name in changed if kind == "outcome")
        return outcome, next((name for kind, name in changed if kind != "outcome"), "")

    def _counts(self, name: str) -> dict[tuple[str, str], float]:
        store = self.metrics.store
        return (
            {("outcome", o): store.value(m.REQUESTS, name, o).value for o in m.OUTCOMES}
            | {("miss", k): store.value(m.SLO_MISSES, name, k).value for k in m.MISSES}
            | {("goodput", "goodput"): store.value(m.GOODPUT, name).value}
        )


@pytest.mark.parametrize(
    ("tokens", "result"),
    [
        ([2.0, 2.5, 3.0], "goodput"),  # each on its very deadline
        ([0.1, 2.4, 2.5], "goodput"),  # a gap of 2.3 s, but token 2 is due at 2.5: early tokens lend time to later ones
        ([2.1, 2.2, 2.3], "ttft"),
        ([1.9, 2.6, 2.7], "tbt"),  # token 2 is due at 2.5
        ([1.9, 2.4, 3.1], "tbt"),
        ([2.1, 9.9], "ttft"),  # the first thing that went wrong
    ],
)
def test_every_token_has_a_deadline_of_its_own(tokens: list[float], result: str) -> None:
    ingress = Ingress()
    assert ingress.end(ingress.request(tokens)) == ("completed", result)


def test_a_class_has_its_own_promises_and_its_own_series() -> None:
    ingress = Ingress()
    assert ingress.end(ingress.request([1.5], CLASSES["chat"])) == ("completed", "ttft")
    assert ingress.end(ingress.request([1.5])) == ("completed", "goodput")
    assert ingress.metrics.store.value(m.REQUESTS, "chat", "completed").value == 1


def test_promises_in_a_request_win_over_those_of_its_class() -> None:
    ingress = Ingress()
    assert ingress.end(ingress.request([1.5], Slo(1.4, 0.5))) == ("completed", "ttft")


def test_tokens_that_come_together_are_judged_by_the_first_of_them() -> None:
    ingress = Ingress()
    record = ingress.request([1.0])
    record.choices[0].took(5, 102.6)  # tokens 2 to 6; 2 was due at 102.5
    assert record.choices[0].miss == "tbt"
    assert sum(ingress.metrics.store.distribution(m.TBT, "default").counts) == 5


def test_one_late_choice_makes_the_request_late() -> None:
    ingress = Ingress()
    record = ingress.request([1.0], choices=2)
    record.choices[1].took(1, 103.0)
    assert ingress.end(record) == ("completed", "tbt")
    assert ingress.metrics.store.value(m.REQUESTS, "default", "completed").value == 1


@pytest.mark.parametrize(
    ("status", "outcome", "miss"),
    [
        (400, "invalid", ""),
        (404, "invalid", ""),
        (429, "overloaded", "overloaded"),
        (503, "unavailable", "unavailable"),
        (500, "failed", "failed"),
        (None, "failed", "failed"),  # the application raised before it answered
    ],
)
def test_requests_that_are_not_served_are_misses_unless_they_were_wrong(
    status: int | None, outcome: str, miss: str
) -> None:
    ingress = Ingress()
    record = ingress.metrics.arrived("/v1/chat/completions")
    record.status = status
    assert ingress.end(record) == (outcome, miss)


@pytest.mark.parametrize(
    ("reason", "outcome"),
    [
        (FinishReason.ERROR, "failed"),
        (FinishReason.REJECTED, "unavailable"),
        (FinishReason.OVERLOADED, "overloaded"),
        (FinishReason.STOP, "completed"),
        (FinishReason.LENGTH, "completed"),
    ],
)
def test_a_stream_ends_as_its_engine_ended_it(reason: FinishReason, outcome: str) -> None:
    ingress = Ingress()
    record = ingress.request([1.0])
    record.choices[0].ended(reason)
    assert ingress.end(record)[0] == outcome


@pytest.mark.parametrize(
    ("tokens", "leaves", "miss"),
    [
        ([], 1.9, ""),  # nothing was due yet
        ([], 2.1, "ttft"),
        ([1.0], 2.4, ""),
        ([1.0], 2.6, "tbt"),
    ],
)
def test_a_client_that_leaves_counts_only_if_it_waited_too_long(tokens: list[float], leaves: float, miss: str) -> None:
    ingress = Ingress()
    record = ingress.request(tokens)
    record.left = True
    ingress.clock.now = 100.0 + leaves
    assert ingress.end(record) == ("aborted", miss)


def test_a_choice_that_has_ended_is_not_late_when_the_client_leaves_during_another() -> None:
    ingress = Ingress()
    record = ingress.request([1.0], choices=2)
    record.choices[0].ended(FinishReason.STOP)
    ingress.clock.now = 104.0
    record.choices[1].tokens = 10  # its next token is due at 107
    record.left = True
    assert ingress.end(record) == ("aborted", "")


def test_other_paths_do_not_count() -> None:
    ingress = Ingress()
    record = ingress.metrics.arrived("/tokenize")
    record.status = 200
    ingress.metrics.ended(record)
    assert all(ingress.metrics.store.value(m.REQUESTS, "default", o).value == 0 for o in m.OUTCOMES)


def test_buckets_have_the_promises_of_the_deployment() -> None:
    classes = {"default": Slo(0.777, 0.033)}
    store = IngressMetrics("tiny", "i", classes).store
    assert 0.777 in store.bounds(m.TTFT)
    assert 0.777 in store.bounds(m.E2E)
    assert 0.033 in store.bounds(m.TBT)
    assert store.value(m.SLO_TARGET, "default", "tbt").value == 0.033


def test_every_series_of_known_labels_starts_at_zero() -> None:
    store = Ingress().metrics.store
    series = {(metric, labels) for metric, labels, _ in store.values()}
    assert (m.SLO_MISSES, ("chat", "overloaded")) in series
    assert (m.MIGRATED, ("instance_lost",)) in series
