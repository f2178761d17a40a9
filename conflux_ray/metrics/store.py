"""Values of one process's metrics in plain Python: an increment is an addition, an observation a bisection.

Nothing here exports. One thread counts; others may read at any time and see values at most one update old.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from conflux_ray.metrics.definitions import LABEL_VALUES, Kind, Metric

MAX_SERIES = 256
"""Most label sets of one metric in one process; what comes later is counted under `OTHER`."""

OTHER = "other"


class Value:
    """A counter's or gauge's value. Writing to `value` is the whole interface."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0


class Distribution:
    """A histogram's value.

    Args:
        bounds: upper bounds of the buckets, ascending; one more bucket is unbounded.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = list(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> tuple[list[tuple[str, int]], float]:
        """(`le`, count up to it) of every bucket, the last one being +Inf, and the sum of all values."""
        total, counts = self.total, list(self.counts)
        names = [*map(format_bound, self.bounds), "+Inf"]
        return list(zip(names, itertools.accumulate(counts), strict=True)), total


def format_bound(bound: float) -> str:
    """A bucket's bound as its `le` label."""
    return repr(float(bound))


class Store:
    """The metrics of one process.

    Args:
        common: values of `definitions.COMMON_LABELS`.
        buckets: more bounds for some histograms: the deployment's SLO values.
    """

    def __init__(self, common: Mapping[str, str], buckets: Mapping[Metric, Iterable[float]] | None = None) -> None:
        self.common = dict(common)
        self._buckets = {metric: tuple(values) for metric, values in (buckets or {}).items()}
        self._values: dict[Metric, dict[tuple[str, ...], Value]] = {}
        self._distributions: dict[Metric, dict[tuple[str, ...], Distribution]] = {}

    def value(self, metric: Metric, *labels: str) -> Value:
        """The counter or gauge with these values of `metric.labels`; made at zero when first asked for.

        Raises:
            ValueError: it is a histogram, or the labels are not those of its definition.
        """
        if metric.kind is Kind.HISTOGRAM:
            raise ValueError(f"{metric.name} is a histogram; use `distribution`")
        series = self._values.setdefault(metric, {})
        found = series.get(labels)
        if found is None:
            labels = self._bounded(metric, labels, len(series))
            found = series.setdefault(labels, Value())
        return found

    def distribution(self, metric: Metric, *labels: str) -> Distribution:
        """The histogram with these values of `metric.labels`; made empty when first asked for.

        Raises:
            ValueError: it is no histogram, or the labels are not those of its definition.
        """
        if metric.kind is not Kind.HISTOGRAM:
            raise ValueError(f"{metric.name} is no histogram; use `value`")
        series = self._distributions.setdefault(metric, {})
        found = series.get(labels)
        if found is None:
            labels = self._bounded(metric, labels, len(series))
            found = series.setdefault(labels, Distribution(self.bounds(metric)))
        return found

    def bounds(self, metric: Metric) -> list[float]:
        """Upper bounds of a histogram's buckets in this process."""
        return sorted({*metric.buckets, *self._buckets.get(metric, ())})

    def replace(self, metric: Metric, values: Mapping[tuple[str, ...], float]) -> None:
        """Make exactly these the series of a gauge: what is gone disappears."""
        if metric.kind is not Kind.GAUGE:
            raise ValueError(f"{metric.name} is no gauge; only a gauge's series may disappear")
        series: dict[tuple[str, ...], Value] = {}
        for labels, number in values.items():
            key = self._bounded(metric, labels, len(series))
            series.setdefault(key, Value()).value += number
        self._values[metric] = series

    def start(self, metric: Metric, **known: Sequence[str]) -> None:
        """Make every series of a metric whose labels are known, at zero: Prometheus sees no increase in a first sample.

        Args:
            known: values of the labels that `LABEL_VALUES` does not list.
        """
        choices = [known.get(label) or LABEL_VALUES[label] for label in metric.labels]
        for labels in itertools.product(*choices):
            (self.distribution if metric.kind is Kind.HISTOGRAM else self.value)(metric, *labels)

    def values(self) -> Iterator[tuple[Metric, tuple[str, ...], Value]]:
        """Every counter and gauge."""
        for metric, series in list(self._values.items()):
            for labels, value in list(series.items()):
                yield metric, labels, value

    def distributions(self) -> Iterator[tuple[Metric, tuple[str, ...], Distribution]]:
        """Every histogram."""
        for metric, series in list(self._distributions.items()):
            for labels, value in list(series.items()):
                yield metric, labels, value

    def labels(self, metric: Metric, values: Sequence[str]) -> dict[str, str]:
        """All labels of a series by name."""
        return {**self.common, **dict(zip(metric.labels, values, strict=True))}

    @staticmethod
    def _bounded(metric: Metric, labels: tuple[str, ...], series: int) -> tuple[str, ...]:
        if len(labels) != len(metric.labels):
            raise ValueError(f"{metric.name} has labels {metric.labels}, got {labels}")
        return labels if series < MAX_SERIES else (OTHER,) * len(labels)
