"""What each slot does: read from the core as it stands, so that nothing can drift."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pipeline.core.events import Role
from pipeline.core.tasks import SERVING
from pipeline.core.worker import Worker, WorkerState
from pipeline.watching.ports import WatchedCore


class Doing(NamedTuple):
    """`role`: whose slot it is, None while it is nobody's; `state`: what happens there."""

    code: str
    """One letter, for files."""
    role: Role | None
    state: str


NOBODY = Doing(".", None, "nobody")
SHIFTS = Doing("X", None, "shift")
STARTS = Doing("S", None, "start")
_SERVES = {
    Role.ROLLOUT: Doing("R", Role.ROLLOUT, "work"),
    Role.REWARD: Doing("J", Role.REWARD, "work"),
    Role.TRAIN: Doing("T", Role.TRAIN, "work"),
}
_OTHERWISE = {
    "train": _SERVES[Role.TRAIN],
    "evaluate": Doing("E", Role.ROLLOUT, "evaluate"),
    "publish": Doing("P", Role.TRAIN, "publish"),
    "checkpoint": Doing("C", Role.TRAIN, "save"),
}
_LOADS = Doing("L", Role.ROLLOUT, "update")
_IDLE = {
    Role.ROLLOUT: Doing("r", Role.ROLLOUT, "idle"),
    Role.REWARD: Doing("j", Role.REWARD, "idle"),
    Role.TRAIN: Doing("t", Role.TRAIN, "idle"),
}
DOINGS = {
    doing.code: doing
    for doing in (*_SERVES.values(), *_OTHERWISE.values(), _LOADS, SHIFTS, STARTS, *_IDLE.values(), NOBODY)
}
"""By code: all that a slot can do. Idle: it is ready for its role, and there is nothing to do."""
_AT_IT = {
    WorkerState.STARTING: STARTS,
    WorkerState.LOADING: _LOADS,
    WorkerState.LEAVING: SHIFTS,
    WorkerState.WAKING: SHIFTS,
}
_NOT_THERE = (WorkerState.ASLEEP, WorkerState.PLANNED, WorkerState.DEAD, WorkerState.FENCED)


@dataclass(slots=True)
class Slot:
    """`worker`: who holds it, "" if nobody; `num_running`: sequences of that worker."""

    node: str
    number: int
    doing: Doing = NOBODY
    worker: str = ""
    num_running: int = 0


class Slots:
    """All slots that ever had a worker; each keeps its place in the list."""

    def __init__(self, core: WatchedCore) -> None:
        self._core = core
        self._places: dict[tuple[str, int], int] = {}
        self.all: list[Slot] = []

    def look(self) -> None:
        """Make `all` what the core says now."""
        for slot in self.all:
            slot.doing, slot.worker, slot.num_running = NOBODY, "", 0
        works = self._works()
        for worker in self._core.fleet.workers.values():
            if worker.state in _NOT_THERE:
                if worker.slots and (worker.node, worker.slots[0]) not in self._places:
                    self._add(worker)
                continue
            doing, num_running = _AT_IT.get(worker.state), 0
            if doing is None:
                doing, num_running = works.get(worker.name, (_IDLE[worker.role], 0))
            for number in worker.slots:
                slot = self._at(worker, number)
                if slot.doing is NOBODY or doing is not STARTS:
                    slot.doing, slot.worker, slot.num_running = doing, worker.name, num_running

    def _works(self) -> dict[str, tuple[Doing, int]]:
        """By worker: what it does, if it does something, with how many sequences."""
        found: dict[str, tuple[Doing, int]] = {}
        for stage, task, worker in self._tasks():
            role = SERVING.get(stage)
            if stage in _OTHERWISE:
                found.setdefault(worker, (_OTHERWISE[stage], 0))
            elif role is not None and (num := self._core.sequences.num_running(task)):
                before = found.get(worker)
                found[worker] = _SERVES[role], num + (before[1] if before else 0)
        return found

    def _tasks(self) -> Iterator[tuple[str, str, str]]:
        """Stage, task and worker of those that live."""
        for step in self._core.steps.values():
            for stage, tasks in step.tasks.items():
                for task, worker in tasks.items():
                    yield stage, task, worker

    def _at(self, worker: Worker, number: int) -> Slot:
        if (worker.node, number) not in self._places:
            self._add(worker)
        return self.all[self._places[worker.node, number]]

    def _add(self, worker: Worker) -> None:
        for number in worker.slots:
            if (worker.node, number) not in self._places:
                self._places[worker.node, number] = len(self.all)
                self.all.append(Slot(worker.node, number))
