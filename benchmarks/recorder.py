"""A run under the real controller in this process, with real agents, workers and engines, and all that it hears and
decides written down. For benchmarks of shifts and migrations; its lines are

    [seconds on the controller's clock, kind, worker, {...}]

of these kinds. Decided: `plan` (worker ""), `down`, `up`, `task`, `dispatch`, `abort`. Heard: `ready`, `slept`,
`woken`, `refused`, `counts`, `started`, `segments`, `verdicts`, `ended`, `died`.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from pipeline import wire
from pipeline.config import load_files, save_resolved
from pipeline.controller import Controller
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.core import Core
from pipeline.core.events import Role
from pipeline.run_folder import RunFolder
from pipeline.shell import Watcher
from pipeline.wire_counts import Counts
from pipeline.wire_shift import Slept, WakeFailed, Woken
from slurm.executor import ElasticExecutor
from slurm.local import LocalCluster

Line = tuple[float, str, str, dict[str, Any]]
Moves = dict[int, Role]
Plan = Callable[[Core, float], tuple[Moves, float]]
"""What is moved now, and in how many seconds it is to be asked again."""

_SAID: dict[type, str] = {
    wire.WorkerReady: "ready",
    Slept: "slept",
    Woken: "woken",
    WakeFailed: "refused",
    Counts: "counts",
    wire.WorkerExited: "died",
}


class Recorder:
    """Stands before the controller's watcher. `plan`: asked in the place of the planner."""

    def __init__(self, inner: Watcher, core: Core, post: Callable[[ev.Event], None], plan: Plan | None) -> None:
        self._inner, self._core, self._post, self._plan = inner, core, post, plan
        self.lines: list[Line] = []

    def heard(self, message: wire.FromWorker | wire.WorkerExited) -> None:
        kind = _SAID.get(type(message))
        if kind is not None:
            self._write(kind, getattr(message, "worker", ""), msgspec.to_builtins(message))
        elif isinstance(message, wire.TaskStarted | wire.TaskEnded):
            kind = "started" if isinstance(message, wire.TaskStarted) else "ended"
            self._write(kind, self._of(message.task), {"task": message.task})
        elif isinstance(message, wire.SegmentsClosed):
            segments = [(s.id, s.idx, s.num_tokens, str(s.finish)) for s in message.segments]
            self._write("segments", self._of(message.task), {"task": message.task, "segments": segments})
        elif isinstance(message, wire.VerdictsGiven):
            ids = [verdict.id for verdict in message.verdicts]
            self._write("verdicts", self._of(message.task), {"task": message.task, "ids": ids})
        self._inner.heard(message)

    def after(self, event: ev.Event, decisions: list[de.Decision], now: float) -> None:
        if isinstance(event, ev.PlanMade) and event.moves:
            self._write("plan", "", {"moves": dict(event.moves)}, now)
        for decision in decisions:
            match decision:
                case de.ShiftDown(worker=worker, following=following):
                    self._write("down", worker, {"following": following}, now)
                case de.ShiftUp(worker=worker):
                    self._write("up", worker, {}, now)
                case de.StartTask(worker=worker, task=task):
                    self._write("task", worker, {"task": task, "stage": decision.stage}, now)
                case de.Dispatch(worker=worker, ids=ids):
                    self._write("dispatch", worker, {"ids": ids, "after": type(event).__name__}, now)
                case de.Abort(worker=worker, ids=ids):
                    self._write("abort", worker, {"ids": ids}, now)
        self._inner.after(event, decisions, now)

    def ask(self, number: int, cause: str) -> None:
        if self._plan is None:
            self._inner.ask(number, cause)
            return
        moves, again_s = self._plan(self._core, time.monotonic())
        self._post(ev.PlanMade(number=number, moves=tuple(moves.items()), reason="a benchmark", again_s=again_s))

    def _of(self, task: str) -> str:
        """Whose task it is. Tasks are forgotten when they have ended."""
        found = next((line[2] for line in reversed(self.lines) if line[1] == "task" and line[3]["task"] == task), "")
        return found

    def _write(self, kind: str, worker: str, what: dict[str, Any], at: float | None = None) -> None:
        self.lines.append((time.monotonic() if at is None else at, kind, worker, what))


class RecordedController(Controller):
    """`plan`: see Recorder. `lines` are there from the start of the run."""

    plan: Plan | None = None
    recorder: Recorder

    def _open(self, begun: Any, signals: Any) -> None:
        super()._open(begun, signals)
        self.recorder = self.shell.watcher = Recorder(self.watcher, self.core, self.shell.post, self.plan)  # type: ignore[assignment]


def run_recorded(
    path: Path,
    overrides: Iterable[str],
    *,
    plan: Plan | None = None,
    prepare: Callable[[RecordedController], None] | None = None,
    config: str = "configs/quickstart.yaml",
) -> RecordedController:
    """A run in `path`, to its end. Raises AssertionError unless it is done."""
    resolved = load_files([config], list(overrides))
    run = RunFolder(path)
    run.create()
    save_resolved(resolved, run.config)
    controller = RecordedController(run, resolved, LocalCluster(run, resolved), ElasticExecutor)
    controller.plan = plan
    if prepare is not None:
        prepare(controller)
    lock = run.hold()
    try:
        code = asyncio.run(controller.main())
    finally:
        os.close(lock)
    assert code == 0, run.ended.read_text()
    return controller
