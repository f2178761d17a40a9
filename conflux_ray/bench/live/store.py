"""A folder of points: what was measured once is not measured again, and only like is kept with like."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from conflux_ray.bench.live.point import Point, write_json


class StoreError(ValueError):
    """A folder that holds something else; the message says what, and what to do."""


class Store:
    """The points of one comparison.

    Args:
        folder: made if need be.
        settings: what all its points share; None takes those that the folder has.

    Raises:
        StoreError: the folder has points with other settings, or none where `settings` is None.
    """

    def __init__(self, folder: Path, settings: dict[str, Any] | None) -> None:
        self.folder = folder
        path = folder / "settings.json"
        if path.exists():
            found = json.loads(path.read_text())
            wanted = found if settings is None else json.loads(json.dumps(settings))
            for key in sorted(found.keys() | wanted.keys()):
                if found.get(key) != wanted.get(key):
                    raise StoreError(
                        f"{folder}: its points have {key}={found.get(key)!r}, not {wanted.get(key)!r}; "
                        f"choose another --out or the same {key}"
                    )
        elif settings is None:
            raise StoreError(f"{folder}: no points in it; name the folder of a run")
        else:
            write_json(path, settings)
            wanted = settings
        self.settings: dict[str, Any] = wanted

    def path(self, name: str, rate: float, seed: int) -> Path:
        """Where a point is kept."""
        return self.folder / "points" / name / f"rate-{rate:.4f}-seed-{seed}.json"

    def get(self, name: str, rate: float, seed: int) -> Point | None:
        """A point that need not be measured again; one that is invalid must."""
        path = self.path(name, rate, seed)
        if not path.exists():
            return None
        point = Point.from_json(json.loads(path.read_text()))
        return None if point.invalid else point

    def put(self, name: str, point: Point) -> None:
        """Keep a point."""
        write_json(self.path(name, point.rate, point.seed), point.to_json())

    def points(self, name: str) -> list[Point]:
        """All points of a server, valid or not, by rate and seed."""
        paths = (self.folder / "points" / name).glob("rate-*.json")
        points = [Point.from_json(json.loads(path.read_text())) for path in paths]
        return sorted(points, key=lambda p: (p.rate, p.seed))

    def names(self) -> list[str]:
        """Servers that have points."""
        return sorted(path.name for path in (self.folder / "points").glob("*") if path.is_dir())
