"""`placement.planner.enabled: false`: shifts as they are written in the configuration, each made once.

Beside them only what a run cannot do without: a block that has trained gets the role back that it had before, and where
all that is left to do waits for a role that has no block, the planner's way out is taken.
"""

from collections.abc import Iterable, Sequence

from pipeline.config_planner import Shift
from pipeline.core.dag import Progress, StepProgress
from pipeline.core.events import INFERENCE, Role
from pipeline.core.planner.planner import STUCK, Plan
from pipeline.watching.ports import Block, WatchedCore

_MOMENTS = ("admitted", "rolled_out", "judged", "trained")
_OVER = {"admitted": "prompts", "rolled_out": "rollout", "judged": "reward"}
"""The stage whose end the moment is."""


class ByHand:
    def __init__(self, schedule: Sequence[Shift]) -> None:
        self._due = sorted(schedule, key=lambda shift: (shift.step, _MOMENTS.index(shift.at)))
        self._waiting: dict[int, Role] = {}  # what is due and could not be done yet
        self._had: dict[int, Role] = {}

    def moves(self, core: WatchedCore, blocks: Iterable[Block], is_free: Iterable[int]) -> dict[int, Role]:
        """`is_free`: the blocks that can be given a role now."""
        come = [shift for shift in self._due if has_come(core, shift)]
        self._due = [shift for shift in self._due if shift not in come]
        for shift in come:
            self._waiting |= dict.fromkeys(shift.blocks, Role(shift.role))
        free, moves = set(is_free), {}
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
                moves[block.index] = role
        return moves


def has_come(core: WatchedCore, shift: Shift) -> bool:
    """Whether that moment of that step is there, or over."""
    step = core.steps.get(shift.step)
    if step is None:
        return shift.step < min(core.steps, default=0)
    if shift.at == "trained":
        return core.versions.current >= shift.step
    return _is_over(step, _OVER[shift.at])


def _is_over(step: StepProgress, stage: str) -> bool:
    return step.stages[stage] in (Progress.DONE, Progress.SKIPPED)


def way_out(plan: Plan) -> dict[int, Role]:
    """Of a planner that was asked only whether the run goes on."""
    return plan.moves if plan.reason == STUCK else {}
