"""A core whose blocks change hands when a test says so; what it has beside them is real."""

from dataclasses import dataclass, field

from pipeline.core.dag import Progress, StepProgress
from pipeline.core.events import Role
from pipeline.core.fleet import Fleet
from pipeline.core.sequences import Sequences
from pipeline.core.steps import RunPlan, Steps
from pipeline.core.versions import Versions
from pipeline.core.worker import Worker, WorkerState
from pipeline.queue.schema import sequence_id

EVERY = (Role.ROLLOUT, Role.REWARD, Role.TRAIN)


@dataclass(slots=True)
class FakeBlock:
    index: int
    node: str
    node_number: int
    slots: tuple[int, ...]
    roles: tuple[Role, ...] = EVERY
    wanted: Role | None = None


@dataclass(slots=True)
class FakeBlocks:
    all: list[FakeBlock]
    train: tuple[int, ...]
    size: int = 1
    held: dict[int, Role] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    def held_by(self, block: FakeBlock) -> Role | None:
        return self.held.get(block.index)

    def is_lost(self, block: FakeBlock) -> bool:
        return block.index in self.lost


class FakeCore:
    """`num` blocks of one slot on nodes of `per_node`, each with a worker of every role; `train` of them train."""

    def __init__(self, plan: RunPlan, num: int, *, per_node: int = 8, train: tuple[int, ...] = ()) -> None:
        self.plan, self.sequences, self.steps = plan, Sequences(), Steps(plan)
        self.versions, self.fleet = Versions(), Fleet(())
        self.blocks = FakeBlocks(
            [FakeBlock(i, f"n{i // per_node}", i // per_node, (i % per_node,)) for i in range(num)], train
        )
        for block in self.blocks.all:
            for role in EVERY:
                name = f"{role}-{block.index}"
                self.fleet.workers[name] = Worker(name, role, block.index, block.node, block.slots)

    def bind(self, role: Role, *blocks: int) -> None:
        """They serve the role."""
        for index in blocks:
            block = self.blocks.all[index]
            block.wanted = self.blocks.held[index] = role
            for other in EVERY:
                state = WorkerState.READY if other is role else WorkerState.DEAD
                self.fleet.workers[f"{other}-{index}"].state = state

    def admit(self, step: int) -> list[str]:
        """Of the run's step all sequences come."""
        ids = [sequence_id(step, i // 2, i % 2) for i in range(self.plan.sequences_per_step)]
        self.steps[step] = StepProgress.open(step, set())
        self.steps[step].stages["prompts"] = Progress.DONE
        self.sequences.admit(step, ids)
        return ids

    def progress(self, step: int, now: float, **stages: Progress) -> None:
        found = self.steps[step]
        found.stages |= stages
        for stage, progress in stages.items():
            if progress is Progress.RUNNING:
                found.started[stage] = now
