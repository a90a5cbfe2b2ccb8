"""Performs what is wanted of blocks: who starts, who goes down, who comes up.

Slots are given only when nobody holds them, and whoever is to give them up does so without waiting for anything but
the end of what it runs. So no two shifts can wait for each other, however they overlap.

Of those that live on the same slots one after the other starts and goes to sleep, the trainer last, because its start
needs all ranks. Who has died starts again when its role has the block, or when nobody has it.
"""

from collections.abc import Callable

from pipeline.core.blocks import Block, Blocks
from pipeline.core.decisions import ShiftDown, ShiftUp
from pipeline.core.events import Role
from pipeline.core.fleet import Fleet
from pipeline.core.outbox import Outbox
from pipeline.core.tasks import NEEDS_NO_SLOTS, SERVING, Tasks
from pipeline.core.versions import Versions
from pipeline.core.worker import Worker, WorkerState

_STARTS = (Role.ROLLOUT, Role.REWARD, Role.TRAIN)


class Shifts:
    def __init__(
        self,
        fleet: Fleet,
        blocks: Blocks,
        versions: Versions,
        tasks: Tasks,
        out: Outbox,
        start: Callable[[list[Worker]], None],
    ) -> None:
        self._fleet, self._blocks, self._versions, self._tasks, self._out = fleet, blocks, versions, tasks, out
        self._start = start

    def pursue(self) -> None:
        """All that can be done now."""
        blocks = [block for block in self._blocks.all if not self._blocks.is_lost(block)]
        for block in blocks:
            for worker in block.workers:
                if worker.role is not block.wanted and worker.state is WorkerState.READY and not self._is_busy(worker):
                    self._send_down(worker, block)
        self.start_due()
        for block in blocks:
            for worker in block.workers:
                if (
                    worker.role is block.wanted
                    and worker.state is WorkerState.ASLEEP
                    and self._is_free_for(worker, block)
                ):
                    self._call(worker)

    def start_due(self) -> None:
        due = [worker for worker in self._fleet.startable() if self._is_due(worker)]
        due.sort(key=lambda worker: _STARTS.index(worker.role))  # so a rank that has to wait is in nobody's way
        chosen: list[Worker] = []
        for worker in due:
            block = self._blocks.of(worker)
            if block is None or not any(rival in chosen for rival in block.rivals(worker)):
                chosen.append(worker)
        if chosen := self._fleet.with_all_ranks(chosen):
            self._start(chosen)

    @property
    def is_moving(self) -> bool:
        """Some block is not yet held by whom it is wanted for."""
        return any(
            block.wanted is not None and self._blocks.held_by(block) is not block.wanted
            for block in self._blocks.all
            if not self._blocks.is_lost(block)
        )

    def _is_due(self, worker: Worker) -> bool:
        block = self._blocks.of(worker)
        if block is None:
            return True
        if worker.life and block.wanted not in (None, worker.role):
            return False
        turn = _STARTS.index(worker.role)
        for rival in block.rivals(worker):
            is_before = not rival.life and (bool(worker.life) or _STARTS.index(rival.role) < turn)
            if rival.holds or is_before:
                return False
        return True

    def _is_free_for(self, worker: Worker, block: Block) -> bool:
        """Nobody holds its slots, and all who live there have started once."""
        return all(rival.life and not rival.holds for rival in block.rivals(worker))

    def _is_busy(self, worker: Worker) -> bool:
        """A task that is not cut: it ends by itself, and soon."""
        return any(t.stage not in SERVING and t.stage not in NEEDS_NO_SLOTS for t in self._tasks.of(worker.name))

    def _send_down(self, worker: Worker, block: Block) -> None:
        worker.send_down()
        for task in self._tasks.of(worker.name):
            task.is_ending |= task.stage in SERVING
        following = tuple(
            w.name for w in block.rivals(worker) if w.role is block.wanted and w.state is WorkerState.ASLEEP
        )
        self._out.emit(ShiftDown(worker=worker.name, following=following, version=self._versions.current))
        self._limit(worker)

    def _call(self, worker: Worker) -> None:
        worker.call(self._versions.current if worker.role is Role.ROLLOUT else worker.version)
        self._out.emit(ShiftUp(worker=worker.name, version=worker.asked))
        self._limit(worker)

    def _limit(self, worker: Worker) -> None:
        """A trainer that saves does that first."""
        is_saving = any(task.stage == "checkpoint" for task in self._tasks.of(worker.name))
        keys = ("shift_s", "save_s") if is_saving else ("shift_s",)
        self._out.limit(f"worker:{worker.name}", *keys)
