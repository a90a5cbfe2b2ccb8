"""How long sequences become, learned while they run: a table of survival by age.

The estimate is Kaplan and Meier's, in bins of age. Those still running count as alive up to their age and no further,
so that the short ones, which end first, do not make all look short. Bin i is of lengths above i * bin_tokens and not
above (i + 1) * bin_tokens. Bound: from n sequences of a step the survival is off by sqrt(S (1 - S) / n), standard
deviation, at each age that all of them had the time to reach.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

_BELIEVED_SEQUENCES = 64.0
"""The belief counts as so many sequences seen. A believed mean is off by 10 %, and lengths vary by three quarters of
their mean: (.75 / .10)^2 = 56 sequences know as much."""
_KEPT_PER_STEP = 0.7
"""Of the weight of a step, and of the belief, when another step is done: a memory of three steps, in which a policy
changes little, and 700 of 1,024 sequences are of the last two."""

Ages = tuple[float, ...]


def bins_of(longest: int, most: int) -> tuple[int, int]:
    """Tokens per bin and number of bins, of which there are at most `most`."""
    width = max(1, math.ceil(longest / most))
    return width, math.ceil(longest / width)


def count_ages(ages: Iterable[float], bin_tokens: int, num_bins: int) -> Ages:
    """A sequence between two bins counts in both, in proportion; one past the last bin counts there."""
    counts = [0.0] * num_bins
    last, most = num_bins - 1.0, max(0, num_bins - 2)
    for age in ages:
        at = age / bin_tokens
        if not 0.0 < at < last:  # no calls: this is done for each sequence of a run
            at = last if at > 0.0 else 0.0
        lower = int(at)
        if lower > most:
            lower = most
        share = at - lower
        counts[lower] += 1 - share
        if share:
            counts[lower + 1] += share
    return tuple(counts)


class LengthModel:
    """Of one role. Steps are cohorts: all sequences of one have the same weight, the ended and the running."""

    def __init__(self, bin_tokens: int, believed: Sequence[float]) -> None:
        """`believed`: survival, as `survival` gives it."""
        self._bin_tokens, self._num_bins = bin_tokens, len(believed) - 1
        self._past = [_BELIEVED_SEQUENCES * max(0.0, longer - next_) for longer, next_ in pairwise(believed)]
        self._ended: dict[int, list[float]] = {}

    def end(self, step: int, lengths: Iterable[float]) -> None:
        ended = self._ended.setdefault(step, [0.0] * self._num_bins)
        for length in lengths:
            ended[min(max(math.ceil(length / self._bin_tokens) - 1, 0), self._num_bins - 1)] += 1

    def close(self, before: int) -> None:
        """Steps before that one are done: each makes what was seen earlier count less."""
        for step in sorted(step for step in self._ended if step < before):
            ended = self._ended.pop(step)
            self._past = [_KEPT_PER_STEP * past + new for past, new in zip(self._past, ended, strict=True)]

    def histogram(self) -> tuple[float, ...]:
        """[num_bins] What ended, by length: the newest steps whole, the older ones and the belief less."""
        return tuple(map(sum, zip(self._past, *self._ended.values(), strict=True)))

    def survival(self, in_flight: Iterable[Sequence[float]]) -> tuple[float, ...]:
        """[num_bins + 1] `in_flight`: counts by age, as `count_ages` makes them."""
        ended = self.histogram()
        running = [sum(counts) for counts in zip([0.0] * self._num_bins, *in_flight, strict=True)]
        reached = _suffix_sums(ended)
        passed = [*_suffix_sums(running)[1:], 0.0]  # whole for those beyond the bin, in part for those within
        longer, left = [1.0], 1.0
        for i in range(self._num_bins - 1):
            at_risk = reached[i] + passed[i]
            left *= 1 - (min(1.0, ended[i] / at_risk) if at_risk > 0 else 1 / (self._num_bins - i))
            longer.append(left)
        return (*longer, 0.0)


def _suffix_sums(values: Sequence[float]) -> list[float]:
    return list(accumulate(reversed(values)))[::-1]


def add_ages(counts: Iterable[Mapping[int, Ages]]) -> dict[int, Ages]:
    """By step."""
    found: dict[int, list[Ages]] = {}
    for by_step in counts:
        for step, ages in by_step.items():
            found.setdefault(step, []).append(ages)
    return {step: tuple(map(sum, zip(*ages, strict=True))) for step, ages in found.items()}
