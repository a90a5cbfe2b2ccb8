"""What waits for whom, what is wanted of the blocks because of it, and when the planner is asked."""

from collections.abc import Iterable

from pipeline.core.crew import Crew
from pipeline.core.dag import Progress, StepProgress
from pipeline.core.decisions import AskPlanner
from pipeline.core.events import INFERENCE, PlanMade, Role
from pipeline.core.modes import ModeName
from pipeline.core.outbox import Outbox
from pipeline.core.placing import Needs, Placing
from pipeline.core.sequences import RUNNING, WAITING, Sequences
from pipeline.core.steps import RunPlan, Steps

_MOMENTS = {"prompts": "admitted", "rollout": "rolled out", "reward": "judged", "train": "trained"}
"""The ends of stages at which the planner is asked."""
_Mark = tuple[int, str]


class Placement:
    def __init__(self, plan: RunPlan, out: Outbox, crew: Crew, steps: Steps, sequences: Sequences) -> None:
        self._out, self._crew, self._steps, self._sequences = out, crew, steps, sequences
        self._is_asked_for = plan.mode is ModeName.SHIFTABLE and plan.has_planner
        self._answer_s = plan.shift_s
        self._placing = Placing(plan.mode, crew.blocks, has_planner=plan.has_planner)
        self._marks: set[_Mark] = set()
        self._cause = ""
        self._num_asked = 0
        self._asked: int | None = None
        self._is_unanswered = False

    def settle(self, steps: Iterable[StepProgress]) -> None:
        """Want what is needed, and perform what can be."""
        if not self._crew.blocks.all:
            return
        self._look()
        self._needs = self._see(list(steps))
        is_asking = self._asked is not None or bool(self._cause)
        self._placing.settle(self._needs, is_asking=is_asking and not self._is_unanswered)
        self._crew.shifts.pursue()

    def take(self, event: PlanMade) -> None:
        """False moves, and what comes to a question that nobody asks any more, change nothing."""
        if event.number != self._asked:
            return
        self._asked, self._is_unanswered = None, False
        self._placing.plan(event.moves, self._needs)
        self._out.limit_to("plan", event.again_s, "time has passed")

    def expire(self, reason: str) -> None:
        """It is time to ask, or an answer did not come: until one comes nobody waits for it."""
        self._is_unanswered = self._asked is not None
        self._asked, self._cause = None, reason

    def ask(self) -> None:
        """At the end of each event: the planner, if something has happened and it does not think already."""
        if not self._is_asked_for or not self._crew.blocks.all:
            return
        self._look()
        if self._cause and self._asked is None:
            self._num_asked += 1
            self._asked = self._num_asked
            self._out.emit(AskPlanner(number=self._asked, cause=self._cause))
            self._out.limit_to("plan", self._answer_s, "no answer came")
            self._cause = ""

    def _look(self) -> None:
        """What has happened since is to be asked about: until then nobody decides in the planner's place."""
        if not self._is_asked_for:
            return
        marks = self._see_marks()
        if new := sorted(marks - self._marks):
            self._cause = f"step {new[-1][0]} {new[-1][1]}" if new[-1][0] >= 0 else new[-1][1]
        self._marks = marks

    def _see_marks(self) -> set[_Mark]:
        found = {
            (step.step, word)
            for step in self._steps.values()
            for stage, word in _MOMENTS.items()
            if step.stages[stage] is Progress.DONE
        }
        for block in self._crew.blocks.all:
            if self._crew.blocks.is_lost(block):
                found.add((-1, f"block {block.index} is lost"))
            elif block.wanted is None:
                found.add((-1, f"block {block.index} has no role"))
        if not self._crew.shifts.is_moving:
            found.add((-1, "all shifts are done"))
        return found

    def _see(self, steps: list[StepProgress]) -> Needs:
        fleet = self._crew.fleet
        ranks = [w for w in fleet.workers.values() if w.role is Role.TRAIN]
        waits = self._steps.is_waited_for
        num = {
            role: self._sequences.num_at(WAITING[role]) + self._sequences.num_at(RUNNING[role]) for role in INFERENCE
        }
        return Needs(
            rollout=num[Role.ROLLOUT] > 0
            or any(waits(stage, step) for step in steps for stage in ("prompts", "evaluate")),
            reward=Role.REWARD in fleet.shared
            and num[Role.REWARD] > 0
            and any(waits("reward", step) for step in steps),
            train=any(rank.is_down for rank in ranks)
            or any(waits(stage, step) for step in steps for stage in ("train", "publish")),
        )
