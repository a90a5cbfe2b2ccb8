"""Which block is wanted for which role: the modes of placement.

    colocated, rollout_reward_colocated   all blocks roll out, then all judge, then those that train do
    trainer_pool                          blocks that train roll out meanwhile
    shiftable                             blocks that train do so as soon as a step is judged; the planner says the rest

A policy: it reads what waits and says what is wanted. Whoever performs it does so as soon as the slots are free.
"""

from dataclasses import dataclass

from pipeline.core.blocks import Block, Blocks
from pipeline.core.events import INFERENCE, Role
from pipeline.core.modes import ModeName


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """Whether something waits that only a worker of the role with its slots can do."""

    rollout: bool
    reward: bool
    train: bool

    def of(self, role: Role) -> bool:
        return {Role.ROLLOUT: self.rollout, Role.REWARD: self.reward, Role.TRAIN: self.train}[role]


class Placing:
    """Sets `wanted` of each block. `has_planner`: somebody is asked what blocks do that do not train."""

    def __init__(self, mode: ModeName, blocks: Blocks, *, has_planner: bool) -> None:
        self._mode, self._blocks, self._has_planner = mode, blocks, has_planner
        self._phase = Role.ROLLOUT

    def settle(self, needs: Needs, *, is_asking: bool) -> None:
        """`is_asking`: the planner's answer is on its way."""
        for block in self._blocks.all:
            if self._blocks.is_lost(block):
                block.wanted = None
            elif needs.train and block.trains:
                self._take_for_training(block)
            else:
                block.wanted = self._role_of(block, needs)
        if self._mode is ModeName.SHIFTABLE and not is_asking:
            for role in INFERENCE:
                if needs.of(role) and not self._blocks.wants(role):
                    self._give_one(role, needs)

    def plan(self, moves: tuple[tuple[int, Role], ...], needs: Needs) -> None:
        """What the planner says, as far as it can be done: blocks that train now, or are lost, are not its business."""
        new = dict(moves)
        for block in self._blocks.all:
            role = new.get(block.index)
            if role in block.inference and not self._blocks.is_lost(block) and not (needs.train and block.trains):
                block.wanted = role

    def _take_for_training(self, block: Block) -> None:
        if block.wanted is not Role.TRAIN:
            block.before, block.wanted = block.wanted, Role.TRAIN

    def _role_of(self, block: Block, needs: Needs) -> Role | None:
        match self._mode:
            case ModeName.SHIFTABLE if self._has_planner:
                return None if block.wanted is Role.TRAIN else block.wanted
            case ModeName.SHIFTABLE:
                before = block.before if block.wanted is Role.TRAIN else block.wanted
                return before or Role.ROLLOUT
            case ModeName.TRAINER_POOL:
                return Role.ROLLOUT
            case _:
                if needs.rollout or needs.reward:
                    self._phase = Role.ROLLOUT if needs.rollout else Role.REWARD
                    return self._phase
                return block.wanted or self._phase

    def _give_one(self, role: Role, needs: Needs) -> None:
        """Nobody serves the role and something waits for it: a block that does nothing, or one of several of the
        other role, or its last one if nothing waits for that. The last of those that may."""
        other = Role.REWARD if role is Role.ROLLOUT else Role.ROLLOUT
        others = self._blocks.wants(other)
        for block in reversed(self._blocks.all):
            may = role in block.inference and not self._blocks.is_lost(block) and block.wanted is not Role.TRAIN
            if may and (block.wanted is None or len(others) > 1 or not needs.of(other)):
                block.wanted = role
                return
