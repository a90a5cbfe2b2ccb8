"""What a decision of the planner was worth: predicted when it was made, measured when it is seen.

The value of a split is (`core/planner/lookahead.py`, docs/policies/planner.md), with A the oldest step that was neither
judged nor trained, B the next, C the one after:

    t_B + .02 t_A + .05 j_B + (work left of C at t_B) / slots        seconds since the decision

All of it can be seen in the run once B can be trained. What would have happened otherwise cannot: staying is only
predicted. So

    measured gain = predicted value of staying - measured value
    regret        = predicted gain - measured gain    (= measured - predicted value)

The measured value is that of the run as it went on, with all decisions after this one and all that happened by chance.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.core.events import INFERENCE, Role
from pipeline.core.planner.bindings import Bindings
from pipeline.core.planner.lookahead import EARLY, SLACK
from pipeline.core.planner.planner import Plan
from pipeline.core.planner.preprocess import preprocess
from pipeline.core.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Of the split that a plan took. `first`: step A, as the planner counts; `has_next`: B was under way, or about to
    be; else the value is until A is trained."""

    number: int
    at_s: float
    first: int
    has_next: bool
    value_s: float
    gain_s: float
    is_shift: bool

    def due_s(self, judged: Mapping[int, float], published: Mapping[int, float]) -> float | None:
        """When B could be trained; None: not yet."""
        trained, scored = published.get(self.first + 1), judged.get(self.first + 1)
        if trained is None or (self.has_next and scored is None):
            return None
        return max(trained, scored) if self.has_next and scored is not None else trained


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    prediction: Prediction
    measured_s: float

    @property
    def gain_s(self) -> float:
        return self.prediction.value_s + self.prediction.gain_s - self.measured_s

    @property
    def regret_s(self) -> float:
        return self.prediction.gain_s - self.gain_s


def predict(number: int, snapshot: Snapshot, plan: Plan, bindings: Bindings) -> Prediction | None:
    """None: the plan compared nothing."""
    if plan.chosen < 0:
        return None
    chosen, picture = plan.candidates[plan.chosen], preprocess(snapshot, bindings)
    enters = picture.enters[1]
    is_there = any(data.ages[1].any() or data.waiting[1] for data in (picture.rollout, picture.reward))
    return Prediction(
        number=number,
        at_s=snapshot.at_s,
        first=snapshot.version + (1 if picture.is_training else 0),
        has_next=is_there or (enters is not None and enters != float("inf")),
        value_s=chosen.value_s,
        gain_s=chosen.gain_s,
        is_shift=bool(plan.moves),
    )


def measure(
    prediction: Prediction, judged: Mapping[int, float], published: Mapping[int, float], due_s: float, then: Snapshot
) -> Worth:
    """`then`: a picture of the moment `due_s`, when B could be trained."""
    at_s, first = prediction.at_s, prediction.first
    start_s = max(judged.get(first, at_s), published.get(first, at_s), at_s)
    value_s = due_s - at_s + EARLY * (start_s - at_s)
    if prediction.has_next:
        value_s += SLACK * max(0.0, judged[first + 1] - at_s)
    slots = len(then.blocks) * then.block_slots
    return Worth(prediction=prediction, measured_s=value_s + left_of(then, first + 2) / slots)


def left_of(snapshot: Snapshot, step: int) -> float:
    """Slot-seconds that are to be done for a step, both roles; all of it, if it has not begun."""
    if step >= snapshot.num_steps:
        return 0.0
    data = preprocess(snapshot)
    if step >= snapshot.num_admitted:
        return data.step_slot_s
    work = dict.fromkeys(INFERENCE, 0.0)
    for role in INFERENCE:
        of = data.role(role)
        for crowd in snapshot.role(role).crowds:
            if crowd.step == step:
                to_go = of.residual / of.mean
                work[role] = crowd.num_waiting + float(sum(n * g for n, g in zip(crowd.ages, to_go, strict=True)))
    both_s = data.rollout.slot_s + data.reward.slot_s
    return work[Role.ROLLOUT] * both_s + work[Role.REWARD] * data.reward.slot_s
