"""Modes of placement: which GPUs do what. All but the last are static: fixed before the run.

    colocated                  all GPUs roll out, then all judge, then all train; staleness 0
    disaggregated              fixed parts for the three roles
    rollout_reward_colocated   one part rolls out, then judges; the other trains
    trainer_pool               disaggregated, and GPUs that do not train roll out meanwhile
    shiftable                  the planner gives GPUs to roles while steps run; how many train is fixed

Judging (a run's `placement.admission`): `stream` judges each response when it is there, `barrier` all of a step
together.
"""

from dataclasses import dataclass, replace

from pipeline.core.events import Role
from pipeline.core.modes import ModeName
from pipeline.core.planner.settings import DEFAULT, PlannerSettings
from pipeline.simulator.admission import Admission
from pipeline.simulator.cluster import Block
from pipeline.simulator.setup import Setup
from pipeline.simulator.shiftable import Shiftable
from pipeline.simulator.simulation import Mode, Simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A mode with its split, in GPUs. Roles that share GPUs have the sum of both under `rollout`."""

    mode: ModeName
    rollout: int
    reward: int = 0
    train: int
    admission: Admission = Admission.STREAM
    judging: Admission = Admission.STREAM
    staleness: int = 1

    def __str__(self) -> str:
        split = "/".join(str(n) for n in (self.rollout, self.reward, self.train) if n)
        admission = "" if self.admission is Admission.STREAM else f" {self.admission.value}"
        return f"{self.mode.value}{admission} {split}"

    def bound_to(self, staleness: int, judging: Admission) -> "Schedule":
        """As a configuration has it: no staler than it allows, and judged as it says. At staleness 0 a step waits for
        the one before it to be trained, so no admission differs from another."""
        allowed = min(self.staleness, staleness)
        admission = self.admission if allowed else Admission.STREAM
        return replace(self, judging=judging, staleness=allowed, admission=admission)

    def policy(self, believed: Setup, settings: PlannerSettings = DEFAULT) -> Mode:
        """`believed`: the setup as the planner of a shiftable mode believes it to be."""
        if self.mode is ModeName.SHIFTABLE:
            return Shiftable(
                believed,
                train_gpus=self.train,
                staleness=self.staleness,
                admission=self.admission,
                judges_together=self.judging is Admission.BARRIER,
                settings=settings,
            )
        return _POLICIES[self.mode](self)


class _Static:
    """Blocks in the order rollout, reward, train. Training is started by the simulation when a step is judged."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.staleness = schedule.staleness
        self.judges_together = schedule.judging is Admission.BARRIER

    def begin(self, sim: Simulation) -> None:
        rollout, reward, train = _parts(sim, self.schedule)
        sim.train_blocks = train
        for blocks, role in ((rollout, Role.ROLLOUT), (reward, Role.REWARD), (train, Role.TRAIN)):
            for block in blocks:
                sim.bind(block, role, at_once=True)

    def may_admit(self, sim: Simulation, step: int) -> bool:
        return self.schedule.admission.admits(sim, step)

    def on_admitted(self, sim: Simulation, step: int) -> None: ...

    def on_rolled_out(self, sim: Simulation, step: int) -> None: ...

    def on_scored(self, sim: Simulation, step: int) -> None: ...

    def on_trained(self, sim: Simulation, step: int) -> None: ...


class _Phased(_Static):
    """The same GPUs roll out a step and then judge it; the next step begins when this one is judged."""

    def begin(self, sim: Simulation) -> None:
        both, _, train = _parts(sim, self.schedule)
        self.shared: list[Block] = both
        sim.train_blocks = train or both
        for block in both:
            sim.bind(block, Role.ROLLOUT, at_once=True)
        for block in train:
            sim.bind(block, Role.TRAIN, at_once=True)

    def may_admit(self, sim: Simulation, step: int) -> bool:
        return step == 0 or sim.is_scored(step - 1)

    def on_admitted(self, sim: Simulation, step: int) -> None:
        self._bind_all(sim, Role.ROLLOUT)

    def on_rolled_out(self, sim: Simulation, step: int) -> None:
        self._bind_all(sim, Role.REWARD)

    def _bind_all(self, sim: Simulation, role: Role) -> None:
        for block in self.shared:
            if block.role is not role:
                sim.bind(block, role)


class _TrainerPool(_Static):
    """GPUs that do not train roll out; a step that is judged gets them back at once."""

    def begin(self, sim: Simulation) -> None:
        super().begin(sim)
        for block in sim.train_blocks:
            sim.bind(block, Role.ROLLOUT, at_once=True)

    def on_trained(self, sim: Simulation, step: int) -> None:
        if not sim.is_scored(sim.version):
            for block in sim.train_blocks:
                sim.bind(block, Role.ROLLOUT)


_POLICIES: dict[ModeName, type[_Static]] = {
    ModeName.COLOCATED: _Phased,
    ModeName.DISAGGREGATED: _Static,
    ModeName.ROLLOUT_REWARD_COLOCATED: _Phased,
    ModeName.TRAINER_POOL: _TrainerPool,
}


def _parts(sim: Simulation, schedule: Schedule) -> tuple[list[Block], list[Block], list[Block]]:
    size = sim.setup.block
    a, b = schedule.rollout // size, (schedule.rollout + schedule.reward) // size
    total = schedule.rollout + schedule.reward + (0 if schedule.mode is ModeName.COLOCATED else schedule.train)
    if total != sim.setup.num_gpus or any(n % size for n in (schedule.rollout, schedule.reward, schedule.train)):
        raise ValueError(f"{schedule} does not divide {sim.setup.num_gpus} GPUs into blocks of {size}")
    if schedule.mode is ModeName.COLOCATED:
        return sim.blocks, [], []
    return sim.blocks[:a], sim.blocks[a:b], sim.blocks[b:]


def train_sizes(setup: Setup) -> list[int]:
    """Whole nodes; within a single node, blocks. What memory holds is not asked here (`TrainCost.fits`)."""
    unit = max(setup.gpus_per_node, setup.block) if setup.num_gpus > setup.gpus_per_node else setup.block
    return list(range(unit, setup.num_gpus + 1, unit))


def shiftable_schedule(setup: Setup, train: int, admission: Admission = Admission.PAIRS) -> Schedule:
    return Schedule(mode=ModeName.SHIFTABLE, rollout=setup.num_gpus, train=train, admission=admission)


def static_schedules(setup: Setup) -> list[Schedule]:
    """All that are compared: each training size, and the rest split 3:1, 1:1 and 1:3 between rollout and reward."""
    block = setup.block
    found = [Schedule(mode=ModeName.COLOCATED, rollout=setup.num_gpus, train=setup.num_gpus, staleness=0)]
    for train in train_sizes(setup):
        free = (setup.num_gpus - train) // block
        if free < 1:
            continue
        found.append(Schedule(mode=ModeName.ROLLOUT_REWARD_COLOCATED, rollout=free * block, train=train))
        for reward in dict.fromkeys(min(free - 1, max(1, round(free * share))) for share in (0.25, 0.5, 0.75)):
            if free < 2:
                continue
            split = Schedule(
                mode=ModeName.DISAGGREGATED, rollout=(free - reward) * block, reward=reward * block, train=train
            )
            found += [replace(split, admission=Admission.BARRIER), split, replace(split, mode=ModeName.TRAINER_POOL)]
    return found
