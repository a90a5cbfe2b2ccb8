"""Where everything of a run lies. The folder is 0700; names never leave this file.

config.yaml  status.json  summary.json  metrics.jsonl  attempt_K  ENDED  mlflow.db  secrets/
journal/attempt_K.jsonl   queue/{index.db,segments/}   checkpoints/step_N/   tasks/attempt_K/   logs/attempt_K/
planner/decisions.jsonl   cache/
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any


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
    def status(self) -> Path:
        return self.path / "status.json"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def ended(self) -> Path:
        """The marker of a run that is over; nothing else says so."""
        return self.path / "ENDED"

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
    def cache(self) -> Path:
        return self.path / "cache"

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
        """The attempts made so far, ascending."""
        found = (re.fullmatch(r"attempt_(\d+)", p.name) for p in self.path.glob("attempt_*"))
        return sorted(int(m[1]) for m in found if m)

    def create(self) -> None:
        for path in (
            self.path,
            self.secrets,
            self.queue / "segments",
            self.checkpoints,
            self.path / "journal",
            self.path / "planner",
            self.cache,
        ):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path.chmod(0o700)

    def begin_attempt(self) -> int:
        """Claim the next attempt: its marker is created exclusively, so two controllers cannot share one."""
        attempt = (self.attempts() or [0])[-1] + 1
        os.close(os.open(self.attempt_marker(attempt), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        self.logs(attempt).mkdir(parents=True, mode=0o700)
        self.tasks(attempt).mkdir(parents=True, mode=0o700)
        return attempt


def write_atomic(path: Path, text: str, durable: bool = True) -> None:
    """Replace `path` in one step: readers see the old or the new text, never a part. `durable`: synced first."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(aside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    os.replace(aside, path)


def write_json(path: Path, value: Any, durable: bool = True) -> None:
    write_atomic(path, json.dumps(value, indent=1, allow_nan=False) + "\n", durable)


def read_json(path: Path) -> Any:
    """The value, or None where there is no such file yet."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
