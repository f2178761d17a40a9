"""The event loop. It knows times and actions, nothing of requests or policies."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Clock:
    """Runs actions in order of time; equal times run in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._stopped = False
        self._order = count()
        self._queue: list[tuple[float, int, Action]] = []

    def at(self, time: float, action: Action) -> None:
        """Run `action` at `time`, seconds.

        Raises:
            ValueError: `time` is in the past.
        """
        if time < self.now:
            raise ValueError(f"time={time} is before now={self.now}")
        heapq.heappush(self._queue, (time, next(self._order), action))

    def after(self, delay: float, action: Action) -> None:
        """Run `action` in `delay` seconds."""
        self.at(self.now + delay, action)

    def stop(self) -> None:
        """Return from `run` after the present action."""
        self._stopped = True

    def run(self) -> None:
        """Run until nothing is left to do or `stop` is called."""
        queue = self._queue
        while queue and not self._stopped:
            self.now, _, action = heapq.heappop(queue)
            self.events += 1
            action()
