"""Values in plain Python, and the text that a scrape gets."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from conflux_ray.metrics import definitions as m
from conflux_ray.metrics.definitions import Kind, Metric
from conflux_ray.metrics.exposition import render
from conflux_ray.metrics.store import MAX_SERIES, OTHER, Store

COMMON = {"model": "tiny", "replica": "ingress-1"}


def samples(text: bytes) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def key(name: str, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset({**COMMON, **labels}.items())


def test_counts_and_distributions_come_out_as_they_went_in() -> None:
    store = Store(COMMON, {m.TTFT: [0.123]})
    store.value(m.GOODPUT, "chat").value += 3
    for seconds in (0.01, 0.123, 0.2, 999.0):
        store.distribution(m.TTFT, "chat").observe(seconds)
    found = samples(render(store))
    assert found[key("conflux_goodput_requests_total", slo_class="chat")] == 3
    assert found[key("conflux_ttft_seconds_bucket", slo_class="chat", le="0.1")] == 1
    assert found[key("conflux_ttft_seconds_bucket", slo_class="chat", le="0.123")] == 2
    assert found[key("conflux_ttft_seconds_bucket", slo_class="chat", le="0.2")] == 3
    assert found[key("conflux_ttft_seconds_bucket", slo_class="chat", le="+Inf")] == 4
    assert found[key("conflux_ttft_seconds_count", slo_class="chat")] == 4
    assert found[key("conflux_ttft_seconds_sum", slo_class="chat")] == pytest.approx(999.333)


def test_what_other_libraries_count_gets_the_replica_too() -> None:
    registry = CollectorRegistry()
    Counter("vllm:requests", "x", ["model_name"], registry=registry).labels("tiny").inc()
    found = samples(render(Store(COMMON), registry))  # type: ignore[arg-type]
    labels = frozenset({"replica": "ingress-1", "model_name": "tiny"}.items())
    assert found["vllm:requests_total", labels] == 1


def test_unknown_label_values_make_no_more_series_than_the_limit() -> None:
    store = Store(COMMON)
    for number in range(2000):
        store.value(m.GOODPUT, f"class-{number}").value += 1
    series = {labels: value.value for metric, labels, value in store.values() if metric is m.GOODPUT}
    assert len(series) == MAX_SERIES + 1
    assert series[OTHER,] == 2000 - MAX_SERIES
    assert sum(series.values()) == 2000


def test_a_gauge_forgets_what_is_gone() -> None:
    store = Store(COMMON)
    store.replace(m.ROUTER_REQUESTS, {("a",): 1, ("b",): 2})
    store.replace(m.ROUTER_REQUESTS, {("b",): 3})
    assert [(labels, value.value) for _, labels, value in store.values()] == [(("b",), 3)]


def test_mistakes_are_refused() -> None:
    store = Store(COMMON)
    with pytest.raises(ValueError, match="has labels"):
        store.value(m.GOODPUT)
    with pytest.raises(ValueError, match="is a histogram"):
        store.value(m.TTFT, "chat")
    with pytest.raises(ValueError, match="only a gauge"):
        store.replace(m.GOODPUT, {("chat",): 1})
    with pytest.raises(ValueError, match="end in _total"):
        Metric("conflux_x", Kind.COUNTER, "x", "x", "ingress")


def test_names_are_unique_and_bounded_labels_are_known() -> None:
    metrics = list(m.all_metrics())
    assert len({metric.name for metric in metrics}) == len(metrics)
    known = {"slo_class", "rank", "gpu", "instance_id", "holder", *m.LABEL_VALUES}
    assert {label for metric in metrics for label in metric.labels} <= known
