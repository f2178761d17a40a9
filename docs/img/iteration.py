"""Draws docs/img/iteration.png: one layer of an iteration and its two boundaries, as the latency model predicts it.

    python docs/img/iteration.py docs/img/iteration.png

Needs matplotlib, which the product does not depend on. Coefficients are near those measured for Qwen3-14B on two H200
(one reading, for orientation); the picture is about the shape, not the numbers.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
import matplotlib.pyplot as plt

from conflux_ray.planning.dispatch import waterfill
from conflux_ray.planning.latency_model import Affine, Contention, GemmCurve, LatencyModel, chunk_work
from conflux_ray.planning.plain import even_split

MODEL = LatencyModel(
    name="picture",
    num_layers=40,
    num_ranks=2,
    gemm=GemmCurve.floor(185e-6, 130, 1e-6),
    decode=Affine(1.1e-9, 10e-6),
    prefill=Affine(5.5e-11, 20e-6),
    comm=Affine(4e-8, 100e-6),
    contention=(Contention(1.25, 1.15),),
)
DECODES = (160, 16)
CONTEXT_OF_A_DECODE = 1700
CHUNK, CONTEXT = 640, 16000
COLORS = {"linear": "#8da0cb", "all-to-all": "#e5c494", "prefill": "#fc8d62", "decode": "#66c2a5"}


def draw(axes: plt.Axes, shard: Sequence[int], title: str, end: float) -> None:
    """One layer, times in microseconds from its start; `end` is where the axis ends."""
    contention = MODEL.contention[0]
    contexts = [d * CONTEXT_OF_A_DECODE for d in DECODES]
    estimator = MODEL.given(DECODES, contexts)
    path = estimator.prefill_path(max(shard), chunk_work(CHUNK, CONTEXT)) * contention.beta * 1e6
    comm = MODEL.comm(max(shard)) * contention.beta * 1e6
    first = MODEL.linear(max(d + p for d, p in zip(DECODES, shard, strict=True))) * 1e6
    slowest = max(path, estimator.decode_path * contention.alpha * 1e6)
    second = first + slowest

    def bar(y: float, start: float, width: float, kind: str, text: str) -> None:
        axes.barh(y, width, left=start, height=0.8, color=COLORS[kind], edgecolor="black", linewidth=0.6)
        axes.text(start + width / 2, y, text, ha="center", va="center", fontsize=8)

    for r, (decodes, prefill) in enumerate(zip(DECODES, shard, strict=True)):
        main, side = 3.2 - 2.2 * r, 2.3 - 2.2 * r
        linear = MODEL.linear(decodes + prefill) * 1e6
        bar(main, 0, linear, "linear", f"shared linear: {decodes} decode + {prefill} prefill tokens")
        bar(main, first, comm * 0.6, "all-to-all", "all-to-all\n(QKV)")
        bar(main, first + comm * 0.6, path - comm, "prefill", "prefill attention, its heads")
        bar(main, first + path - comm * 0.4, comm * 0.4, "all-to-all", "(O)")
        decode = MODEL.decode(contexts[r]) * contention.alpha * 1e6
        bar(side, first, decode, "decode", "decode attention" if decode > 60 else "")
        axes.text(-8, main, f"rank {r}, main stream", ha="right", va="center", fontsize=8)
        axes.text(-8, side, "D-stream", ha="right", va="center", fontsize=8)
    for x, name in ((first, "boundary 1"), (second, "boundary 2")):
        axes.axvline(x, color="black", linestyle="--", linewidth=1)
        axes.text(x, 3.85, f"{name}: {x:.0f} µs", ha="center", va="bottom", fontsize=8)
    axes.set_title(title, loc="left", fontsize=10, pad=16)
    axes.set_xlim(0, end)
    axes.set_ylim(-0.5, 3.8)
    axes.set_yticks([])
    for side_name in ("top", "right", "left"):
        axes.spines[side_name].set_visible(False)


def main(target: Path) -> None:
    figure, (above, below) = plt.subplots(2, 1, figsize=(10, 5.6), sharex=True)
    draw(above, even_split(CHUNK, 2), "Even split: rank 0 keeps rank 1 waiting at boundary 1", 1120)
    draw(below, waterfill(DECODES, CHUNK), "Waterfill: equal combined loads, boundary 1 comes earlier", 1120)
    below.set_xlabel("time within one layer, µs")
    figure.subplots_adjust(left=0.15, right=0.98, top=0.91, bottom=0.09, hspace=0.38)
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
