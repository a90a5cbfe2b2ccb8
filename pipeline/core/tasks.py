"""The living stage tasks: which stage of which step each is, and on which worker."""

from dataclasses import dataclass


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

    def begin(self, stage: str, step: int, worker: str) -> Task:
        self._num_begun += 1
        task = Task(f"{stage}-{step}-{self._num_begun}", stage, step, worker)
        self[task.id] = task
        return task

    def of(self, worker: str) -> list[Task]:
        return [task for task in self.values() if task.worker == worker]
