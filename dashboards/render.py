"""Draws a dashboard from a Prometheus, without a Grafana: every panel's data in its place, for the documentation.

    python -m dashboards.render --prometheus http://127.0.0.1:9090 --minutes 10 --out docs/img

It runs the queries of the JSON files, knows the panel types and units used there, and draws time series and stats with
their thresholds. It is no Grafana: colours and layout of a panel's inside are its own.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.dates import DateFormatter
from matplotlib.ticker import MaxNLocator

from dashboards.__main__ import DASHBOARDS, path_of

STEPS = 240
"""Points of a line."""

MAX_LEGEND = 12
_LEGEND_COLUMNS = {6: 2, 8: 4, 12: 6}  # by the width of a panel
_ROW_HEIGHT, _HEAD = 0.36, 0.8  # inches of one unit of the grid, and of the title
_COLORS = {"green": "#3a8f4d", "yellow": "#d9a400", "orange": "#e07b1f", "red": "#c4302b"}
_SCALES = {"s": [(1.0, "s"), (1e-3, "ms"), (1e-6, "us")], "bytes": [(2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")]}
_SCALES["Bps"] = [(2**30, "GiB/s"), (2**20, "MiB/s"), (2**10, "KiB/s")]
_SUFFIXES = {"reqps": " req/s", "ops": " /s", "short": "", "watt": " W"}


@dataclass(frozen=True)
class Span:
    """The time shown, seconds since the epoch."""

    start: float
    end: float

    @property
    def step(self) -> float:
        return max(1.0, (self.end - self.start) / STEPS)


def fetch(url: str, what: str, **parameters: Any) -> list[dict[str, Any]]:
    """The series that Prometheus answers with."""
    address = f"{url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
    with urllib.request.urlopen(address, timeout=60) as answer:
        return json.load(answer)["data"]["result"]


def legend(template: str, labels: dict[str, str]) -> str:
    """Grafana's legend format."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda match: labels.get(match[1], ""), template).strip()


def formatted(value: float, unit: str) -> str:
    """A value with its unit."""
    if math.isnan(value):
        return "-"
    if unit == "percentunit":
        return f"{value * 100:.4g} %"
    for scale, name in _SCALES.get(unit, ()):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {name}"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{number}{_SUFFIXES.get(unit, ' ' + unit if unit in _SCALES else '')}"


