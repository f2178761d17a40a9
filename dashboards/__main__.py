"""`python -m dashboards`: write the dashboards' JSON files."""

from __future__ import annotations

import json
from pathlib import Path

from dashboards.goodput import GOODPUT
from dashboards.instances import INSTANCES
from dashboards.lifecycle import LIFECYCLE
from dashboards.panels import Dashboard, JSONEncoder

FOLDER = Path(__file__).resolve().parent
DASHBOARDS = (GOODPUT, INSTANCES, LIFECYCLE)


def path_of(dashboard: Dashboard) -> Path:
    """Where a dashboard's JSON is kept."""
    return FOLDER / f"{dashboard.uid}.json"


def text_of(dashboard: Dashboard) -> str:
    """A dashboard's JSON, always the same for the same dashboard."""
    return json.dumps(dashboard.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def main() -> None:
    """Write all files."""
    for dashboard in DASHBOARDS:
        path_of(dashboard).write_text(text_of(dashboard))


if __name__ == "__main__":
    main()
