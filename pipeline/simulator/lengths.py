"""How long responses become: a distribution, and draws in which the responses to one prompt resemble each other.

A distribution is kept as quantiles. Correlation is a Gaussian copula over them: it changes who is long together with
whom, never how many are long.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_NUM_QUANTILES = 20_000
_SHORTEST = 1
_SHOWN = 80  # characters of a line that is wrong
_NORMAL_GRID = 8.0  # standard normal deviations beyond which nothing is drawn


@dataclass(frozen=True, kw_only=True, eq=False)
class Lengths:
    """In tokens. `uncut` are ascending, equally likely values before the limit of `longest` tokens."""

    uncut: Array
    longest: int

    def __deepcopy__(self, memo: object) -> "Lengths":
        """Never changed, so a copy of a simulation shares it."""
        return self

    @cached_property
    def values(self) -> Array:
        return np.clip(np.rint(self.uncut), _SHORTEST, self.longest)

    @cached_property
    def mean(self) -> float:
        return float(self.values.mean())

    @cached_property
    def mean_square(self) -> float:
        return float((self.values**2).mean())

    def mean_longest(self, num: int) -> float:
        """Of so many responses that do not resemble each other."""
        share_below = (np.arange(len(self.values) + 1) / len(self.values)) ** num
        return float(self.values @ np.diff(share_below))

    @property
    def mean_context(self) -> float:
        """Of the tokens of the responses: how many of their own response precede them, on average."""
        return self.mean_square / (2 * self.mean)

    def percentile(self, q: float) -> float:
        return float(self.values[min(len(self.values) - 1, int(len(self.values) * q / 100))])

    def survival(self, edges: Sequence[float] | Array) -> Array:
        """The share of responses longer than each of `edges`: what a planner reckons remaining lengths with."""
        return 1 - np.searchsorted(self.values, np.asarray(edges), side="right") / len(self.values)

    def scaled(self, factor: float) -> "Lengths":
        """All `factor` times as long before the limit: a wrong estimate, or another task."""
        return Lengths(uncut=self.uncut * factor, longest=self.longest)

    def draw(self, rng: np.random.Generator, num_prompts: int, num_each: int, correlation: float = 0.0) -> Array:
        """[num_prompts, num_each]. `correlation` is of the normal scores of two responses to one prompt."""
        own = rng.standard_normal((num_prompts, num_each))
        shared = rng.standard_normal((num_prompts, 1))
        score = math.sqrt(correlation) * shared + math.sqrt(1 - correlation) * own
        drawn: Array = self.values[
            np.minimum((_normal_cdf(score) * len(self.values)).astype(int), len(self.values) - 1)
        ]
        return drawn


def lognormal_mixture(parts: Sequence[tuple[float, float, float]], longest: int) -> Lengths:
    """`parts`: (share, median in tokens, sigma of the logarithm), of which the shares add up to 1."""
    if abs(sum(share for share, _, _ in parts) - 1) > 1e-9:
        raise ValueError(f"the shares of {parts} do not add up to 1")
    low = min(math.log(median) - _NORMAL_GRID * sigma for _, median, sigma in parts)
    high = max(math.log(median) + _NORMAL_GRID * sigma for _, median, sigma in parts)
    grid = np.linspace(low, high, 8192)
    cdf = sum(share * _normal_cdf((grid - math.log(median)) / sigma) for share, median, sigma in parts)
    levels = (np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES
    return Lengths(uncut=np.exp(np.interp(levels, np.asarray(cdf), grid)), longest=longest)


def lognormal_of_mean(mean: float, sigma: float, longest: int) -> Lengths:
    """With that mean after the cut. Raises ValueError where the cut allows none."""
    if not _SHORTEST < mean < longest:
        raise ValueError(f"no lengths between {_SHORTEST} and {longest} tokens have a mean of {mean:.0f}")
    low, high = math.log(_SHORTEST / 8), math.log(64 * longest)
    for _ in range(50):
        median = (low + high) / 2
        is_short = lognormal_mixture([(1.0, math.exp(median), sigma)], longest).mean < mean
        low, high = (median, high) if is_short else (low, median)
    return lognormal_mixture([(1.0, math.exp(low), sigma)], longest)


def measured_lengths(values: Sequence[float], longest: int) -> Lengths:
    """From lengths that were seen; those at the limit count as just that long."""
    if not values:
        raise ValueError("no lengths were given")
    return Lengths(uncut=np.sort(np.asarray(values, dtype=float)), longest=longest)


def read_lengths(path: Path, longest: int) -> Lengths:
    """One number per line, or JSON lines with a `num_tokens`. Raises ValueError with the line of what is neither."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no text; valid: a number of tokens per line") from error
    values = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            values.append(_num_tokens(entry["num_tokens"] if isinstance(entry, dict) else entry))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"{path}, line {number}: neither a number of tokens nor JSON with num_tokens: {line[:_SHOWN]!r}"
            ) from error
    if not values:
        raise ValueError(f"{path}: no lengths are in it")
    return measured_lengths(values, longest)


def _num_tokens(entry: object) -> float:
    """Raises ValueError or TypeError."""
    if isinstance(entry, bool) or not isinstance(entry, (int, float)) or not 0 <= entry < math.inf:
        raise ValueError(f"{entry!r} is no number of tokens")
    return float(entry)


def _normal_cdf(x: Array) -> Array:
    """Of the standard normal, by table: its error of 1e-7 is far below a quantile."""
    return np.interp(x, _X, _CDF)


_X: Array = np.linspace(-_NORMAL_GRID, _NORMAL_GRID, 16_001)
_CDF: Array = np.asarray([NormalDist().cdf(float(x)) for x in _X])

POLICY_16K = ((0.85, 4000.0, 0.6), (0.15, 9500.0, 0.5))
"""Reasoning of a policy, cut at 16,384: mean 5,560, median 4,500, 99 % at the limit. Assumed, long-tailed as published
measurements are (99th percentile up to ten times the median)."""
POLICY_32K = tuple((share, 1.3 * median, sigma) for share, median, sigma in POLICY_16K)
"""The same cut at 32,768."""
VERDICT_4K = ((1.0, 1400.0, 0.55),)
"""Reasoning of a judge, cut at 4,096: mean 1,600. Assumed."""
