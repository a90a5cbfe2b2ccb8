"""Runs as the commands see them: a folder with status.json and metrics.jsonl. Nothing is unpickled, no index opened."""

import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

from pipeline.core.errors import ConfigError
from pipeline.processes import log_tail
from pipeline.run_folder import RunFolder, read_json
from pipeline.status import EXIT_CODES, start_ticks

DEFAULT_ROOT = Path("runs")
Status = dict[str, Any]


def find_run(name: str) -> RunFolder:
    """The run in this folder, or of this name under ./runs. Raises ConfigError if there is none."""
    for path in (Path(name), DEFAULT_ROOT / name):
        if holds_run(path):
            return RunFolder(path.absolute())
    known = ", ".join(run.name for run in all_runs()) or "none"
    raise ConfigError(f"no run {name!r}: neither a run's folder nor a name under {DEFAULT_ROOT.absolute()} ({known})")


def holds_run(path: Path) -> bool:
    return str(path.absolute()).isprintable() and RunFolder(path).config.is_file()


def as_argument(run: RunFolder) -> str:
    """The run as an argument for a shell: its name where that is enough, and no option."""
    by_name = run.path.parent == DEFAULT_ROOT.absolute() and not run.name.startswith("-")
    return shlex.quote(run.name if by_name else str(run.path))


def all_runs() -> list[RunFolder]:
    """The runs in ./runs, the one started last at the end."""
    paths = [path for path in DEFAULT_ROOT.glob("*") if holds_run(path)]
    return [RunFolder(p.absolute()) for p in sorted(paths, key=lambda path: (path.stat().st_ctime, path.name))]


def read_status(run: RunFolder) -> Status:
    """status.json, plus `live`: whether the controller's process, or the job that is to run it, exists."""
    status: Status = read_json(run.status) or {"run": run.name, "status": "new", "attempt": 0}
    if run.job.exists():
        from pipeline.cli.job import with_job

        return with_job(run, status)
    return status | {"live": is_live(status)}


def job_output(run: RunFolder) -> str:
    """The last lines of what the script of its newest Slurm job printed; "" if no job has the run."""
    outputs = sorted(run.jobs.glob("*_0_log.out"), key=lambda path: path.stat().st_mtime) if run.job.exists() else []
    return log_tail(outputs[-1]) if outputs else ""


def is_live(status: Status) -> bool:
    """The pid is that of the controller only if that process started when the controller did."""
    pid = status.get("pid")
    return pid is not None and start_ticks(pid) == status.get("pid_start")


def how_it_stands(status: Status) -> str:
    """The status in one word; a controller that was killed could not write its end."""
    if status["live"] and (status.get("job") or {}).get("state") == "PENDING":
        return "held" if status["job"]["held"] else "queued"
    has_begun = status["status"] in ("starting", "running", "requeued") or bool((status.get("job") or {}).get("state"))
    if has_begun and status["status"] not in EXIT_CODES and not status["live"]:
        return "died"
    return str(status["status"])


def signal_controller(status: Status, sig: signal.Signals) -> bool:
    """False if the controller is gone. The pidfd keeps the signal from a process that got the same pid since."""
    try:
        fd = os.pidfd_open(status["pid"])
    except ProcessLookupError:
        return False
    try:
        if not is_live(status):
            return False
        signal.pidfd_send_signal(fd, sig)
    except ProcessLookupError:
        return False
    finally:
        os.close(fd)
    return True


class Rows:
    """New rows of metrics.jsonl since the last call, each step once; the file may be replaced meanwhile."""

    def __init__(self, run: RunFolder) -> None:
        self._path = run.metrics
        self._inode, self._offset, self._last_step = 0, 0, -1

    def new(self) -> list[dict[str, float | None]]:
        try:
            with open(self._path, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(whole) + len(newline)
        rows = [json.loads(line) for line in whole.splitlines()]
        fresh = [row for row in rows if row["step"] > self._last_step]
        self._last_step = max((row["step"] for row in fresh), default=self._last_step)
        return fresh
