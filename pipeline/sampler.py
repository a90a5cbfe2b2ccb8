"""Which rows a step takes. Position is a function of the step, so nothing is stored and any step can be resumed."""

import random
from dataclasses import dataclass
from functools import lru_cache


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
        if step < 1:
            raise ValueError(f"step {step}: the first step is 1")
        first = (step - 1) * self.batch_size
        return [self._row(position) for position in range(first, first + self.batch_size)]

    def _row(self, position: int) -> int:
        epoch, within = divmod(position, self.num_rows)
        return _permutation(self.num_rows, self.seed, epoch)[within] if self.shuffle else within


@lru_cache(maxsize=4)
def _permutation(num_rows: int, seed: int, epoch: int) -> list[int]:
    rows = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(rows)  # a text seed is hashed by SHA-512: the same on every machine
    return rows
