"""The guard: at submit, simulate what is believed and take the schedule that is predicted to be the fastest.

Every static mode is among the candidates, and shiftable placement is chosen only where it is predicted to win. The
number of GPUs that train is chosen with it, and stays.

What cannot be the choice is not simulated to the end: a candidate whose `ceiling`, what work alone would allow it, is
below the best so far; and one that is far behind another after a few steps, which are the same steps for all.
"""

import time
from collections.abc import Iterable
from dataclasses import replace

from pipeline.core.errors import ConfigError
from pipeline.core.events import Role
from pipeline.core.modes import ModeName
from pipeline.core.planner.settings import DEFAULT, PlannerSettings
from pipeline.simulator.admission import Admission
from pipeline.simulator.choice import Choice
from pipeline.simulator.modes import Schedule, shiftable_schedule, static_schedules, train_sizes
from pipeline.simulator.result import Bounds, window
from pipeline.simulator.setup import Setup
from pipeline.simulator.simulation import Simulation

MARGIN = 1.02
"""Shiftable is chosen if predicted this much above the best static schedule: predictions of two modes differ by as much
by chance."""
NUM_STEPS, _NUM_SKIPPED = 10, 3
_LOOK, _LOOK_SKIPPED = 5, 2
"""Steps after which a candidate may be given up, and how many of these do not count."""
_FAR_BEHIND, _BEHIND = 0.90, 0.93
"""Of the best speed in those steps: below it a static, a shiftable candidate is given up. In 12 cells (4 pairs of
models, 3 kinds of GPUs) the best static one was never below .95 of the best of its kind there, the best shiftable one
never below .938."""
_NUM_FINAL = 2
"""Shiftable training sizes that are simulated to the end."""
_BY_CHANCE = 1.03
"""A drawn step may be so much shorter than the mean one, from which ceilings are reckoned."""
MOST_GPUS = 32
"""A larger cluster is chosen for on one of this size or less, with as many sequences per GPU: time grows with the
number of training sizes and with that of the GPUs, and half a minute is enough to wait at submit."""
_SEED = 101


def choose(
    believed: Setup,
    *,
    settings: PlannerSettings = DEFAULT,
    staleness: int = 1,
    judging: Admission = Admission.STREAM,
    skips: bool = True,
) -> Choice:
    """`skips`: False simulates all candidates to the end. Raises ConfigError if no training size fits into memory."""
    began, scale = time.process_time(), scale_of(believed)
    small = believed.scaled_down(scale)
    choice = _Search(small, settings, staleness, judging, skips).run()
    if scale > 1:
        choice = choice.of_whole(scale, believed.workload.num_prompts / small.workload.num_prompts)
    return replace(choice, took_s=time.process_time() - began)


def scale_of(setup: Setup) -> int:
    """How many times smaller the cluster is that is simulated for the choice."""
    for scale in range(1, setup.num_gpus + 1):
        num = setup.num_gpus // scale
        unit = max(setup.block, setup.gpus_per_node)
        if num <= MOST_GPUS and setup.num_gpus % scale == 0 and num % unit == 0 and scale <= setup.workload.num_prompts:
            return scale
    return 1


def ceiling(setup: Setup, schedule: Schedule) -> float:
    """Sequences per second that the schedule cannot exceed: each GPU at its most efficient whenever it may work."""
    train_s, num = setup.train_s(schedule.train), setup.workload.num_sequences
    least = Bounds.of(setup, schedule.train, schedule.staleness).least_gpu_s
    rollout, reward, train = (least[role] for role in (Role.ROLLOUT, Role.REWARD, Role.TRAIN))
    limits = [num / train_s]
    match schedule.mode:
        case ModeName.COLOCATED | ModeName.SHIFTABLE:
            limits.append(setup.num_gpus / (rollout + reward + train))
        case ModeName.ROLLOUT_REWARD_COLOCATED:
            limits.append(schedule.rollout / (rollout + reward))
        case ModeName.DISAGGREGATED:
            limits += [schedule.rollout / rollout, schedule.reward / reward]
        case ModeName.TRAINER_POOL:
            limits += [(schedule.rollout + schedule.train) / (rollout + train), schedule.reward / reward]
    return min(limits)


