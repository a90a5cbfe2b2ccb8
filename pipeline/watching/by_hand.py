"""`placement.planner.enabled: false`: shifts as they are written in the configuration, each made once.

What cannot be done when its moment comes, because the block trains or is lost, is done when it can be. A block that has
trained, and is given nothing else, gets the role back that it had before.
"""

from collections.abc import Collection, Iterable, Sequence

from pipeline.config_planner import Shift
from pipeline.core.events import INFERENCE, Role
from pipeline.watching.ports import Block, WatchedCore

_MOMENTS = ("admitted", "rolled_out", "judged", "trained")
_OVER = {"admitted": "prompts", "rolled_out": "rollout", "judged": "reward", "trained": "train"}
"""The stage whose end the moment is."""


class ByHand:
    def __init__(self, schedule: Sequence[Shift]) -> None:
        self._due = sorted(schedule, key=lambda shift: (shift.step, _MOMENTS.index(shift.at)))
        self._waiting: dict[int, Role] = {}  # what is due and could not be done yet
        self._had: dict[int, Role] = {}

    def moves(self, core: WatchedCore, blocks: Iterable[Block], free: Collection[int]) -> dict[int, Role]:
        """`free`: the blocks that can be given a role now."""
        come = [shift for shift in self._due if has_come(core, shift)]
        self._due = [shift for shift in self._due if shift not in come]
        for shift in come:
            self._waiting |= dict.fromkeys(shift.blocks, Role(shift.role))
        moves: dict[int, Role] = {}
        for block in blocks:
            allowed = [role for role in block.roles if role in INFERENCE]
            if block.wanted in INFERENCE:
                self._had[block.index] = block.wanted
            if block.index not in free or not allowed:
                continue
            role = self._waiting.pop(block.index, None)
            if role is None and block.wanted not in INFERENCE:
                role = self._had.get(block.index, allowed[0])
            if role in allowed and role is not block.wanted:
                moves[block.index] = self._had[block.index] = role
        return moves


def has_come(core: WatchedCore, shift: Shift) -> bool:
    """Whether that moment of that step is there, or over."""
    step = core.steps.get(shift.step)
    return shift.step < min(core.steps, default=0) if step is None else step.is_over(_OVER[shift.at])
