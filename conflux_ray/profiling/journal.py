"""The rows of a profiling run, appended to a file as they are measured, so that a run can go on where it ended.

JSON lines. The first is the run's settings; every other one is a row (`fitting.row_to_json`) with the name of its case
and the times it is the median of. A line that was cut off by the end of the process is measured again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conflux_ray.planning.fitting import Row, row_from_json, row_to_json


class JournalError(ValueError):
    """The file belongs to another run; the message names the setting and the remedy."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One line.

    Args:
        case: its name.
        row: for fitting.
        times: seconds of every repeat, as `row.seconds` counts them.
    """

    case: str
    row: Row
    times: tuple[float, ...]

    @property
    def spread(self) -> float:
        """Range of the repeats, relative to their median."""
        return (max(self.times) - min(self.times)) / self.row.seconds


class Journal:
    """The file of one run.

    Args:
        path: created if it is not there.
        settings: of the run; those in the file must be the same.

    Raises:
        JournalError: the file is of another run.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.measured: dict[str, Measured] = {}
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        while lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if lines:
            self._check(_parse(path, lines[0]), json.loads(json.dumps(settings)))
            for line in lines[1:]:
                measured = _read(path, _parse(path, line))
                self.measured[measured.case] = measured
        else:
            lines = [_line({"settings": dict(settings)})]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(lines))

    def append(self, measured: Measured) -> None:
        """Add a line; it is in the file when this returns."""
        self.measured[measured.case] = measured
        fields = {"case": measured.case, "times": list(measured.times), **row_to_json(measured.row)}
        with self.path.open("ab") as file:
            file.write(_line(fields))

    def of(self, names: Sequence[str]) -> list[Measured]:
        """The measurements of the cases `names`, those that are there."""
        return [self.measured[name] for name in names if name in self.measured]

    def _check(self, header: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
        found = header.get("settings")
        if not isinstance(found, dict):
            raise JournalError(f"{self.path}: not the rows of a profiling run; give another --out")
        for name in sorted({*found, *settings}):
            if found.get(name) != settings.get(name):
                raise JournalError(
                    f"{self.path}: it was measured with {name}={found.get(name)!r}, this run has "
                    f"{settings.get(name)!r}; add --restart to measure anew, or give another --out"
                )


def _line(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, allow_nan=False).encode() + b"\n"


def _parse(path: Path, line: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise JournalError(f"{path}: not the rows of a profiling run; give another --out")
    return fields


def _read(path: Path, fields: dict[str, Any]) -> Measured:
    try:
        case, times = fields.pop("case"), tuple(fields.pop("times"))
        return Measured(case, row_from_json(fields), times)
    except (KeyError, ValueError) as error:
        raise JournalError(f"{path}: a line is no row ({error}); add --restart to measure anew") from error
