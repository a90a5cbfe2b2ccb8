"""Questions to the planner and what came of them, until each can be told what it was worth."""

import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.config_planner import Planner
from pipeline.core.events import INFERENCE, PlanMade, Role
from pipeline.core.planner.bindings import Bindings
from pipeline.core.planner.planner import Plan
from pipeline.core.planner.planner import decide as by_model
from pipeline.core.planner.settings import PlannerSettings
from pipeline.core.snapshot import Snapshot
from pipeline.watching.by_hand import ByHand
from pipeline.watching.ports import Places, WatchedCore
from pipeline.watching.progress import Progress
from pipeline.watching.shifts import Shift
from pipeline.watching.worth import Prediction, Worth, measure, predict

Decide = Callable[[Snapshot, PlannerSettings, Bindings], Plan]
_MOST_OPEN = 256
"""Predictions whose end is awaited: those of several cycles."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """To one question. `by_hand`: what the schedule says; None: the planner decides."""

    number: int
    cause: str
    snapshot: Snapshot
    settings: PlannerSettings
    bindings: Bindings
    decide: Decide
    by_hand: dict[int, Role] | None = None
    moves: dict[int, Role] = field(default_factory=dict)
    reason: str = ""
    cycle_s: float = 0.0
    plan: Plan | None = None
    prediction: Prediction | None = None
    took_s: float = 0.0

    def find(self) -> None:
        """Takes some milliseconds of processor time: not for the loop."""
        if self.by_hand is not None:
            self.moves, self.reason = self.by_hand, "as scheduled" if self.by_hand else "nothing is scheduled"
            return
        began = time.thread_time()
        self.plan = plan = self.decide(self.snapshot, self.settings, self.bindings)
        self.moves, self.reason, self.cycle_s = plan.moves, plan.reason, plan.cycle_s
        self.prediction = predict(self.number, self.snapshot, plan, self.bindings)
        self.took_s = time.thread_time() - began

    def event(self) -> PlanMade:
        again_s = self.settings.every_s(self.cycle_s or self.snapshot.cycle_s)
        return PlanMade(number=self.number, moves=tuple(self.moves.items()), reason=self.reason, again_s=again_s)

    def fail(self, error: BaseException) -> None:
        self.moves, self.plan, self.prediction = {}, None, None
        self.reason = f"the planner failed: {error!r}"

    def line(self) -> dict[str, Any]:
        seen, plan = self.snapshot, self.plan
        is_training = seen.train.left_s is not None or seen.train.is_waiting
        return {
            "number": self.number,
            "cause": self.cause,
            "version": seen.version,
            "step": min(seen.version + (2 if is_training else 1), seen.num_steps),
            "reason": self.reason,
            "moves": {str(block): role for block, role in self.moves.items()},
            "blocks": {role: [b.index for b in seen.blocks if b.role is role] for role in Role},
            "block_slots": seen.block_slots,
            "candidates": [asdict(candidate) for candidate in plan.candidates] if plan else [],
            "chosen": plan.chosen if plan else -1,
            "cycle_s": self.cycle_s,
            "took_s": self.took_s,
        }


class Planning:
    def __init__(self, core: WatchedCore, places: Places, planner: Planner, decide: Decide | None = None) -> None:
        self._core, self._places = core, places
        self._settings, self._decide = planner.settings(), decide or by_model
        self._by_hand = None if planner.enabled else ByHand(planner.schedule)
        self._open: list[Prediction] = []
        self._shifts: list[Shift] = []
        self._asked_s: list[float] = []

    def question(self, number: int, cause: str, snapshot: Snapshot) -> Answer:
        blocks = self._places.all
        allowed = {block.index: tuple(role for role in INFERENCE if role in block.roles) for block in blocks}
        by_hand = None
        if self._by_hand:
            free = [b.index for b in blocks if b.wanted is not Role.TRAIN and not self._places.is_lost(b)]
            by_hand = self._by_hand.moves(self._core, blocks, free)
        return Answer(
            number=number,
            cause=cause,
            snapshot=snapshot,
            settings=self._settings,
            bindings=Bindings(roles=allowed),
            decide=self._decide,
            by_hand=by_hand,
        )

    def keep(self, answer: Answer) -> None:
        """It was given."""
        self._asked_s.append(answer.took_s)
        if answer.prediction is not None:
            self._open = [*self._open, answer.prediction][-_MOST_OPEN:]

    def due(self, progress: Progress) -> list[tuple[float, Prediction]]:
        """The predictions whose moment has come, and when that was. Each once."""
        judged, published = progress.judged, progress.published
        found = [(due_s, p) for p in self._open if (due_s := p.due_s(judged, published)) is not None]
        if found:
            self._open = [p for p in self._open if all(p is not closed for _, closed in found)]
        return found

    def shifted(self, shift: Shift) -> None:
        self._shifts.append(shift)

    def since(self) -> tuple[list[Shift], dict[str, float]]:
        """Since this was asked last: the shifts that have ended, and figures of the planner."""
        shifts, self._shifts = self._shifts, []
        asked_s, self._asked_s = self._asked_s, []
        found = {"planner/num_asked": float(len(asked_s))}
        if asked_s:
            found["planner/tick_ms"] = 1e3 * sum(asked_s) / len(asked_s)
        return shifts, found


def weigh(
    predictions: Iterable[tuple[float, Prediction]],
    judged: dict[int, float],
    published: dict[int, float],
    then: Snapshot,
) -> list[Worth]:
    """`then`: a picture of the moment that they were about."""
    return [measure(prediction, judged, published, due_s, then) for due_s, prediction in predictions]


def worth_line(worth: Worth) -> dict[str, Any]:
    made = worth.prediction
    return {
        "number": made.number,
        "is_shift": made.is_shift,
        "predicted_s": made.value_s,
        "predicted_gain_s": made.gain_s,
        "measured_s": worth.measured_s,
        "measured_gain_s": worth.gain_s,
        "regret_s": worth.regret_s,
    }
