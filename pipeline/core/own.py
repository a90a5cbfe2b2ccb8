"""The user's stages: how long each may take, and how they end when the run stops."""

from pipeline.core.decisions import EndTask
from pipeline.core.outbox import Outbox
from pipeline.core.steps import RunPlan, Steps
from pipeline.core.tasks import Task, Tasks

_MARGIN_S = 60.0
"""A user's stage ends itself when its time is up; its task may take so much longer."""
_STOP_S = 15.0
"""So long a run that stops waits for a user's stage to save."""


class OwnStages:
    def __init__(self, plan: RunPlan, out: Outbox, steps: Steps, tasks: Tasks) -> None:
        self._out, self._steps, self._tasks = out, steps, tasks
        self._timeout_s = {own.name: own.timeout_s for own in plan.own}

    def limit(self, task: Task) -> bool:
        """Limit the task if it is one of these."""
        if task.stage not in self._timeout_s:
            return False
        after_s = self._timeout_s[task.stage] + _MARGIN_S
        self._out.limit_to(f"task:{task.id}", after_s, f"limit exceeded: stage {task.stage} ({after_s:g} s)")
        return True

    def stop(self) -> None:
        """The run stops: those of steps that are not brought to their end are asked to save."""
        still = {step.step for step in self._steps.open()}
        for task in self._all():
            if task.step not in still and not task.is_ending:
                task.is_ending = True
                self._out.emit(EndTask(task=task.id, worker=task.worker))
                if self._out.left_s("stop") > _STOP_S:
                    self._out.limit_to("stop", _STOP_S, self._steps.stopping)

    @property
    def is_stopping(self) -> bool:
        """One of them has been asked to save, and is waited for."""
        return any(task.is_ending for task in self._all())

    def _all(self) -> list[Task]:
        return [task for task in self._tasks.values() if task.stage in self._timeout_s]
