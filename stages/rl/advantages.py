"""Group-relative advantages (GRPO, arXiv 2402.03300): numpy, a few numbers per sequence.

Shape suffixes: N sequences of a batch, G groups.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipeline.config import Algorithm
from pipeline.queue.schema import SequenceRow

STD_FLOOR = 1e-4
"""Added to the standard deviation, so that a group of nearly equal scores does not explode."""


@dataclass(frozen=True, slots=True)
class Advantages:
    values_N: npt.NDArray[np.float32]
    """0 where the sequence is not used."""
    used_N: npt.NDArray[np.bool_]
    """The sequence enters the loss and its denominator."""
    num_groups_used: int


def batch_advantages(rows: Sequence[SequenceRow], algorithm: Algorithm) -> Advantages:
    """Of a step's batch: a group is the responses to one prompt of one step."""
    return group_advantages(
        [(row.step, row.prompt_no) for row in rows],
        [row.score for row in rows],
        norm_by_std=algorithm.norm_adv_by_std,
        filter_groups=algorithm.filter_groups,
    )


def group_advantages(
    groups: Sequence[Hashable], scores: Sequence[float | None], *, norm_by_std: bool, filter_groups: bool
) -> Advantages:
    """Advantage (score - mean) / (std + STD_FLOOR) over the valid members of each group; std of the population.

    `groups[i]` is the key of sequence i's group, in any order. A sequence without a score is not used, nor is a group
    with fewer than two valid members, nor (with `filter_groups`) one whose scores are all equal. Without
    `norm_by_std` the deviation is not divided.
    """
    index_of: dict[Hashable, int] = {}
    group_N = np.array([index_of.setdefault(key, len(index_of)) for key in groups], np.intp)
    num_groups = len(index_of)
    valid_N = np.array([score is not None for score in scores], bool)
    score_N = np.array([0.0 if score is None else score for score in scores], np.float64)

    def sum_G(values_N: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        sums_G = np.bincount(group_N, weights=values_N * valid_N, minlength=num_groups)
        return sums_G.astype(np.float64)  # of no sequences they are integers

    count_G = sum_G(np.ones_like(score_N))
    divisor_G = np.maximum(count_G, 1)
    deviation_N = score_N - (sum_G(score_N) / divisor_G)[group_N]
    std_G = np.sqrt(sum_G(deviation_N**2) / divisor_G)

    lowest_G, highest_G = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(lowest_G, group_N[valid_N], score_N[valid_N])
    np.maximum.at(highest_G, group_N[valid_N], score_N[valid_N])
    differs_G = highest_G > lowest_G  # exact, where std would be a rounding error above 0

    used_G = (count_G >= 2) & (differs_G if filter_groups else True)
    used_N = valid_N & used_G[group_N]
    values_N = deviation_N / (std_G + STD_FLOOR)[group_N] if norm_by_std else deviation_N
    values_N = np.where(used_N & differs_G[group_N], values_N, 0.0)
    return Advantages(values_N.astype(np.float32), used_N, int(used_G.sum()))
