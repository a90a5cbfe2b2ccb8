"""How long iterations take, learned from what replicas report: the believed cost, stretched by two measured factors.

Measured are seconds per (batch, context), in buckets of powers of two. The factor of decoding is the measured seconds
over those that the belief predicts for the same iterations; prefill has its own. Bound: where the belief is wrong by
one factor, the estimate's error falls with what is measured, and is e^(-t / 60 s) of a jump after t seconds of work.
"""

import math
from dataclasses import dataclass, replace

from pipeline.core.iteration import IterationCost
from pipeline.core.recent import RecentMean

_MEMORY_S = 60.0
"""Older measurements fade within it: long beside an iteration, short beside a step."""
_BELIEVED_S = 0.25
"""The belief counts as so many seconds of one replica's decoding. It is off by 15 %, and a report of one second by 7 %
or less (assumed): (7 / 15)^2."""
_BELIEVED_TOKENS, _MEMORY_TOKENS = 2_000.0, 2_000_000.0
"""The same of prefill: some prompts; those of a thousand sequences."""


@dataclass(slots=True)
class Cell:
    """Of one bucket; all three fade together."""

    num_iterations: float = 0.0
    seconds: float = 0.0
    believed_s: float = 0.0


class Throughput:
    """Of one role."""

    def __init__(self, believed: IterationCost, at_s: float) -> None:
        self._believed = believed
        self._at_s = at_s
        self._cells: dict[tuple[int, int], Cell] = {}
        self._belief_s = _BELIEVED_S
        self._prefill_s = RecentMean(believed.prefill_s, weight=_BELIEVED_TOKENS, memory=_MEMORY_TOKENS)

    def add_decode(self, at_s: float, num_iterations: float, seconds: float, batch: float, context: float) -> None:
        """Iterations of `batch` sequences whose contexts add up to `context` tokens, on average. What cannot be is not
        counted."""
        if not all(0 < x < math.inf for x in (num_iterations, seconds, batch)) or not 0 <= context < math.inf:
            return
        self._fade(at_s)
        cell = self._cells.setdefault((_bucket(batch), _bucket(context)), Cell())
        cell.num_iterations += num_iterations
        cell.seconds += seconds
        cell.believed_s += num_iterations * self._believed.iteration_s(batch, context)

    def add_prefill(self, num_tokens: float, seconds: float) -> None:
        self._prefill_s.add(seconds, num_tokens)

    @property
    def slowness(self) -> float:
        """Of decoding, beside what was believed."""
        believed_s = sum(cell.believed_s for cell in self._cells.values())
        if believed_s <= 0:
            return 1.0
        seconds = sum(cell.seconds for cell in self._cells.values())
        return (self._belief_s + seconds) / (self._belief_s + believed_s)

    @property
    def cost(self) -> IterationCost:
        return replace(self._believed.slower(self.slowness), prefill_s=self._prefill_s.value)

    def table(self) -> dict[tuple[int, int], float]:
        """Seconds of an iteration as measured, by the lower ends of a bucket's batch and context."""
        return {
            (2**batch, 2**context): cell.seconds / cell.num_iterations
            for (batch, context), cell in sorted(self._cells.items())
        }

    def _fade(self, at_s: float) -> None:
        """A pause fades what came before it by no more than ten memories: something is always left."""
        if at_s <= self._at_s:
            return
        keep = math.exp(-min(10.0, (at_s - self._at_s) / _MEMORY_S))
        self._at_s = at_s
        self._belief_s *= keep
        for key, cell in list(self._cells.items()):
            cell.num_iterations *= keep
            cell.seconds *= keep
            cell.believed_s *= keep
            if cell.seconds < 1e-3:
                del self._cells[key]


def _bucket(value: float) -> int:
    """1, 2-3, 4-7, ..: the power of two."""
    return max(0, math.frexp(value)[1] - 1)
