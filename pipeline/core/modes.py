"""Modes of placement: which roles may share which slots."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from enum import StrEnum

from pipeline.core.events import Role
from pipeline.core.fleet import Fleet, Replicas


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


def shared_roles(mode: ModeName, replicas: Iterable[Replicas]) -> frozenset[Role]:
    """The roles that share slots in this mode, of those that have any."""
    return SHARED[mode] - {want.role for want in replicas if not want.slots}


def fill(mode: ModeName, wanted: Iterable[Replicas], node_slots: Iterable[int]) -> tuple[Replicas, ...]:
    """What is wanted, with as many replicas of each inference role that shares slots as nodes of so many slots have
    room for."""
    wanted = list(wanted)
    slots, shared = list(node_slots), shared_roles(mode, wanted)
    most = [
        replace(want, replicas=sum(slots)) if want.role in shared and want.role is not Role.TRAIN else want
        for want in wanted
    ]
    fleet = Fleet(most, shared)
    for number, num_slots in enumerate(slots):
        fleet.join(str(number), num_slots)
    fleet.place()
    placed = Counter(worker.role for worker in fleet.workers.values())
    return tuple(
        replace(want, replicas=placed[want.role]) if want.role in shared and want.role is not Role.TRAIN else want
        for want in most
    )
