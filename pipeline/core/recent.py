"""Measured figures in which the newer counts more."""

import math


class RecentMean:
    """Sum of values over sum of weights. Starts at what is believed, as if that had been measured with `weight`."""

    def __init__(self, believed: float, *, weight: float, memory: float) -> None:
        """What is measured after it takes a share of 1 - 1/e away from a value, each `memory` of weight."""
        self._total, self._weight, self._memory = believed * weight, weight, memory

    @property
    def value(self) -> float:
        return self._total / self._weight

    def add(self, total: float, weight: float = 1.0) -> None:
        """`total` is value times weight. What is no positive weight or no number is not counted."""
        if not (math.isfinite(total) and 0 < weight < math.inf):
            return
        keep = math.exp(-weight / self._memory)
        self._total, self._weight = keep * self._total + total, keep * self._weight + weight


class Rate:
    """Events per second, over the last `memory_s` or so."""

    def __init__(self, since_s: float, memory_s: float = 30.0) -> None:
        self._since_s = self._at_s = since_s
        self._memory_s, self._num = memory_s, 0.0

    def add(self, at_s: float, num: float) -> None:
        """An event older than the newest counts as if it were now."""
        if at_s > self._at_s:
            self._num *= math.exp(-(at_s - self._at_s) / self._memory_s)
            self._at_s = at_s
        self._num += num

    def per_s(self, now: float) -> float:
        if now <= self._since_s:
            return 0.0
        num = self._num * math.exp(-max(0.0, now - self._at_s) / self._memory_s)
        return num / (self._memory_s * -math.expm1(-(now - self._since_s) / self._memory_s))
