"""Whole runs by the command line, killed at named points, and what of two runs must be the same."""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.queue import payload
from pipeline.queue.fork import fork_queue
from pipeline.queue.index import Index
from pipeline.queue.rows import to_sequences
from pipeline.queue.schema import SequenceRow
from pipeline.queue.segments import SegmentFiles
from pipeline.run_folder import RunFolder
from pipeline.status import start_ticks
from tests.begun import begin_command

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).parents[2]
STRICT = ("run.determinism=strict", "checkpoint.keep=100")
_WATCHED = ("alloc/", "role/", "planner/", "shift/")
"""Metrics of what the monitor sees in time."""
_TIMES = ("time", "timing_s/", "task_s/", "queue_s/", "perf/", "gps/", *_WATCHED)
"""Metrics that no two runs share."""
_LIMIT_S = 400


@dataclass(frozen=True)
class Ended:
    code: int
    out: str


def pivot(*arguments: str, kill: str = "", marker: Path | None = None) -> Ended:
    """A command line to its end. `kill`: see pipeline.kill_points."""
    told = {"PIVOT_KILL_POINT": kill, "PIVOT_KILL_MARKER": str(marker)} if kill else {}
    process = begin(*arguments, **told)
    try:
        out, _ = process.communicate(timeout=_LIMIT_S)
    finally:
        process.kill()
    return Ended(process.returncode, out)


def begin(*arguments: str, under: Sequence[str] = (), **told: str) -> "subprocess.Popen[str]":
    """A command line that goes on; `told` are variables of its environment, `under` is the command that runs it."""
    command = [*under, sys.executable, "-P", "-m", "pipeline.cli.main", *arguments]
    return begin_command(command, environment(**told), ROOT)


def environment(**told: str) -> dict[str, str]:
    """What a command of the checkout needs, and nothing that this process was told for itself."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PIVOT_", "MLFLOW_", "PYTHON"))}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **told}


def asked_of(request: "pytest.FixtureRequest") -> set[object]:
    """The parameters that the chosen tests of this file have: what a fixture of all of them is to begin."""
    items = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
    return {value for item in items for value in item.callspec.params.values()}


def submit(run: Path, *overrides: str, config: str = "configs/emulated.yaml", **killed: Any) -> Ended:
    return pivot("submit", config, "--run-dir", str(run), "--wait", *overrides, **killed)


def succeed(ended: Ended) -> str:
    assert ended.code == 0, ended.out
    return ended.out


def killed_run(run: Path, kill: str, *overrides: str, config: str = "configs/emulated.yaml") -> int:
    """A run that is killed at `kill`, resumed where that ended it, and then complete. Returns how many attempts it
    took. Fails if nothing was killed."""
    marker = run.with_name(f"{run.name}.killed")
    ended = submit(run, *overrides, config=config, kill=kill, marker=marker)
    assert marker.exists(), f"nothing came to {kill}\n{ended.out}"
    if ended.code != 0:
        assert kill.endswith(":run"), f"the run did not survive {kill}\n{ended.out}"
        wait_for_end(run)
        succeed(pivot("resume", str(run)))
    return len(RunFolder(run).attempts())


def wait_for_end(run: Path, limit_s: float = 10.0) -> None:
    """Until all processes of a killed run are gone."""
    deadline = time.monotonic() + limit_s
    while left := pids_of(run):
        assert time.monotonic() < deadline, f"processes outlived their run: {left}"
        time.sleep(0.02)


def pids_of(run: Path) -> list[int]:
    """Processes of the run that are alive, by the run's folder among their arguments or as their log."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            arguments = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            log = os.readlink(f"/proc/{entry}/fd/1")
        except (OSError, ProcessLookupError):
            continue
        is_ours = os.fsencode(run) in arguments or log.startswith(f"{run}/logs/")
        if is_ours and start_ticks(int(entry)) is not None:
            found.append(int(entry))
    return found


def pid_by_log(run: Path, log: Path) -> int | None:
    """The process of the run that writes this log."""
    for pid in pids_of(run):
        try:
            if os.readlink(f"/proc/{pid}/fd/1") == str(log):
                return pid
        except OSError:
            continue
    return None


def rows(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def measured(run: Path, lost: tuple[str, ...] = ()) -> dict[int, dict[str, float]]:
    """Of each step all metrics but times and those `lost`. Fails if a step stands there twice."""
    lines = rows(run)
    steps = {int(row["step"]): {k: v for k, v in row.items() if not k.startswith((*_TIMES, *lost))} for row in lines}
    assert len(steps) == len(lines), [row["step"] for row in lines]
    return steps


def names(run: Path) -> dict[int, set[str]]:
    """Of each step the names of all its metrics, but of the times of the step before's last stages, and of what was
    seen of its shifts."""
    others = {"timing_s/save_checkpoint", "timing_s/evaluate"}
    return {int(row["step"]): {k for k in row if not k.startswith(_WATCHED)} - others for row in rows(run)}


def checkpoints(run: Path) -> dict[str, dict[str, str]]:
    """Of each checkpoint the SHA-256 of each file: weights, optimizer, state."""
    found = {}
    for manifest in sorted((run / "checkpoints").glob("step_*/MANIFEST.json")):
        files = json.loads(manifest.read_text())["files"]
        found[manifest.parent.name] = {name: entry["sha256"] for name, entry in files.items()}
    return found


def sequences(run: Path) -> dict[int, list[SequenceRow]]:
    """What the queue of an ended run holds: each step's recorded batch in its order, then those dropped."""
    with tempfile.TemporaryDirectory(prefix="pivot-look-") as name:
        folder = Path(name)
        (folder / "segments").mkdir()
        fork_queue(run / "queue", folder, 1 << 30)
        return read_queue(folder).sequences


@dataclass(frozen=True)
class Queue:
    """What a queue holds: each step's recorded batch in its order, then those that are in none; and these batches."""

    sequences: dict[int, list[SequenceRow]]
    batches: dict[int, list[str]]


def read_queue(folder: Path) -> Queue:
    """Of a queue that nobody serves; it is changed by that."""
    index = Index(folder / "index.db", 1 << 20)
    files = SegmentFiles(folder / "segments", "none.arrows")
    batches = {step: json.loads(ids) for step, ids in index.fetch("SELECT step, ids FROM batch")}
    found = {}
    for (step,) in index.fetch("SELECT DISTINCT step FROM seq ORDER BY step"):
        ids = [id for (id,) in index.fetch("SELECT id FROM seq WHERE step = ? ORDER BY id", step)]
        order = [*batches.get(step, ()), *(id for id in ids if id not in set(batches.get(step, ())))]
        found[step] = to_sequences(payload.assemble(payload.find(index, order), files.read))
    index.close()
    return Queue(found, batches)


def check_same(run: Path, other: Path, lost: tuple[str, ...] = ()) -> None:
    """Bit for bit: prompts, tokens, scores and order of every step; weights and optimizer of every checkpoint that
    both have; every metric but times, each step once. `lost`: counts that died with the task that counted."""
    assert sequences(run) == sequences(other)
    mine, its = checkpoints(run), checkpoints(other)
    assert mine.keys() & its.keys(), (mine, its)
    assert {step: mine[step] for step in mine.keys() & its.keys()} == {s: its[s] for s in mine.keys() & its.keys()}
    assert measured(run, lost) == measured(other, lost)
    assert names(run) == names(other)


def hashes(folder: Path) -> dict[str, str]:
    """Every file below, with its content's hash and its time of change."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(p): f"{hashlib.sha256(p.read_bytes()).hexdigest()} {p.stat().st_mtime_ns}" for p in files}
