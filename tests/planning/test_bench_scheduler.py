"""The command that measures a scheduling step; what it measures is no test's business."""

from __future__ import annotations

import pytest

from conflux_ray.bench.scheduler import main


@pytest.mark.parametrize("load", ["light", "heavy"])
def test_the_table_has_a_row_for_every_queue_and_degree(capsys, load):
    assert main(["--pending", "1", "30", "--ranks", "2", "4", "--decodes", "3", "--steps", "2", "--load", load]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[:2] for row in rows] == [["2", "1"], ["2", "30"], ["4", "1"], ["4", "30"]]
    assert all(float(row[2]) > 0 for row in rows)
