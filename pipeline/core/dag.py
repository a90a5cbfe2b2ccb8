"""The step as a DAG of stages, and how far each step has come.

An edge of lag n leads from a stage of the step n before. `batch` and `record` are writes to the queue's index, the
others are stage tasks. Checkpoints come last, when the step's metric row is durable: then a run that is resumed from
checkpoint N always has the rows up to N.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A stage of the user's: which stages it waits for, which wait for it, and how long it may take."""

    name: str
    after: tuple[str, ...]
    before: tuple[str, ...]
    timeout_s: float


OWN_PATH = "stages.own.stage:own_stage"


def step_graph(staleness: int = 0, *, is_streaming: bool = False, own: Sequence[Own] = ()) -> tuple[Stage, ...]:
    """The stages of one step, each after those that it waits for, with those of the user's. These run on a reward
    worker, asleep or awake: their work is done in a process of their own. Raises ValueError for one that names a stage
    that is not there, or would wait for itself."""
    stages = {stage.name: stage for stage in _our_graph(staleness, is_streaming)}
    for number, added in enumerate(own):
        if added.name in stages:
            raise ValueError(f"stages.{number}.name: there is a stage {added.name!r} already")
        after = tuple(After(stage=name) for name in added.after)
        stages[added.name] = Stage(name=added.name, role=Role.REWARD, path=OWN_PATH, after=after)
    for number, added in enumerate(own):
        for key, names in (("after", added.after), ("before", added.before)):
            if unknown := [name for name in names if name not in stages]:
                valid = ", ".join(name for name in stages if name != added.name)
                raise ValueError(f"stages.{number}.{key}: no stage {unknown[0]!r}; valid: {valid}")
        for name in added.before:
            waiting = stages[name]
            stages[name] = replace(waiting, after=(*waiting.after, After(stage=added.name)))
    return _in_order(stages)


def _in_order(stages: dict[str, Stage]) -> tuple[Stage, ...]:
    """Each after those that it waits for, else as they came."""
    placed: dict[str, Stage] = {}
    while len(placed) < len(stages):
        free = [
            stage
            for stage in stages.values()
            if stage.name not in placed and all(a.lag or a.stage in placed for a in stage.after)
        ]
        if not free:
            left = ", ".join(name for name in stages if name not in placed)
            raise ValueError(f"stages: each of these would wait for itself: {left}")
        placed[free[0].name] = free[0]
    return tuple(placed.values())


def _our_graph(staleness: int, is_streaming: bool) -> tuple[Stage, ...]:
    """The stages of one step without those of the user's, each after those that it waits for.

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
_NAMES = tuple(stage.name for stage in STAGES)


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
    def open(cls, step: int, skip: set[str], names: Iterable[str] = _NAMES) -> "StepProgress":
        return cls(step, {name: Progress.SKIPPED if name in skip else Progress.PENDING for name in names})

    @classmethod
    def closed(cls, step: int, skip: set[str] | None = None, names: Iterable[str] = _NAMES) -> "StepProgress":
        """A step of which nothing is left to do; without `skip`: one that a checkpoint covers."""
        return cls(step, {name: Progress.SKIPPED if name in (skip or ()) else Progress.DONE for name in names})

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

    def names(self) -> tuple[str, ...]:
        return tuple(stage.name for stage in self.stages)

    def leads_to(self, stage: str) -> set[str]:
        """All that must be over in a step before this stage of it begins."""
        found = {name for name, lag, _ in self._waits_for[stage] if not lag}
        return found.union(*(self.leads_to(name) for name in found))

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
