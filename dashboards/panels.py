"""The few words dashboards are written in: a dashboard is rows of panels, a panel is queries with a unit.

Queries use the names that Ray's metrics agent exports. `$model`, `$cluster` and `$slo_class` select; `by` keeps the
cluster and the model apart, so that two deployments in one Prometheus never add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from grafana_foundation_sdk.builders import common, prometheus, stat, timeseries
from grafana_foundation_sdk.builders import dashboard as builders
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models

from conflux_ray.metrics import definitions as m
from conflux_ray.metrics.definitions import Metric

__all__ = ["Dashboard", "JSONEncoder", "Panel", "Query", "Row", "by", "quantile", "rate", "ratio", "select"]

SCHEMA_VERSION = 41
"""Of Grafana 11.6 dashboards."""

RATE = "$__rate_interval"
CLUSTER_LABEL = "ray_io_cluster"
"""KubeRay's PodMonitor puts it on; without it the label is empty and everything still matches."""

_SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
_GREEN, _ORANGE, _RED = "green", "orange", "red"


def select(metric: Metric, suffix: str = "", **labels: str) -> str:
    """A selector of a metric under the dashboard's variables.

    Args:
        metric: of `conflux_ray.metrics.definitions`.
        suffix: of a histogram's part, e.g. "_bucket".
        labels: values to match exactly.
    """
    matchers = [f'{CLUSTER_LABEL}=~"$cluster"', 'model=~"$model"']
    if "slo_class" in metric.labels:
        matchers.append('slo_class=~"$slo_class"')
    matchers += [f'{name}="{value}"' for name, value in labels.items()]
    return f"{metric.ray_name}{suffix}{{{', '.join(matchers)}}}"


def rate(metric: Metric, suffix: str = "", window: str = RATE, **labels: str) -> str:
    """Per-second increase of a counter."""
    return f"rate({select(metric, suffix, **labels)}[{window}])"


def by(expression: str, *labels: str, how: str = "sum") -> str:
    """Aggregate, keeping `labels`."""
    return f"{how} by ({', '.join(labels)}) ({expression})" if labels else f"{how}({expression})"


def ratio(part: str, whole: str) -> str:
    """A quotient that has no value, rather than NaN, where there is nothing to divide by."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, metric: Metric, *labels: str) -> str:
    """A quantile of a histogram over the rate interval."""
    return f"histogram_quantile({q}, {by(rate(metric, '_bucket'), 'le', *labels)})"


@dataclass(frozen=True)
class Query:
    """One line, or one family of lines, of a panel.

    Args:
        expression: PromQL.
        legend: Grafana's legend format.
        empty_until: the event that fills it, if a healthy server under load has no data for it.
        dashed: drawn dashed and without fill: a target.
    """

    expression: str
    legend: str
    empty_until: str = ""
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel.

    Args:
        title, description: for the reader.
        queries: what it shows.
        unit: Grafana's name of the unit.
        kind: "timeseries" or "stat".
        width: of 24 columns.
        stacked: pile the lines up.
        thresholds: (value, colour) above which a value has the colour; below the first it is `base`.
        base: colour below all thresholds.
        least, most: ends of the axis.
    """

    title: str
    description: str
    queries: Sequence[Query]
    unit: str
    kind: str = "timeseries"
    width: int = 8
    stacked: bool = False
    thresholds: Sequence[tuple[float, str]] = ()
    base: str = _GREEN
    least: float | None = 0
    most: float | None = None

    def build(self, number: int) -> Any:
        """As the SDK's builder; `number` is the panel's id in its dashboard."""
        panel: Any = timeseries.Panel() if self.kind == "timeseries" else stat.Panel()
        panel = (
            panel.id(number)
            .title(self.title)
            .description(self.description)
            .datasource(_SOURCE)
            .unit(self.unit)
            .span(self.width)
            .height(4 if self.kind == "stat" else 8)
        )
        steps = [
            models.Threshold(None, self.base),
            *(models.Threshold(value, color) for value, color in self.thresholds),
        ]
        panel.thresholds(builders.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
        if self.least is not None:
            panel.min(self.least)
        if self.most is not None:
            panel.max(self.most)
        for letter, query in zip("ABCDEFGH", self.queries, strict=False):
            target = prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(letter)
            panel.with_target((target.instant() if self.kind == "stat" else target.range()).datasource(_SOURCE))
            if query.dashed:
                panel.override_by_query(
                    letter,
                    [
                        models.DynamicConfigValue("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}),
                        models.DynamicConfigValue("custom.fillOpacity", 0),
                    ],
                )
        return self._stat(panel) if self.kind == "stat" else self._timeseries(panel)

    def _timeseries(self, panel: timeseries.Panel) -> timeseries.Panel:
        legend = common.VizLegendOptions().display_mode(common_models.LegendDisplayMode.LIST).show_legend(True)
        panel.legend(legend.placement(common_models.LegendPlacement.BOTTOM))
        panel.tooltip(common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI))
        panel.line_width(2).fill_opacity(60 if self.stacked else 8).show_points(common_models.VisibilityMode.NEVER)
        if self.stacked:
            panel.stacking(common.StackingConfig().mode(common_models.StackingMode.NORMAL).group("A"))
        if self.thresholds:
            style = common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
            panel.thresholds_style(style)
        return panel

    def _stat(self, panel: stat.Panel) -> stat.Panel:
        panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        panel.color_mode(common_models.BigValueColorMode.VALUE).graph_mode(common_models.BigValueGraphMode.NONE)
        return panel.text_mode(common_models.BigValueTextMode.VALUE_AND_NAME)


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: Sequence[Panel]


@dataclass(frozen=True)
class Dashboard:
    """A dashboard; `uid` is its file name and stays the same for ever."""

    uid: str
    title: str
    description: str
    rows: Sequence[Row]
    variables: Sequence[tuple[str, Metric]] = field(default_factory=tuple)  # more of them: label, where to find it

    @property
    def panels(self) -> list[Panel]:
        """All panels, in order."""
        return [panel for row in self.rows for panel in row.panels]

    def build(self) -> models.Dashboard:
        """As the SDK's model."""
        board = (
            builders.Dashboard(self.title)
            .uid(self.uid)
            .description(self.description)
            .tags(["conflux"])
            .readonly()
            .tooltip(models.DashboardCursorSync.CROSSHAIR)
            .refresh("30s")
            .time("now-1h", "now")
            .timezone("browser")
            .with_variable(
                builders.DatasourceVariable("datasource")
                .label("Prometheus")
                .type("prometheus")
                .current(models.VariableOption(False, "default", "default"))
            )
        )
        for label, metric in ((CLUSTER_LABEL, m.SLO_OBJECTIVE), ("model", m.SLO_OBJECTIVE), *self.variables):
            board.with_variable(_variable(label, metric))
        board.link(
            builders.DashboardLink("Conflux dashboards")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["conflux"])
            .as_dropdown(True)
            .keep_time(True)
            .include_vars(True)
        )
        number = 0
        for row in self.rows:
            number += 1
            board.with_row(builders.Row(row.title).id(number))
            for panel in row.panels:
                number += 1
                board.with_panel(panel.build(number))
        built = board.build()
        built.schema_version = SCHEMA_VERSION
        return built


def _variable(label: str, metric: Metric) -> builders.QueryVariable:
    name = "cluster" if label == CLUSTER_LABEL else label
    return (
        builders.QueryVariable(name)
        .label(name.replace("_", " "))
        .datasource(_SOURCE)
        .query({"query": f"label_values({metric.ray_name}, {label})", "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(True, ["All"], ["$__all"]))
    )
