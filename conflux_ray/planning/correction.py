"""Online correction of the latency model from measured iterations (design, section 6; beyond the paper).

A profile is measured on one day on one machine; clocks, neighbours and drivers change. One factor on the whole
iteration follows slowly, so that single slow iterations move nothing, and within bounds, so that a broken clock or a
hung worker cannot talk the planner into absurd budgets.
"""

from __future__ import annotations

import math


class Correction:
    """A bounded multiplicative correction: corrected time = factor * model time.

    Args:
        rate: share of the (clipped) log error that one iteration corrects, 0..1; 0 switches it off.
        bounds: the factor stays within them.
        clip: the largest ratio of measured to predicted, or its inverse, that one iteration counts for.

    Raises:
        ValueError: a parameter is out of range.
    """

    def __init__(self, rate: float = 0.02, bounds: tuple[float, float] = (0.5, 2.0), clip: float = 1.5) -> None:
        if not 0 <= rate <= 1:
            raise ValueError(f"correction rate={rate} must be in [0, 1]")
        if not 0 < bounds[0] <= 1 <= bounds[1]:
            raise ValueError(f"correction bounds={bounds} must be positive and enclose 1")
        if not clip > 1:
            raise ValueError(f"correction clip={clip} must be above 1")
        self._rate = rate
        self._low, self._high = bounds
        self._clip = math.log(clip)
        self.factor = 1.0

    def observe(self, predicted: float, measured: float) -> None:
        """Learn from one iteration; both in seconds, `predicted` with the correction it was made under.

        Iterations without a prediction or a measurement teach nothing.
        """
        if not (predicted > 0 and 0 < measured < math.inf):
            return
        error = min(max(math.log(measured / predicted), -self._clip), self._clip)
        self.factor = min(max(self.factor * math.exp(self._rate * error), self._low), self._high)

    def reset(self) -> None:
        """Forget everything: the profile has changed."""
        self.factor = 1.0
