"""Figures: what a reader has to tell apart."""

from __future__ import annotations

from conflux_ray.simulator.plots import _color
from conflux_ray.simulator.systems.registry import SYSTEMS


def test_systems_that_share_a_panel_differ_in_color() -> None:
    for scheduling in ("fcfs", "++"):
        shown = [name for name in SYSTEMS if not name.startswith("conflux") and not name.endswith("-priority")]
        rivals = [name for name in shown if ("++" in name) == (scheduling == "++")]
        colors = [_color(SYSTEMS[name].title) for name in (*rivals, "conflux")]
        assert len(set(colors)) == len(colors)
