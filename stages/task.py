"""One stage task inside a worker: a submitit job that runs in a thread of a process that is already warm.

submitit's own `process_job` sets signal handlers and reads its job's identity from the environment; both belong to a
process, and a worker runs several tasks at once. So a task carries all of its own: context, orders, log.
"""

import io
import os
import queue
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from submitit.core.utils import DelayedSubmission, JobPaths, cloudpickle_dump, temporary_save_path

from pipeline import wire
from pipeline.core.events import Finish, SegmentInfo, VerdictInfo
from pipeline.pickles import load_own
from pipeline.stage import Order, StageSpec, StageTask, current_task

if TYPE_CHECKING:
    from stages.worker import Worker

_log: ContextVar[TextIO] = ContextVar("task_log")


class RoutedOutput(io.TextIOBase):
    """Stands for sys.stdout and sys.stderr: what a task prints goes to its own log, the rest to the worker's."""

    def __init__(self, rest: TextIO) -> None:
        self._rest = rest

    def write(self, text: str) -> int:
        return _log.get(self._rest).write(text)

    def flush(self) -> None:
        _log.get(self._rest).flush()

    def fileno(self) -> int:
        return self._rest.fileno()

    def writable(self) -> bool:
        return True


def route_output() -> None:
    sys.stdout = RoutedOutput(sys.stdout)
    sys.stderr = RoutedOutput(sys.stderr)


class Task:
    """A pipeline.stage.TaskContext. Orders may come from the moment it exists, whenever it is run."""

    def __init__(self, worker: "Worker", order: wire.RunTask, say: Callable[[wire.FromWorker], None]) -> None:
        self.id = order.task
        self.worker = worker
        self.spec = StageSpec(task=order.task, stage="", step=0, version=0, attempt=worker.attempt)
        self._say = say
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._delayed: DelayedSubmission | None = None
        self.num_aborted = 0
        """Sequences that it has given back unfinished so far."""
        self.paths = JobPaths(order.folder, job_id=order.task)

    # --- what the stage's function sees ----------------------------------------------------------------------------

    def next_order(self, timeout_s: float | None) -> Order | None:
        try:
            return self._orders.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def report_admitted(self, step: int, ids: list[str], num_prompt_tokens: Sequence[int] = ()) -> None:
        nums = list(num_prompt_tokens)
        self._say(wire.Admitted(worker=self.worker.name, step=step, ids=ids, num_prompt_tokens=nums))

    def report_segments(self, segments: list[SegmentInfo]) -> None:
        self.num_aborted += sum(s.finish is Finish.ABORT for s in segments)
        closed = [wire.Segment(s.id, s.idx, s.num_tokens, s.version, s.finish) for s in segments]
        self._say(wire.SegmentsClosed(worker=self.worker.name, task=self.id, segments=closed))

    def report_verdicts(self, verdicts: list[VerdictInfo]) -> None:
        given = [wire.Verdict(v.id, v.score, v.failure, v.num_tokens) for v in verdicts]
        self._say(wire.VerdictsGiven(worker=self.worker.name, task=self.id, verdicts=given))

    def log(self, text: str) -> None:
        with open(self.paths.stdout, "a", encoding="utf-8") as file:
            file.write(f"{text}\n")

    @property
    def log_path(self) -> Path:
        return self.paths.stdout

    # --- what the worker does with it ------------------------------------------------------------------------------

    def give(self, order: Order) -> None:
        self._orders.put(order)

    def end(self) -> None:
        """Ask it to finish. What a callable's `checkpoint` returns is stored first, beside the job's other files."""
        if self._delayed is not None:
            try:
                continuation = self._delayed._checkpoint_function()
                if continuation is not None:
                    continuation.dump(resubmit_pickle(self.paths))
            except Exception:
                self.log(f"checkpoint() failed, so there is nothing to resubmit:\n{traceback.format_exc()}")
        self.give(Order("end"))

    def run(self) -> None:
        """Load, run, store the outcome, report. Call it in a context of its own."""
        with open(self.paths.stdout, "a", buffering=1, encoding="utf-8", opener=_private) as log:
            _log.set(log)
            current_task.set(self)
            try:
                self._store(("success", self._call()))
            except BaseException:
                trace = traceback.format_exc()
                log.write(trace)
                self._store(("error", trace))
        self._say(wire.TaskEnded(worker=self.worker.name, task=self.id))

    def _call(self) -> object:
        delayed: DelayedSubmission = load_own(self.paths.submitted_pickle)
        self.spec = getattr(delayed.function, "spec", self.spec)
        self._delayed = delayed
        self._say(wire.TaskStarted(worker=self.worker.name, task=self.id))
        started, waited_s = time.monotonic(), self.worker.queue_waited_s
        result = delayed.result()
        if isinstance(delayed.function, StageTask):  # where a stage's time went belongs into the step's row
            result.setdefault("metrics", {}).update(
                {
                    f"task_s/{self.spec.stage}": time.monotonic() - started,
                    f"queue_s/{self.spec.stage}": self.worker.queue_waited_s - waited_s,
                }
            )
        return result

    def _store(self, outcome: tuple[str, object]) -> None:
        path = self.paths.result_pickle
        path.with_suffix(path.suffix + ".save_tmp").unlink(missing_ok=True)  # submitit refuses to write over it
        with temporary_save_path(path) as aside:
            cloudpickle_dump(outcome, aside)


def resubmit_pickle(paths: JobPaths) -> Path:
    """Where the continuation of a checkpointed task is stored: a DelayedSubmission."""
    return paths.folder / f"{paths.job_id}_resubmit.pkl"


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
