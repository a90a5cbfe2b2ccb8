"""How far the steps are: admitted, judged, trained, published. What has changed in the core, as reports.

Steps of a run count from 1, those of the planner from 0: step s of the run is the planner's s - 1, which is trained
with version s - 1, and makes version s.
"""

from collections.abc import Iterable

from pipeline.core.dag import Progress as Stage
from pipeline.core.dag import StepProgress as Step
from pipeline.core.events import Role
from pipeline.core.reports import (
    Report,
    StepAdmitted,
    TrainingBegun,
    TrainingCalled,
    TrainingEnded,
    VersionPublished,
)
from pipeline.watching.ports import Places, WatchedCore

_KEPT = 8
"""Steps and versions whose moments are remembered: more than a decision can look ahead."""


class Progress:
    """`judged` and `published`: when a step (as the planner counts) and a version were; of the last few."""

    def __init__(self, core: WatchedCore, places: Places, version: int) -> None:
        self._core, self._places = core, places
        self.version = self.num_admitted = version
        self.judged: dict[int, float] = {}
        self.published: dict[int, float] = {}
        self._training: tuple[int, float | None] | None = None  # step, and when it was begun

    def look(self, now: float) -> Iterable[Report]:
        """What has changed since the last look."""
        steps, current = self._core.steps, self._core.versions.current
        self.num_admitted = max(self.num_admitted, current)
        while self._is_admitted(self.num_admitted + 1):
            yield StepAdmitted(at_s=now, step=self.num_admitted)
            self.num_admitted += 1
        for step in steps.values():
            number = step.step - 1
            if number not in self.judged and number >= current and is_judged(step):
                self.judged[number] = now
        training = self._find_training(current)
        if training != self._training or current != self.version:
            yield from self._turn(training, current, now)
        if len(self.judged) > _KEPT:
            self.judged = {n: at for n, at in self.judged.items() if n > current - _KEPT}
            self.published = {n: at for n, at in self.published.items() if n > current - _KEPT}

    def _turn(self, training: tuple[int, float | None] | None, current: int, now: float) -> Iterable[Report]:
        """Another training, or another version."""
        before = self._training
        if before is not None and (training is None or training[0] != before[0]):
            yield TrainingEnded(at_s=now, step=before[0])
        if current != self.version:
            if current < self.version:  # what was lost is made again
                self.judged = {n: at for n, at in self.judged.items() if n < current}
                self.published = {n: at for n, at in self.published.items() if n < current}
            self.version = current
            self.published[current] = now
            yield VersionPublished(at_s=now, version=current)
        if training is not None and training != before:
            number, begun_s = training
            called = TrainingCalled(at_s=now, step=number)
            yield called if begun_s is None else TrainingBegun(at_s=begun_s, step=number)
        self._training = training

    def _is_admitted(self, number: int) -> bool:
        """Of the run's step: its sequences are there, or were."""
        step = self._core.steps.get(number)
        return step is not None and (bool(self._core.sequences.of_step(number)) or is_judged(step))

    def _find_training(self, current: int) -> tuple[int, float | None] | None:
        """The step that is trained, as the planner counts; or for which its blocks are on their way."""
        for step in self._core.steps.values():
            stage = step.stages["train"]
            is_unpublished = stage is Stage.DONE and step.step > current
            if (stage is Stage.RUNNING or is_unpublished) and "train" in step.started:
                return step.step - 1, step.started["train"]
        waiting = [step for step in self._core.steps.values() if step.stages["train"] is Stage.PENDING]
        for step in waiting:
            if "train" in step.started or (is_judged(step) and self._is_called()):
                return step.step - 1, None
        return None

    def _is_called(self) -> bool:
        train = self._places.train
        return any(block.wanted is Role.TRAIN for block in self._places.all if block.index in train)


def is_judged(step: Step) -> bool:
    """All its sequences are scored: the writing of its batch has begun."""
    return step.stages["batch"] is not Stage.PENDING
