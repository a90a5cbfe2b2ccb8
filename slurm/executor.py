"""Stage tasks as submitit jobs that run in warm workers.

The folder protocol is submitit's: `<task>_submitted.pkl`, then `<task>_0_result.pkl` and `<task>_0_log.out`; the job's
id is the task's. What differs: the pickle is in place before the launch (a warm worker would win the race), nothing
is throttled or polled, and a job ends when the worker's report says so, or when the worker is dead.
"""

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from submitit.core.core import Job, PicklingExecutor
from submitit.core.job_environment import JobEnvironment
from submitit.core.utils import DelayedSubmission, JobPaths, UncompletedJobError

from pipeline.pickles import load_own
from pipeline.stage import current_task

Launch = Callable[[str, str, str], None]
"""(worker, task, folder): have the worker run the task whose pickle is in the folder."""


class ElasticJob(Job[Any]):  # type: ignore[misc]
    """A stage task. `finish` or `fail` ends it, once; until then `wait`, `result` and `exception` block."""

    _results_timeout_s = 0

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._ended = threading.Event()
        self._failure: str | None = None

    def _register_in_watcher(self) -> None:
        """Nobody is asked about its state: it is told."""

    def finish(self) -> None:
        """The worker has reported that the outcome is in place."""
        self._ended.set()

    def fail(self, reason: str) -> None:
        """The worker is dead, or the task could not be launched."""
        if not self._ended.is_set():
            self._failure = reason
            self._ended.set()

    def outcome(self) -> tuple[bool, Any, str]:
        """Of an ended job: whether it succeeded, its result, its error (the remote traceback). Never raises."""
        if self._failure is not None:
            return False, None, self._failure
        try:
            kind, value = load_own(self.paths.result_pickle)
        except (OSError, pickle.UnpicklingError, EOFError, AttributeError, ImportError, ValueError, TypeError) as error:
            return False, None, f"the result of {self.job_id} is unreadable: {type(error).__name__}: {error}"
        return (True, value, "") if kind == "success" else (False, None, str(value))

    @property
    def resubmit_pickle(self) -> Path:
        """Where a task that was asked to end stores its continuation (what its `checkpoint()` returned), if any."""
        path: Path = self.paths.folder / f"{self.job_id}_resubmit.pkl"
        return path

    @property
    def state(self) -> str:
        if not self._ended.is_set():
            return "RUNNING"
        return "FAILED" if self._failure is not None else "COMPLETED"

    def get_info(self, mode: str = "force") -> dict[str, str]:
        return {"State": self.state}

    def done(self, force_check: bool = False) -> bool:
        return self._ended.is_set()

    def wait(self) -> None:
        self._ended.wait()

    def submission(self) -> DelayedSubmission:
        """What was submitted. Raises PermissionError where `load_own` does."""
        submitted: DelayedSubmission = load_own(self.paths.submitted_pickle)
        return submitted

    def _get_outcome_and_result(self) -> tuple[str, Any]:
        self.wait()
        ok, result, error = self.outcome()
        if self._failure is not None:
            raise UncompletedJobError(f"job {self.job_id}: {self._failure}")
        return ("success", result) if ok else ("error", error)

    def cancel(self, check: bool = True) -> None:
        raise NotImplementedError("a stage task is ended by the controller of its run")

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name != "_ended"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._ended = threading.Event()
        super().__setstate__(state)
        if self._failure is not None or self.paths.result_pickle.exists():
            self._ended.set()


class ElasticExecutor(PicklingExecutor):  # type: ignore[misc]
    """submitit's port to the warm workers of a run. Only a run's controller can launch: it gives `launch`."""

    job_class = ElasticJob

    def __init__(self, folder: Path | str, launch: Launch | None = None) -> None:
        super().__init__(folder)
        self._launch = launch

    def submit_to(self, worker: str, task: str, call: Callable[[], Any]) -> ElasticJob:
        """Put the pickle in place, then launch it in the worker. A task's id is used once: FileExistsError."""
        self.update_parameters(worker=worker, task=task)
        job = self.submit(call)
        assert isinstance(job, ElasticJob)
        return job

    def _internal_process_submissions(self, delayed_submissions: list[DelayedSubmission]) -> list[Job[Any]]:
        worker, task = self.parameters.pop("worker", None), self.parameters.pop("task", None)
        if self._launch is None or worker is None or task is None:
            raise RuntimeError(
                f"executor {self.name()!r} serves the controller of a run, by submit_to(worker, task, call)"
            )
        (delayed,) = delayed_submissions
        job = ElasticJob(self.folder, task)
        job.paths.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        delayed.set_timeout(0, self.max_num_timeout)
        os.close(os.open(job.paths.submitted_pickle, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        delayed.dump(job.paths.submitted_pickle)
        self._launch(worker, task, str(job.paths.folder))
        return [job]

    @classmethod
    def name(cls) -> str:
        return "pivot"

    @classmethod
    def affinity(cls) -> int:
        return 0  # never chosen unless asked for

    @classmethod
    def _valid_parameters(cls) -> set[str]:
        return {"worker", "task"}

    def _num_tasks(self) -> int:
        return 1

    # submitit starts jobs by a command; these are started by a message.
    def _make_submission_file_text(self, command: str, uid: str) -> str:
        raise NotImplementedError

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        raise NotImplementedError

    @staticmethod
    def _get_job_id_from_submission_command(string: bytes | str) -> str:
        raise NotImplementedError


class ElasticJobEnvironment(JobEnvironment):  # type: ignore[misc]
    """What `submitit.JobEnvironment()` is in the code of a stage task: of the task, not of the process."""

    @classmethod
    def name(cls) -> str:
        return "pivot"

    def activated(self) -> bool:
        return current_task.get(None) is not None

    @property
    def job_id(self) -> str:
        return current_task.get().spec.task

    @property
    def paths(self) -> JobPaths:
        task = current_task.get()
        return JobPaths(task.worker.run.tasks(task.spec.attempt), job_id=self.job_id)
