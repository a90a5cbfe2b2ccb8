"""The guard: at submit, simulate what is believed and take the schedule that is predicted to be the fastest.

Every static mode is among the candidates, and shiftable placement is chosen only where it is predicted to win. The
number of GPUs that train is chosen with it, and stays.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.core.planner.settings import DEFAULT, PlannerSettings
from pipeline.simulator.admission import Admission
from pipeline.simulator.modes import (
    ModeName,
    Schedule,
    shiftable_schedule,
    static_schedules,
    train_sizes,
)
from pipeline.simulator.result import simulate
from pipeline.simulator.setup import Setup

MARGIN = 1.02
"""Shiftable is chosen if predicted this much above the best static schedule: predictions of two modes differ by as much
by chance."""
NUM_STEPS = 10
_SEED = 101
_ORDER = {
    mode: index
    for index, mode in enumerate(
        (ModeName.COLOCATED, ModeName.ROLLOUT_REWARD_COLOCATED, ModeName.DISAGGREGATED, ModeName.TRAINER_POOL)
    )
}
_HOPELESS = 1.002
"""A schedule whose training alone takes so long is not simulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    schedule: Schedule
    predicted: dict[Schedule, float]
    """Sequences per second of all that were simulated, best first."""

    @property
    def gain(self) -> float:
        """Predicted speed of the choice over that of the best static schedule, or of the best of all others."""
        others = [v for s, v in self.predicted.items() if s.mode is not ModeName.SHIFTABLE and s != self.schedule]
        return self.predicted[self.schedule] / max(others, default=self.predicted[self.schedule])


def choose(believed: Setup, *, settings: PlannerSettings = DEFAULT, staleness: int = 1) -> Choice:
    found: dict[Schedule, float] = {}

    def run(schedules: Iterable[Schedule]) -> None:
        for schedule in schedules:
            if schedule in found or not believed.train.fits(schedule.train):
                continue
            ceiling = believed.workload.num_sequences / believed.train_s(schedule.train)
            if ceiling > _HOPELESS * max(found.values(), default=0.0):
                mode = schedule.policy(believed, settings)
                found[schedule] = simulate(believed, mode, seed=_SEED, num_steps=NUM_STEPS).sequences_per_s

    run(sorted(static_schedules(believed), key=lambda s: (_ORDER[s.mode], -s.train)))
    best = max(found, key=lambda s: found[s])
    sizes = train_sizes(believed)
    run(shiftable_schedule(believed, size) for size in reversed(sizes[1:] or sizes))
    shiftable = [s for s in found if s.mode is ModeName.SHIFTABLE]
    if shiftable:
        top = max(shiftable, key=lambda s: found[s])
        run([shiftable_schedule(believed, top.train, Admission.STREAM)])
        top = max((s for s in found if s.mode is ModeName.SHIFTABLE), key=lambda s: found[s])
        if found[top] > MARGIN * found[best]:
            best = top
    return Choice(schedule=best, predicted=dict(sorted(found.items(), key=lambda item: -item[1])))