class Renderer:
    """Draws the dashboards of one Prometheus.

    Args:
        url: of Prometheus.
        span: the time shown.
        rate: for `$__rate_interval`.
    """

    def __init__(self, url: str, span: Span, rate: str) -> None:
        self._url = url
        self._span = span
        shown = f"{math.ceil(span.end - span.start)}s"
        self._variables = {"$__rate_interval": rate, "$__range": shown}

    def draw(self, board: dict[str, Any], path: Path) -> None:
        """Draw a dashboard, as its JSON has it, into a PNG."""
        panels = [panel for panel in board["panels"] if panel["type"] != "row"]
        height = max(p["gridPos"]["y"] + p["gridPos"]["h"] for p in board["panels"])
        tall_inches = height * _ROW_HEIGHT + _HEAD
        figure = plt.figure(figsize=(17, tall_inches))
        scale = 1 - _HEAD / tall_inches
        figure.text(0.01, 1 - (1 - scale) * 0.6, board["title"], fontsize=17, weight="bold", va="center")
        for panel in board["panels"]:
            at = panel["gridPos"]
            top = scale * (1 - at["y"] / height)
            if panel["type"] == "row":
                figure.text(0.01, top - scale * 0.5 / height, panel["title"], fontsize=12, weight="bold", va="center")
        for panel in panels:
            at = panel["gridPos"]
            left, width = at["x"] / 24, at["w"] / 24
            bottom, tall = scale * (1 - (at["y"] + at["h"]) / height), scale * at["h"] / height
            box = (left + 0.03, bottom + 0.17 * tall, width - 0.04, 0.66 * tall)
            if panel["type"] == "stat":
                box = (left + 0.01, bottom + 0.05 * tall, width - 0.02, 0.8 * tall)
            axes = figure.add_axes(box)
            axes.set_title(panel["title"], fontsize=10, loc="left", pad=5)
            (self._stat if panel["type"] == "stat" else self._lines)(axes, panel)
        figure.savefig(path, dpi=75, bbox_inches="tight", pad_inches=0.1)  # legends may hang out below
        plt.close(figure)

    def _filled(self, expression: str) -> str:
        for name, value in self._variables.items():
            expression = expression.replace(name, value)
        return re.sub(r"\$\w+", ".*", expression)

    def _stat(self, axes: Axes, panel: dict[str, Any]) -> None:
        axes.axis("off")
        defaults = panel["fieldConfig"]["defaults"]
        values: list[tuple[str, float]] = []
        for target in panel["targets"]:
            found = fetch(self._url, "query", query=self._filled(target["expr"]), time=self._span.end)
            values += [(legend(target["legendFormat"], s["metric"]), float(s["value"][1])) for s in found]
        if not values:
            axes.text(0.5, 0.45, "no data", ha="center", va="center", color="gray", transform=axes.transAxes)
        for number, (name, value) in enumerate(values):
            at = (number + 0.5) / len(values)
            color = "black"
            for step in defaults["thresholds"]["steps"]:
                if step["value"] is None or value >= step["value"]:
                    color = _COLORS.get(step["color"], step["color"])
            size = 20 if len(values) < 3 else 13
            text = formatted(value, defaults["unit"])
            axes.text(at, 0.55, text, ha="center", va="center", fontsize=size, color=color, transform=axes.transAxes)
            axes.text(at, 0.12, name, ha="center", va="center", fontsize=9, transform=axes.transAxes)

    def _lines(self, axes: Axes, panel: dict[str, Any]) -> None:
        defaults, span = panel["fieldConfig"]["defaults"], self._span
        stacked = defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal"
        dashed = {o["matcher"]["options"] for o in panel["fieldConfig"].get("overrides", [])}
        times = [span.start + i * span.step for i in range(int((span.end - span.start) / span.step) + 1)]
        dates = [datetime.fromtimestamp(t, UTC) for t in times]
        lines: list[tuple[str, list[float], bool]] = []
        for target in panel["targets"]:
            found = fetch(
                self._url,
                "query_range",
                query=self._filled(target["expr"]),
                start=span.start,
                end=times[-1] + 0.001,
                step=span.step,
            )
            for series in found:
                points = {round((float(t) - span.start) / span.step): float(v) for t, v in series["values"]}
                values = [points.get(i, math.nan) for i in range(len(times))]
                lines.append((legend(target["legendFormat"], series["metric"]), values, target["refId"] in dashed))
        if not lines:
            axes.text(0.5, 0.5, "no data", ha="center", va="center", color="gray", transform=axes.transAxes)
        lines.sort(key=lambda line: (line[2], line[0]))
        if stacked and lines:
            bare = [[0.0 if math.isnan(v) else v for v in values] for _, values, _ in lines]
            axes.stackplot(dates, bare, labels=[name for name, *_ in lines], alpha=0.7)
        else:
            for name, values, is_dashed in lines:
                axes.plot(dates, values, "--" if is_dashed else "-", label=name, linewidth=1.4)
        low, high = axes.get_ylim()
        low = min(low, defaults["min"]) if "min" in defaults else low
        high = max(defaults["max"] * 1.02, 0) if "max" in defaults else high
        axes.set_ylim(defaults.get("min", low), high if high > low else low + 1)
        for step in defaults["thresholds"]["steps"]:
            if step["value"] is not None and step["value"] < axes.get_ylim()[1]:
                color = _COLORS.get(step["color"], step["color"])
                axes.axhline(step["value"], color=color, linestyle=":", linewidth=1)
        axes.set_xlim(dates[0], dates[-1])
        axes.xaxis.set_major_formatter(DateFormatter("%H:%M" if span.end - span.start > 600 else "%H:%M:%S"))
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(lambda value, _: formatted(value, defaults["unit"]))
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if lines:
            shown = axes.get_legend_handles_labels()
            count = min(len(lines), MAX_LEGEND)
            axes.legend(
                shown[0][:count],
                shown[1][:count],
                fontsize=6.2,
                ncols=min(_LEGEND_COLUMNS[panel["gridPos"]["w"]], count),
                loc="upper center",
                bbox_to_anchor=(0.5, -0.13),
                frameon=False,
                handlelength=1.4,
                columnspacing=0.9,
                labelspacing=0.3,
            )


def draw_all(url: str, span: Span, folder: Path, rate: str = "1m") -> list[Path]:
    """Draw every dashboard.

    Args:
        url: of Prometheus.
        span: the time shown.
        folder: takes `dashboard-NAME.png`.
        rate: for `$__rate_interval`.

    Returns:
        The files written.
    """
    mpl.use("Agg")
    renderer = Renderer(url, span, rate)
    paths = []
    for dashboard in DASHBOARDS:
        path = folder / f"{dashboard.uid.replace('conflux', 'dashboard')}.png"
        renderer.draw(json.loads(path_of(dashboard).read_text()), path)
        paths.append(path)
    return paths


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the last minutes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--rate", default="1m", help="for $__rate_interval; at least four scrape intervals")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    now = time.time()
    for path in draw_all(args.prometheus, Span(now - args.minutes * 60, now), args.out, args.rate):
        print(path)


if __name__ == "__main__":
    main()
