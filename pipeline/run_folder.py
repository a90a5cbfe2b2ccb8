"""Where everything of a run lies. The folder is 0700, its files 0600; names never leave this file.

config.yaml  inputs.json  environment.json  status.json  summary.json  metrics.jsonl  timeline.jsonl
judge_samples.jsonl  attempt_K  ENDED  secrets/  mlflow.db  mlflow_run.json  origin.json (of a fork)
journal/attempt_K.jsonl   queue/{index.db,segments/}   checkpoints/step_N/   tasks/attempt_K/   logs/attempt_K/
planner/{choice.json,decisions.jsonl}   stages/ (what the user's save)   sinks/   cache/   .reserve (of a live run)
"""

import fcntl
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunFolder:
    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def inputs(self) -> Path:
        """Digests of the data and models that the run is made of."""
        return self.path / "inputs.json"

    @property
    def environment(self) -> Path:
        """Where the newest attempt runs: host, processors, versions of packages."""
        return self.path / "environment.json"

    @property
    def origin(self) -> Path:
        """Of a fork: the run and step that it goes on from."""
        return self.path / "origin.json"

    @property
    def mlflow_run(self) -> Path:
        """Which run of MLflow this one is."""
        return self.path / "mlflow_run.json"

    @property
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def judge_samples(self) -> Path:
        """Some responses with their verdicts, for people to read, as `pipeline.samples` chooses them."""
        return self.path / "judge_samples.jsonl"

    @property
    def timeline(self) -> Path:
        """Of slots, loads and steps, as `pipeline.watching.history` has it."""
        return self.path / "timeline.jsonl"

    @property
    def ended(self) -> Path:
        """The marker of a run that is over; nothing else says so."""
        return self.path / "ENDED"

    @property
    def job(self) -> Path:
        """Which Slurm job holds the run's nodes."""
        return self.path / "job.json"

    @property
    def jobs(self) -> Path:
        """What submitit writes of those jobs: scripts, pickles, logs."""
        return self.path / "jobs"

    @property
    def reserve(self) -> Path:
        """Room on the disk for the end of a run that has filled it."""
        return self.path / ".reserve"

    @property
    def mlflow_db(self) -> Path:
        return self.path / "mlflow.db"

    @property
    def secrets(self) -> Path:
        return self.path / "secrets"

    @property
    def queue(self) -> Path:
        return self.path / "queue"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def choice(self) -> Path:
        """What the guard chose at submit, as `Choice.record` has it."""
        return self.path / "planner" / "choice.json"

    @property
    def decisions(self) -> Path:
        """Of the planner, one per line."""
        return self.path / "planner" / "decisions.jsonl"

    def stage_state(self, stage: str, step: int) -> Path:
        """What a user's stage of a step has saved."""
        return self.path / "stages" / stage / f"step_{step:06d}.json"

    def stage_result(self, stage: str, step: int) -> Path:
        """What it returned, once it has."""
        return self.path / "stages" / stage / f"step_{step:06d}.result.json"

    def sink(self, name: str) -> Path:
        """Up to which step a sink of the user's has the rows."""
        return self.path / "sinks" / f"{name}.json"

    @property
    def cache(self) -> Path:
        return self.path / "cache"

    @property
    def rendezvous(self) -> Path:
        """Files by which the members of process groups find each other."""
        return self.cache / "rendezvous"

    def journal(self, attempt: int) -> Path:
        return self.path / "journal" / f"attempt_{attempt}.jsonl"

    def tasks(self, attempt: int) -> Path:
        return self.path / "tasks" / f"attempt_{attempt}"

    def logs(self, attempt: int) -> Path:
        return self.path / "logs" / f"attempt_{attempt}"

    def process_log(self, attempt: int, node: str, name: str) -> Path:
        """Log of one process of a node; `name`: agent, zygote or the worker's."""
        return self.logs(attempt) / f"{node}-{name}.log"

    def attempt_marker(self, attempt: int) -> Path:
        return self.path / f"attempt_{attempt}"

    def attempts(self) -> list[int]:
        """The attempts made so far, ascending. One whose marker was removed has left its logs."""
        places = (*self.path.glob("attempt_*"), *self.path.glob("logs/attempt_*"))
        found = (re.fullmatch(r"attempt_(\d+)", place.name) for place in places)
        return sorted({int(m[1]) for m in found if m})

    def create(self) -> None:
        """Make the folder and those in it. Whatever the umask, nobody else may write to the parents made on the way.

        Raises ConfigError for a path that is not one printable line (it is shown, and stands in other programs'
        files), or where a folder is that others may write to; OSError where none can be made.
        """
        if not str(self.path).isprintable():
            raise ConfigError(f"{str(self.path)!r} is no path for a run: it holds control or invisible characters")
        for parent in reversed(self.path.parents):
            parent.mkdir(mode=0o755, exist_ok=True)
        self.path.mkdir(mode=0o700, exist_ok=True)
        self.check_own()
        self.path.chmod(0o700)
        kept = ("secrets", "queue", "queue/segments", "checkpoints", "journal", "planner")
        for name in (*kept, "cache", "cache/rendezvous"):
            (self.path / name).mkdir(mode=0o700, exist_ok=True)

    def check_own(self) -> None:
        """Raise ConfigError unless the folder is this user's and nobody else may write to it.

        What lies in it is believed: its configuration names code, status.json the process to stop.
        """
        info = self.path.stat()
        if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"{self.path} is of uid {info.st_uid}, mode {stat.filemode(info.st_mode)}: a run's folder is its "
                "user's own, and nobody else may write to it"
            )

    def hold(self) -> int:
        """Become the run's one controller: the lock ends with this process, however it ends. The descriptor is to be
        kept open. Raises ConfigError if another process holds it."""
        fd = os.open(self.path / "controller.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise ConfigError(f"{self.name} goes on already: another controller holds {self.path}") from None
        return fd

    def begin_attempt(self) -> int:
        """Claim the next attempt: its marker is created exclusively, so two controllers cannot share one."""
        attempt = (self.attempts() or [0])[-1] + 1
        os.close(os.open(self.attempt_marker(attempt), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        for path in (self.logs(attempt), self.tasks(attempt)):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            path.mkdir(mode=0o700)
        return attempt


def write_atomic(path: Path, text: str, durable: bool = True) -> None:
    """Replace `path` in one step: readers see the old or the new text, never a part. `durable`: synced first. Raises
    OSError with the path; the old text stays."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(aside, "w", encoding="utf-8", opener=_private) as file:
            file.write(text)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(aside, path)
    except OSError as error:  # such as a full disk, which does not say where
        aside.unlink(missing_ok=True)
        raise type(error)(error.errno, error.strerror, str(path)) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n", durable)


def read_json(path: Path) -> Any:
    """The value, or None where there is no such file yet."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