class _Search:
    def __init__(
        self, believed: Setup, settings: PlannerSettings, staleness: int, judging: Admission, skips: bool
    ) -> None:
        self.believed, self.settings, self.skips = believed, settings, skips
        self.staleness, self.judging = staleness, judging
        self.found: dict[Schedule, float] = {}
        self.dropped: dict[Schedule, float] = {}
        self.early: dict[Schedule, float] = {}
        self.ceilings: dict[Schedule, float] = {}

    def run(self) -> Choice:
        fits = self.believed.train.fits
        static = [s for s in static_schedules(self.believed) if fits(s.train)]
        if not static:
            raise ConfigError(
                f"no schedule fits: training {self.believed.policy.parameters / 1e9:.1f}e9 parameters does not fit "
                f"into {self.believed.num_gpus * self.believed.scale} GPUs; valid: more of them, or larger ones"
            )
        self._run_static(static)
        best = max(self.found, key=lambda s: self.found[s])
        self._race(shiftable_schedule(self.believed, size) for size in train_sizes(self.believed) if fits(size))
        top = self._best_shiftable()
        if top and self.found[top] > MARGIN * self.found[best]:
            best = top
        ranked = dict(sorted(self.found.items(), key=lambda item: -item[1]))
        return Choice(schedule=best, predicted=ranked, dropped=self.dropped)

    def _run_static(self, schedules: Iterable[Schedule]) -> None:
        """The most promising first."""
        for schedule in self._promising(schedules):
            if sim := self._begin(schedule):
                if self.skips and self.early[schedule] < _FAR_BEHIND * max(self.early.values()):
                    self.dropped[schedule] = self.early[schedule]
                else:
                    self._finish(schedule, sim)

    def _race(self, schedules: Iterable[Schedule]) -> None:
        """All a few steps, then those that are not behind to the end."""
        begun = {schedule: sim for schedule in self._promising(schedules) if (sim := self._begin(schedule))}
        best = max((v for s, v in self.early.items() if s.mode is ModeName.SHIFTABLE), default=0.0)
        for rank, schedule in enumerate(sorted(begun, key=lambda s: -self.early[s])):
            if self.skips and (rank >= _NUM_FINAL or self.early[schedule] < _BEHIND * best):
                self.dropped[schedule] = self.early[schedule]
            else:
                self._finish(schedule, begun[schedule])

    def _promising(self, schedules: Iterable[Schedule]) -> list[Schedule]:
        bound = dict.fromkeys(s.bound_to(self.staleness, self.judging) for s in schedules)
        self.ceilings |= {s: ceiling(self.believed, s) for s in bound}
        return sorted(bound, key=lambda s: -self.ceilings[s])

    def _begin(self, schedule: Schedule) -> Simulation | None:
        """None: it cannot win."""
        if self.skips and self.ceilings[schedule] * _BY_CHANCE < max(self.found.values(), default=0.0):
            self.dropped[schedule] = self.ceilings[schedule]
            return None
        mode = schedule.policy(self.believed, self.settings)
        sim = Simulation(self.believed, mode, seed=_SEED, num_steps=NUM_STEPS)
        sim.run_until(_LOOK)
        self.early[schedule] = _speed(sim, _LOOK_SKIPPED)
        return sim

    def _finish(self, schedule: Schedule, sim: Simulation) -> None:
        sim.run_until(NUM_STEPS)
        self.found[schedule] = _speed(sim, _NUM_SKIPPED)

    def _best_shiftable(self) -> Schedule | None:
        found = [s for s in self.found if s.mode is ModeName.SHIFTABLE]
        return max(found, key=lambda s: self.found[s], default=None)


def _speed(sim: Simulation, num_skipped: int) -> float:
    ends = [step.trained_s for step in sim.steps if step.trained_s is not None]
    first, last = window(len(ends), num_skipped)
    return sim.setup.workload.num_sequences * (last - first) / (ends[last] - ends[first])
