"""From a `Store` to Ray's metrics agent, once a second, from a thread of its own.

Ray's metrics API costs some 6 us a call, so nothing calls it for a token or an iteration. Counters go through Ray's
counters, as the increase since the last time. Histograms do not go through Ray's histograms: its agent rebuilds them
from bucket midpoints, observation by observation, so that sums are wrong and a busy ingress would keep it busy. They
go out as the series a histogram consists of (`_bucket` with `le`, `_sum`, `_count`), which every query reads alike. The
price: a scrape while the agent takes new values in sees buckets of two moments.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from ray.util.metrics import Counter, Gauge

from conflux_ray.metrics.definitions import COMMON_LABELS, Kind, Metric
from conflux_ray.metrics.store import Store

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 1.0
"""No use in more often: Ray's own report interval is ten seconds, and at least one."""


class RayExporter:
    """Exports a store until it is closed.

    Args:
        store: the values.
        refresh: called before each export, in the exporting thread, for what is sampled rather than counted.
    """

    def __init__(self, store: Store, refresh: Callable[[], None] = lambda: None) -> None:
        self._store = store
        self._refresh = refresh
        self._instruments: dict[str, Any] = {}
        self._exported: dict[tuple[Metric, tuple[str, ...]], float] = {}
        self._stop = threading.Event()
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="conflux-metrics", daemon=True)

    def start(self) -> None:
        """Begin to export."""
        self._thread.start()

    def close(self) -> None:
        """Export a last time and stop."""
        self._stop.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(5.0)

    def flush(self) -> None:
        """Export everything now."""
        self._refresh()
        store = self._store
        for metric, labels, value in store.values():
            tags = store.labels(metric, labels)
            if metric.kind is Kind.COUNTER:
                self._increase(metric, labels, value.value, tags)
            else:
                self._gauge(metric.name, metric).set(value.value, tags)
        for metric, labels, distribution in store.distributions():
            tags = store.labels(metric, labels)
            buckets, total = distribution.cumulative()
            bucket = self._gauge(f"{metric.name}_bucket", metric, "le")
            for bound, count in buckets:
                bucket.set(count, {**tags, "le": bound})
            self._gauge(f"{metric.name}_sum", metric).set(total, tags)
            self._gauge(f"{metric.name}_count", metric).set(buckets[-1][1], tags)

    def _increase(self, metric: Metric, labels: tuple[str, ...], now: float, tags: dict[str, str]) -> None:
        counter = self._instruments.get(metric.name)
        if counter is None:
            counter = self._instruments[metric.name] = Counter(
                metric.name, metric.help, tag_keys=(*COMMON_LABELS, *metric.labels)
            )
        before = self._exported.get((metric, labels))
        if before is None:
            # `inc` takes no zero, and Prometheus counts no increase in a series' first sample.
            counter._record(0.0, tags)
            before = 0.0
        if now > before:
            counter.inc(now - before, tags)
        self._exported[metric, labels] = now

    def _gauge(self, name: str, metric: Metric, *more: str) -> Gauge:
        gauge = self._instruments.get(name)
        if gauge is None:
            gauge = self._instruments[name] = Gauge(name, metric.help, tag_keys=(*COMMON_LABELS, *metric.labels, *more))
        return gauge

    def _run(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            self._try()
        self._try()

    def _try(self) -> None:
        try:
            self.flush()
            self._failed = False
        except Exception:
            if not self._failed:  # once, not every second; serving goes on without metrics
                logger.exception("metrics could not be exported; trying again")
            self._failed = True
