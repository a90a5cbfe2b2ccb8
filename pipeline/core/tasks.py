"""The living stage tasks: which stage of which step each is, and on which worker."""

from dataclasses import dataclass

from pipeline.core.events import Role

SERVING = {"rollout": Role.ROLLOUT, "reward": Role.REWARD}
"""Stages whose tasks are given sequences one by one."""
NEEDS_NO_SLOTS = frozenset({"prompts", "checkpoint"})
"""Stages whose tasks may run on a worker that sleeps."""


@dataclass(slots=True)
class Task:
    """`is_ending`: it was told that nothing more will come."""

    id: str
    stage: str
    step: int
    worker: str
    is_ending: bool = False


class Tasks(dict[str, Task]):
    """By id. An id is never used twice."""

    def __init__(self) -> None:
        super().__init__()
        self._num_begun = 0
        self._of: dict[str, dict[str, Task]] = {}

    def begin(self, stage: str, step: int, worker: str) -> Task:
        self._num_begun += 1
        task = Task(f"{stage}-{step}-{self._num_begun}", stage, step, worker)
        self[task.id] = task
        self._of.setdefault(worker, {})[task.id] = task
        return task

    def end(self, task: Task) -> None:
        del self[task.id]
        del self._of[task.worker][task.id]

    def of(self, worker: str) -> list[Task]:
        """In the order in which they were begun."""
        return list(self._of.get(worker, {}).values())
