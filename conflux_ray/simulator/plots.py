"""PNG and CSV of the results. Matplotlib is imported here only."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

from conflux_ray.simulator.analysis import Row
from conflux_ray.simulator.figures import Results

_COLORS = {
    "ConfluxServe": "black",
    "Chunked Prefill": "#2166ac",
    "MuxWise": "#e08214",
    "DistServe": "#1b7837",
    "LoongServe": "#762a83",
    "Data parallel": "#8c6d31",
}
"""Of a system, whatever its scheduling."""


def _color(title: str) -> str:
    family = title.removesuffix("++").removesuffix("-FCFS").removesuffix("-SRPT")
    return _COLORS["Chunked Prefill" if family == "Chunked" else family]


def write_csv(path: Path, rows: Sequence[Row]) -> None:
    """One line a row; the columns are those of the first."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(axis: Any, rows: Sequence[Row], x: str, columns: dict[str, str]) -> None:
    for column, label in columns.items():
        axis.plot([row[x] for row in rows], [row[column] for row in rows], marker="o", label=label)
    axis.legend(fontsize=8)
    axis.grid(alpha=0.3)


def _bars(axis: Any, rows: Sequence[Row], name: str, value: str) -> None:
    axis.bar([str(row[name]) for row in rows], [float(row[value]) for row in rows])
    axis.tick_params(axis="x", labelrotation=20, labelsize=8)


def scaling(results: Results, path: Path) -> None:
    """Figs. 4 and 5."""
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.2))
    for pair, table, unit in ((axes[:2], "fig4", "seconds"), (axes[2:], "fig5", "ms")):
        rows = results.tables[table]
        phase = "prefill, 32K" if table == "fig4" else "decode, 16 x 8K"
        _lines(pair[0], rows, "degree", {f"tp_{unit}": "TP", f"sp_{unit}": "SP"})
        pair[0].set(title=phase, xlabel="degree", ylabel=unit, xscale="log")
        _lines(pair[1], rows, "degree", {"tp_efficiency": "TP", "sp_efficiency": "SP"})
        pair[1].set(title=phase, xlabel="degree", ylabel="parallelism efficiency", xscale="log", ylim=(0, 1.05))
    for axis in axes:
        axis.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axis.minorticks_off()
    _save(figure, path)


def components(results: Results, path: Path) -> None:
    """Table 2 and Figs. 13 to 15."""
    figure, axes = plt.subplots(2, 3, figsize=(13, 7))
    for tbt, offset in ((50.0, -0.2), (100.0, 0.2)):
        rows = [row for row in results.tables["table2"] if row["tbt_ms"] == tbt]
        heights = [float(row["requests_per_s"]) for row in rows]
        axes[0, 0].bar([k + offset for k in range(len(rows))], heights, 0.4, label=f"{tbt:g} ms")
        axes[0, 0].set_xticks(range(len(rows)), [str(row["system"]) for row in rows], rotation=20, fontsize=8)
    axes[0, 0].set(title="Table 2: prefill throughput", ylabel="requests/s")
    axes[0, 0].legend(loc="lower right")
    for prompt, offset in ((8192, -0.2), (32768, 0.2)):
        rows = [row for row in results.tables["fig13"] if row["prompt"] == prompt]
        heights = [float(row["normalised"]) for row in rows]
        axes[0, 1].bar([k + offset for k in range(len(rows))], heights, 0.4, label=f"{prompt // 1024}K")
        axes[0, 1].set_xticks(range(len(rows)), [str(row["variant"]) for row in rows], rotation=20, fontsize=8)
    axes[0, 1].set(title="Fig. 13: cumulative ablation", ylabel="latency / full", ylim=(0.9, None))
    axes[0, 1].legend()
    names = {"serialized_ms": "serialized", "overlapped_ms": "overlapped", "contention_free_ms": "contention-free"}
    _lines(axes[0, 2], results.tables["fig14a"], "decodes", names)
    axes[0, 2].set(title="Fig. 14a: attention region", xlabel="decodes per GPU", ylabel="ms", ylim=(0, None))
    _lines(axes[1, 0], results.tables["fig14b"], "degree", {"speedup": "32K prefill", "degree": "linear"})
    axes[1, 0].set(title="Fig. 14b: SP degree", xlabel="degree", ylabel="speed-up")
    _bars(axes[1, 1], results.tables["fig15a"], "dispatch", "linear_us")
    axes[1, 1].set(title="Fig. 15a: shared linear region", ylabel="us a layer")
    _bars(axes[1, 2], results.tables["fig15b"], "placement", "attention_us")
    axes[1, 2].set(title="Fig. 15b: attention region", ylabel="us a layer")
    _save(figure, path)


def curves(results: Results, group: str, path: Path) -> None:
    """Attainment against rate, a panel for each model, workload, TBT and, in Fig. 12, scheduling."""
    rows = [row for row in results.tables["curves"] if row["figure"] == group]
    panels: dict[tuple[str, str, str, str], list[Row]] = {}
    for row in rows:
        enhanced = str(row["system"]).endswith("++") or row["system"] == "ConfluxServe"
        schedule = "enhanced" if enhanced else "FCFS"
        key = (schedule, str(row["model"]), str(row["workload"]), f"TBT {float(row['tbt_ms']):g} ms")
        panels.setdefault(key, []).append(row)
    if not panels:
        return
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(4.6 * columns, 3.4 * lines), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    for axis, (titles, mine) in zip(axes.flat, sorted(panels.items()), strict=False):
        for system in dict.fromkeys(str(row["system"]) for row in mine):
            points = sorted((float(r["rate"]), 100 * float(r["attainment"])) for r in mine if r["system"] == system)
            axis.plot(*zip(*points, strict=True), marker=".", label=system, color=_color(system))
        axis.axhline(95, color="gray", linewidth=0.8)
        axis.set(title=", ".join(titles), xlabel="requests/s", ylabel="attainment, %", ylim=(50, 101))
        axis.title.set_fontsize(9)
        axis.legend(fontsize=7)
        axis.grid(alpha=0.3)
    _save(figure, path)


def write_all(results: Results, images: Path, data: Path) -> list[str]:
    """All images and tables.

    Returns:
        Names of the images.
    """
    images.mkdir(parents=True, exist_ok=True)
    data.mkdir(parents=True, exist_ok=True)
    for name, rows in results.tables.items():
        if rows:
            write_csv(data / f"{name}.csv", rows)
    scaling(results, images / "scaling.png")
    components(results, images / "components.png")
    for group in ("fig12", "fig16", "fig17"):
        curves(results, group, images / f"{group}.png")
    return sorted(path.name for path in images.glob("*.png"))
