"""Which roles a block may be given: modes of placement as masks over one planner.

A training takes its blocks whatever the mask says; the mask is about the time in which they do not train.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pipeline.core.events import INFERENCE, Role


@dataclass(frozen=True, slots=True, kw_only=True)
class Bindings:
    """Inference roles, by block index. A block that is not named may serve both; one with neither only trains."""

    roles: Mapping[int, tuple[Role, ...]] = field(default_factory=dict)

    def of(self, block: int) -> tuple[Role, ...]:
        return self.roles.get(block, INFERENCE)


ANY = Bindings()
"""Shiftable: each block may do everything."""


def rollout_reward_only(train: Iterable[int]) -> Bindings:
    """Rollout and reward exchange blocks; those that train do nothing else."""
    return Bindings(roles=dict.fromkeys(train, ()))


def training_only(*, rollout: Iterable[int], reward: Iterable[int], train: Iterable[int]) -> Bindings:
    """The split between rollout and reward stays; the blocks that train join rollout when they do not."""
    rolls_out = dict.fromkeys((*rollout, *train), (Role.ROLLOUT,))
    return Bindings(roles=rolls_out | dict.fromkeys(reward, (Role.REWARD,)))
