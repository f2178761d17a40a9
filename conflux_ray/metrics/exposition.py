"""`/metrics` of one process, in Prometheus's text format, by prometheus-client.

Behind a load balancer a scrape reaches one of several ingress replicas, another one each time. Without more, a counter
would seem to run backwards. So every series, vLLM's included, carries the label `replica`: each is of one process and
only grows. To see all replicas at every scrape, scrape Ray's metrics agents (`dashboards/prometheus.yml`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Metric as PrometheusMetric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from conflux_ray.metrics.definitions import COMMON_LABELS, Kind, Metric
from conflux_ray.metrics.store import Store

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class StoreCollector(Collector):
    """A store as prometheus-client sees it.

    Args:
        store: the values.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[PrometheusMetric]:
        """Every metric that has a series."""
        families: dict[Metric, PrometheusMetric] = {}
        for metric, labels, value in self._store.values():
            if metric not in families:
                kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
                families[metric] = kind(metric.name, metric.help, labels=(*COMMON_LABELS, *metric.labels))
            families[metric].add_metric(self._label_values(labels), value.value)  # type: ignore[attr-defined]
        for metric, labels, distribution in self._store.distributions():
            if metric not in families:
                families[metric] = HistogramMetricFamily(
                    metric.name, metric.help, labels=(*COMMON_LABELS, *metric.labels)
                )
            buckets, total = distribution.cumulative()
            families[metric].add_metric(self._label_values(labels), buckets, total)  # type: ignore[attr-defined]
        yield from families.values()

    def _label_values(self, labels: tuple[str, ...]) -> list[str]:
        return [*(self._store.common[name] for name in COMMON_LABELS), *labels]


class ReplicaCollector(Collector):
    """What other collectors say, with the label `replica` on every sample that has none."""

    def __init__(self, replica: str, collectors: Iterable[Collector]) -> None:
        self._replica = replica
        self._collectors = tuple(collectors)

    def collect(self) -> Iterator[PrometheusMetric]:
        """All metrics of the collectors."""
        for collector in self._collectors:
            for family in collector.collect():
                family.samples = [
                    sample._replace(labels={"replica": self._replica, **sample.labels}) for sample in family.samples
                ]
                yield family


def render(store: Store, *others: Collector) -> bytes:
    """The text of `/metrics`: the store's metrics and those of other collectors of this process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ReplicaCollector(store.common["replica"], (StoreCollector(store), *others)))
    return generate_latest(registry)
