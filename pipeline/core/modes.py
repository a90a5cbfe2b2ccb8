"""Modes of placement: which roles may share which slots."""

from collections.abc import Mapping
from enum import StrEnum

from pipeline.core.events import Role


class ModeName(StrEnum):
    COLOCATED = "colocated"
    DISAGGREGATED = "disaggregated"
    ROLLOUT_REWARD_COLOCATED = "rollout_reward_colocated"
    TRAINER_POOL = "trainer_pool"
    SHIFTABLE = "shiftable"


SHARED: Mapping[ModeName, frozenset[Role]] = {
    ModeName.COLOCATED: frozenset(Role),
    ModeName.DISAGGREGATED: frozenset(),
    ModeName.ROLLOUT_REWARD_COLOCATED: frozenset({Role.ROLLOUT, Role.REWARD}),
    ModeName.TRAINER_POOL: frozenset({Role.ROLLOUT, Role.TRAIN}),
    ModeName.SHIFTABLE: frozenset(Role),
}
"""The roles whose workers live on the same slots, of whom one is awake at a time."""
