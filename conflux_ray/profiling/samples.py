"""What has been measured so far: a file that a run appends to, and an interrupted run goes on with.

JSON lines. The first holds the settings, every other one the seconds of one case in one round. Settings that differ
would mix measurements that are not of the same thing, so they are refused.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class SampleFileError(ValueError):
    """The file is of other settings, or no file of samples; the message names it and the remedy."""


def read_settings(path: Path) -> dict[str, Any]:
    """The settings of a file of samples.

    Raises:
        SampleFileError: it cannot be read, or is no such file.
    """
    try:
        with path.open() as file:
            settings: dict[str, Any] = json.loads(file.readline())["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SampleFileError(f"{path}: no file of samples ({error!r})") from error
    return settings


class SampleFile:
    """Samples of a run, on disk.

    Args:
        path: of the file; made if it does not exist.
        settings: what the samples depend on, as JSON values.

    Raises:
        SampleFileError: there is a file already, and it is of other settings or unreadable.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._seconds: dict[str, dict[int, float]] = {}
        if path.exists() and path.stat().st_size:
            self._read(settings)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"settings": dict(settings)}) + "\n")

    def _read(self, settings: Mapping[str, Any]) -> None:
        text = self.path.read_text()
        # A run that was killed may have left half a line, which is measured again.
        whole = text[: text.rfind("\n") + 1]
        try:
            head, *lines = (json.loads(line) for line in whole.splitlines())
            found = head["settings"]
            for line in lines:
                self._seconds.setdefault(line["case"], {})[line["round"]] = float(line["seconds"])
        except (ValueError, KeyError, TypeError) as error:
            raise SampleFileError(f"{self.path}: no file of samples ({error!r}); remove it to measure anew") from error
        wanted = json.loads(json.dumps(dict(settings)))
        for name in sorted({*found, *wanted}):
            if found.get(name) != wanted.get(name):
                raise SampleFileError(
                    f"{self.path}: measured with {name}={found.get(name)!r}, now {wanted.get(name)!r}; "
                    f"remove the file to measure anew, or give another output"
                )
        if whole != text:
            self.path.write_text(whole)

    @property
    def cases(self) -> list[str]:
        """Names of what has samples, in the order of their first."""
        return list(self._seconds)

    def __contains__(self, sample: tuple[str, int]) -> bool:
        """Whether (case, round) is measured."""
        case, number = sample
        return number in self._seconds.get(case, {})

    def add(self, case: str, number: int, seconds: float) -> None:
        """Append the sample of a case in round `number`."""
        with self.path.open("a") as file:
            file.write(json.dumps({"case": case, "round": number, "seconds": seconds}) + "\n")
        self._seconds.setdefault(case, {})[number] = seconds

    def of(self, case: str) -> list[float]:
        """Seconds of a case in every round; raises KeyError if it has none."""
        return list(self._seconds[case].values())

    def median(self, case: str) -> float:
        """Median seconds of a case; raises KeyError if it has no sample."""
        return statistics.median(self._seconds[case].values())

    def counts(self) -> tuple[int, int]:
        """Fewest and most samples of a case; raises ValueError if there are none."""
        counts = [len(rounds) for rounds in self._seconds.values()]
        return min(counts), max(counts)

    def noise(self) -> float | None:
        """How far a sample typically is from its case's median: the median over all samples, percent.

        Cases with fewer than three samples say nothing; None if there are no others.
        """
        away = [
            100 * abs(seconds / self.median(case) - 1)
            for case, rounds in self._seconds.items()
            if len(rounds) >= 3
            for seconds in rounds.values()
        ]
        return round(statistics.median(away), 2) if away else None
