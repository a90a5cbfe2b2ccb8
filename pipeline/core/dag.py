"""The step as a DAG of stages, and how far each step has come.

An edge of lag n leads from a stage of the step n before. `batch` and `record` are writes to the queue's index, the
others are stage tasks. Checkpoints come last, when the step's metric row is durable: then a run that is resumed from
checkpoint N always has the rows up to N.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.core.events import Role


class Edge(StrEnum):
    """BARRIER: the whole stage before must be done. STREAM: each sequence goes on by itself."""

    BARRIER = "barrier"
    STREAM = "stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class After:
    stage: str
    lag: int = 0
    edge: Edge = Edge.BARRIER


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`path`: the dotted name of the function that a task runs; "" for a write to the index.

    `everywhere`: one task on every ready replica of the role (they share the step's sequences) or rank of the
    training group (it ends when all have), else one task.
    """

    name: str
    role: Role | None
    path: str = ""
    after: tuple[After, ...] = ()
    everywhere: bool = False


def step_graph(staleness: int = 0, *, is_streaming: bool = False) -> tuple[Stage, ...]:
    """The stages of one step, each after those that it waits for.

    The sequences of step s are generated from version s - 1 - `staleness` on. `is_streaming`: each goes to the judge as
    soon as it is generated; else judging waits for the whole rollout, and rollout for the evaluation before it.
    """
    oldest = 1 + staleness
    before_rollout = After(stage="publish", lag=oldest)
    alone = () if is_streaming else (After(stage="evaluate", lag=oldest),)
    return (
        Stage(name="prompts", role=Role.ROLLOUT, path="stages.prompts:prompts", after=(before_rollout, *alone)),
        Stage(
            name="rollout",
            role=Role.ROLLOUT,
            path="stages.rollout:rollout",
            after=(After(stage="prompts"), before_rollout, *alone),
            everywhere=True,
        ),
        Stage(
            name="reward",
            role=Role.REWARD,
            path="stages.reward:reward",
            after=(After(stage="rollout", edge=Edge.STREAM if is_streaming else Edge.BARRIER),),
            everywhere=True,
        ),
        Stage(name="batch", role=None, after=(After(stage="rollout"), After(stage="reward"))),
        Stage(
            name="train",
            role=Role.TRAIN,
            path="stages.train:train",
            everywhere=True,
            after=(
                After(stage="batch"),
                After(stage="train", lag=1),
                After(stage="publish", lag=1),
                After(stage="checkpoint", lag=1),
            ),
        ),
        Stage(
            name="publish",
            role=Role.TRAIN,
            path="stages.train:publish",
            everywhere=True,
            # the version before would go while it is evaluated
            after=(After(stage="train"), After(stage="evaluate", lag=1)),
        ),
        Stage(name="evaluate", role=Role.ROLLOUT, path="stages.evaluate:evaluate", after=(After(stage="publish"),)),
        Stage(name="record", role=None, after=(After(stage="publish"), After(stage="evaluate"))),
        Stage(
            name="checkpoint",
            role=Role.TRAIN,
            path="stages.train:checkpoint",
            everywhere=True,
            after=(After(stage="record"), After(stage="train"), After(stage="publish")),
        ),
    )


STAGES = step_graph()
"""For those who ask only for names, roles and paths: no plan changes these."""


class Progress(StrEnum):
    PENDING = "pending"
    RUNNING = "running"
    DONE = "done"
    SKIPPED = "skipped"


@dataclass(slots=True)
class StepProgress:
    """How far one step has come. `tasks`: the living tasks of a running stage, task id to worker."""

    step: int
    stages: dict[str, Progress] = field(default_factory=dict)
    tasks: dict[str, dict[str, str]] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    ended: dict[str, float] = field(default_factory=dict)

    @classmethod
    def open(cls, step: int, skip: set[str]) -> "StepProgress":
        return cls(step, {s.name: Progress.SKIPPED if s.name in skip else Progress.PENDING for s in STAGES})

    @classmethod
    def closed(cls, step: int, skip: set[str] | None = None) -> "StepProgress":
        """A step of which nothing is left to do; without `skip`: one that a checkpoint covers."""
        return cls(step, {s.name: Progress.SKIPPED if s.name in (skip or ()) else Progress.DONE for s in STAGES})

    def is_over(self, stage: str) -> bool:
        progress = self.stages[stage]
        return progress is Progress.DONE or progress is Progress.SKIPPED

    @property
    def is_closed(self) -> bool:
        found = self.stages.values()
        return Progress.PENDING not in found and Progress.RUNNING not in found

    def begin(self, stage: str, now: float) -> None:
        assert self.stages[stage] is Progress.PENDING, (self.step, stage, self.stages[stage])
        self.stages[stage] = Progress.RUNNING
        self.tasks[stage] = {}
        self.started[stage] = now
        self.ended.pop(stage, None)

    def finish(self, stage: str, now: float) -> None:
        assert self.stages[stage] is Progress.RUNNING, (self.step, stage, self.stages[stage])
        self.stages[stage] = Progress.DONE
        self.tasks.pop(stage)
        self.ended[stage] = now

    def spans(self, now: float) -> list[tuple[str, float, float]]:
        """Stage, begin and end, of each stage that has begun; `now` for one that has not ended."""
        return [(stage, start, self.ended.get(stage, now)) for stage, start in self.started.items()]


class Graph:
    """Answers, after every event, what may begin."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.stages = stages
        self._waits_for = {
            stage.name: tuple((after.stage, after.lag, after.edge is Edge.STREAM) for after in stage.after)
            for stage in stages
        }

    def is_ready(self, stage: str, step: int, steps: Mapping[int, StepProgress]) -> bool:
        """All stages that it waits for are over, or where each sequence goes on by itself, have begun. A step that is
        not among `steps` is closed."""
        for name, lag, is_stream in self._waits_for[stage]:
            found = steps.get(step - lag)
            if found is None:
                continue
            progress = found.stages[name]
            if progress is Progress.PENDING or (progress is Progress.RUNNING and not is_stream):
                return False
        return True
