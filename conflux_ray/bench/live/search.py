"""The largest rate that passes, on a live server: the simulator's bisection, with a clock that runs out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from conflux_ray.bench.live.point import Point
from conflux_ray.simulator.goodput import largest_passing


class OutOfTimeError(Exception):
    """There is not enough time left for another point."""


@dataclass(frozen=True, slots=True)
class Found:
    """What a search knows in the end.

    Args:
        passed: the largest rate that passed, requests per second; 0 if none did.
        failed: the smallest that did not; None if none was tried.
        complete: whether they are as close as was asked.
    """

    passed: float
    failed: float | None
    complete: bool


def search(
    measure: Callable[[float], Point], attainment: float, guess: float, tolerance: float, lowest: float = 0.02
) -> Found:
    """Bisect.

    Args:
        measure: the point of a rate; may raise `OutOfTimeError`.
        attainment: that passes, 0..1.
        guess: rate to start from.
        tolerance: of the rate, as a share.
        lowest: rates below are not tried.

    Raises:
        RuntimeError: a point is invalid.
    """
    tried: dict[float, bool] = {}

    def passes(rate: float) -> bool:
        rate = round(rate, 4)  # as files are named, so that a search that is resumed finds them
        if rate not in tried:
            point = measure(rate)
            if point.invalid:
                raise RuntimeError(f"{rate:g} requests/s: {point.invalid}")
            tried[rate] = not point.stopped and point.attainment >= attainment
        return tried[rate]

    try:
        largest_passing(passes, guess, tolerance, lowest=lowest)
        complete = True
    except OutOfTimeError:
        complete = False
    passed = max((rate for rate, ok in tried.items() if ok), default=0.0)
    return Found(passed, min((rate for rate, ok in tried.items() if not ok), default=None), complete)
