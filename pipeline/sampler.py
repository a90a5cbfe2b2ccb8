"""Which rows a step takes. Position is a function of the step, so nothing is stored and any step can be resumed."""

import math
import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

_CYCLE = 1000
"""Positions in which each file of a mixture has its share."""


def _positions(step: int, batch_size: int) -> range:
    """Of a step's rows, counted from the run's first."""
    if step < 1:
        raise ValueError(f"step {step}: the first step is 1")
    return range((step - 1) * batch_size, step * batch_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """Each epoch is a permutation of all rows, keyed by (seed, epoch); epochs follow each other without a gap, so a
    step may span two of them, nothing is dropped, and every row comes once per epoch."""

    num_rows: int
    batch_size: int
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.batch_size < 1:
            raise ValueError(f"{self.num_rows} rows in batches of {self.batch_size}: both must be at least 1")

    def rows(self, step: int) -> list[int]:
        """The row numbers of `step` (the first is 1), in order."""
        return [self._row(position) for position in _positions(step, self.batch_size)]

    def _row(self, position: int) -> int:
        epoch, within = divmod(position, self.num_rows)
        return _permutation(self.num_rows, self.seed, epoch)[within] if self.shuffle else within


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Rows of several files in given shares. Each file has epochs of its own, each a permutation of its rows; of every
    thousand positions it has its share, spread evenly, so each step has about its shares too.

    `sizes`: rows of each file, which are numbered through; `weights`: one for each, which need not add up to 1.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    batch_size: int
    shuffle: bool
    seed: int

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.weights) or min(*self.sizes, self.batch_size) < 1 or min(self.weights) <= 0:
            raise ValueError(f"files of {self.sizes} rows with weights {self.weights} in batches of {self.batch_size}")

    def rows(self, step: int) -> list[int]:
        """The row numbers of `step` (the first is 1), in order."""
        return [self._row(position) for position in _positions(step, self.batch_size)]

    def _row(self, position: int) -> int:
        cycle, within = divmod(position, _CYCLE)
        file, rank = self._order[within]
        epoch, row = divmod(cycle * self._counts[file] + rank, self.sizes[file])
        if self.shuffle:
            row = _permutation(self.sizes[file], f"{self.seed}/file {file}", epoch)[row]
        return self._starts[file] + row

    @cached_property
    def _starts(self) -> list[int]:
        return list(accumulate(self.sizes, initial=0))

    @cached_property
    def _counts(self) -> list[int]:
        return shares(self.weights, _CYCLE)

    @cached_property
    def _order(self) -> list[tuple[int, int]]:
        """(file, how many of its rows came before) of each position of a cycle: always the file that lags most."""
        given = [0] * len(self.sizes)
        order = []
        for position in range(1, _CYCLE + 1):
            file = max(range(len(given)), key=lambda i: self._counts[i] * position - given[i] * _CYCLE)
            order.append((file, given[file]))
            given[file] += 1
        return order


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Whole numbers in these proportions that add up to `total`, each at least 1."""
    exact = [max(1.0, weight / sum(weights) * total) for weight in weights]
    exact = [part * total / sum(exact) for part in exact]
    found = [max(1, math.floor(part)) for part in exact]
    by_rest = sorted(range(len(found)), key=lambda i: found[i] - exact[i])
    for i in by_rest[: total - sum(found)]:
        found[i] += 1
    while sum(found) > total:
        found[found.index(max(found))] -= 1
    return found


@lru_cache(maxsize=8)
def _permutation(num_rows: int, seed: int | str, epoch: int) -> Sequence[int]:
    """Four bytes a row: a list of ten million numbers would take hundreds of megabytes."""
    rows = array("I", range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(rows)  # a text seed is hashed by SHA-512: the same on every machine
    return rows
