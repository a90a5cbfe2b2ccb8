"""A run in which things die at chosen moments, and what must be true of it afterwards.

The run's own journal says when a moment has come, when a death was noticed, and when work went on.
"""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.queue.fork import fork_queue
from pipeline.queue.index import Index
from pipeline.run_folder import RunFolder, read_json
from slurm.names import run_prefix
from tests.scenarios.runs import begin, pid_by_log, pids_of, rows

Event = dict[str, Any]
"""A line of the journal: `event` is its name, `wall` its time."""

LIMIT_S = 60.0
LEFT_S = 10.0
"""So long after the end of a run nothing of it may be left."""
SETTINGS = (
    *("checkpoint.save_freq=3", "checkpoint.keep=100", "tracking.uri=none", "algorithm.staleness=1"),
    *("rollout.flush_s=0.1", "limits.heartbeat_s=1", "limits.engine_s=1", "limits.request_s=10"),
    *("limits.engine_start_s=20", "limits.restarts=9"),
    *("rollout.engine.options.step_s=0.01", "reward.genrm.engine.options.step_s=0.002"),
    "trainer.options.step_seconds=0.1",
)
"""A run of some seconds with emulated engines and every limit scaled down."""
PATIENT = (
    *("limits.heartbeat_s=120", "limits.engine_s=120", "limits.request_s=120", "limits.engine_start_s=300"),
    "limits.shift_s=120",
)
"""Who is slow because the machine is busy is not dead: where these hold every death was ordered."""


class Run:
    """A run that goes on, by its folder. Attempts are counted by the caller's resumes."""

    left_s = LEFT_S
    limit_s = LIMIT_S
    """So long anything is waited for."""

    def __init__(
        self, path: Path, *overrides: str, config: str = "configs/emulated.yaml", under: Sequence[str] = ()
    ) -> None:
        self.path, self.folder, self._under = path, RunFolder(path), under
        self.out = ""
        self._temporary = set(os.listdir(tempfile.gettempdir()))
        self._begin("submit", config, "--run-dir", str(path), "--wait", *overrides)

    def _begin(self, *arguments: str) -> None:
        self._read: list[Event] = []
        self._at = 0
        self._num_attempts = len(self.folder.attempts()) if self.path.exists() else 0
        self.process = begin(*arguments, under=self._under)

    def resume(self) -> None:
        self._begin("resume", str(self.path))

    @property
    def attempt(self) -> int:
        return self._num_attempts + 1

    # --- the journal -----------------------------------------------------------------------------------------------

    def events(self) -> list[Event]:
        """Of the attempt that was begun last, as far as they are written."""
        path = self.folder.journal(self.attempt)
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self._at)
                *lines, _torn = file.read().split(b"\n")
            self._at += sum(len(line) + 1 for line in lines)
            self._read += [json.loads(line) for line in lines]
        return self._read

    def until(self, what: str, condition: Callable[[Event], bool], after: float = 0.0) -> Event:
        """The first event at `after` (wall clock) or later that fulfils the condition."""
        deadline = time.monotonic() + self.limit_s
        seen = 0
        while True:
            found = self.events()
            for event in found[seen:]:
                if event["wall"] >= after and condition(event):
                    return event
            seen = len(found)
            if self.process.poll() is not None:
                raise AssertionError(f"the run ended before {what}:\n{self.process.communicate()[0]}")
            assert time.monotonic() < deadline, f"{what} did not come within {self.limit_s:g} s"
            time.sleep(0.002)

    def end(self) -> int:
        """Wait for the end of the command; its exit code. What it printed is in `out`."""
        self.out, _ = self.process.communicate(timeout=self.limit_s)
        return self.process.returncode

    # --- its processes ---------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """Of the controller, or of the process whose log is `<name>.log`: local-0-rollout-0, local-0-agent, queue."""
        if name == "controller":
            return int(read_json(self.folder.status)["pid"])
        log = self.folder.logs(self.attempt) / f"{name}.log"
        deadline = time.monotonic() + self.limit_s
        while time.monotonic() < deadline:
            if pid := pid_by_log(self.path, log):
                return pid
            time.sleep(0.005)
        raise AssertionError(f"no process writes to {log}")

    def node_of(self, worker: str) -> str:
        """Where the worker is bound, as the status says; that may be a moment old."""
        deadline = time.monotonic() + self.limit_s
        while time.monotonic() < deadline:
            for one in read_json(self.folder.status)["workers"]:
                if one["name"] == worker:
                    return str(one["node"])
            time.sleep(0.01)
        raise AssertionError(f"{worker} has no node")

    def kill(self, name: str, sig: signal.Signals = signal.SIGKILL) -> float:
        """Returns the moment before: the run may know of it when this process goes on."""
        pid = self.pid(name)
        struck = time.time()
        os.kill(pid, sig)
        return struck

    # --- afterwards ------------------------------------------------------------------------------------------------

    def left(self) -> list[str]:
        """What is there `left_s` after the run's end: its processes, shared memory, temporary files, port files."""
        deadline = time.monotonic() + self.left_s
        while found := self._left():
            if time.monotonic() > deadline:
                return found
            time.sleep(0.02)
        return []

    def _left(self) -> list[str]:
        new = set(os.listdir(tempfile.gettempdir())) - self._temporary
        strays = [name for name in new if name.startswith(("vllm", "torch", "ray", "mlflow"))]
        ports = [str(path) for path in self.folder.secrets.glob("queue-*.json") if not self._may_be_told(path)]
        return [*own_remains(self.folder), *strays, *ports]

    def _may_be_told(self, path: Path) -> bool:
        """A dead attempt's file may name its port until the next attempt; of an orderly end nothing is left."""
        return not self.folder.ended.exists()


def own_remains(run: RunFolder) -> list[str]:
    """What bears the run's name: processes, shared memory, temporary files."""
    prefix = run_prefix(run)
    named = [f"{place}/{n}" for place in ("/dev/shm", tempfile.gettempdir()) for n in os.listdir(place)]
    return [*map(str, pids_of(run.path)), *(path for path in named if Path(path).name.startswith(prefix))]


def remains(run: RunFolder, limit_s: float = LEFT_S) -> list[str]:
    """Of it, so long after its end."""
    deadline = time.monotonic() + limit_s
    while (found := own_remains(run)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


@dataclass
class Acknowledged:
    """What the queue had acknowledged, as the journals of all attempts say."""

    segments: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """(sequence, index) to (number of tokens, version)."""
    verdicts: dict[str, float | None] = field(default_factory=dict)


def acknowledged(run: RunFolder) -> Acknowledged:
    found = Acknowledged()
    for attempt in run.attempts():
        for line in run.journal(attempt).read_bytes().split(b"\n")[:-1]:
            event = json.loads(line)
            for segment in event.get("segments", ()):
                if segment["num_tokens"]:
                    key = (segment["id"], segment["idx"])
                    found.segments[key] = (segment["num_tokens"], segment["version"])
            for verdict in event.get("verdicts", ()):
                found.verdicts[verdict["id"]] = verdict["score"]
    return found


@dataclass
class Account:
    """What an ended run's queue holds, against what it must hold."""

    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    too_old: list[str] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        return not (self.lost or self.doubled or self.too_old)


def account(path: Path, num_steps: int, per_step: int, staleness: int) -> Account:
    """Of a run that is done: acknowledged work that is missing or changed, what is there twice, and tokens of
    versions beyond the bound. `per_step`: sequences of a step."""
    run, found = RunFolder(path), Account()
    told = acknowledged(run)
    with _index(run) as index:
        segments = {
            (id, idx): (num, version)
            for id, idx, num, version in index.fetch("SELECT seq_id, idx, num_tokens, version FROM seg")
        }
        sequences = {row[0]: row[1:] for row in index.fetch("SELECT id, step, state, score FROM seq")}
        batches = {step: json.loads(ids) for step, ids in index.fetch("SELECT step, ids FROM batch")}
    for key, value in told.segments.items():
        if segments.get(key) != value:
            found.lost.append(f"segment {key}: {value} was acknowledged, {segments.get(key)} is there")
    for id, score in told.verdicts.items():
        if id not in sequences or sequences[id][2] != score:
            found.lost.append(f"verdict of {id}: {score} was acknowledged, {sequences.get(id)} is there")
    for step in range(1, num_steps + 1):
        states = [state for of, state, _ in sequences.values() if of == step]
        if len(states) != per_step or set(states) - {"trained", "dropped"}:
            found.lost.append(f"step {step}: {len(states)} sequences, {sorted(set(states))}")
    trained = [id for ids in batches.values() for id in ids]
    found.doubled += [f"{id} is trained {trained.count(id)} times" for id in set(trained) if trained.count(id) > 1]
    steps = [row["step"] for row in rows(path)]
    if steps != sorted(set(steps)) or steps[-1] != num_steps:
        found.doubled.append(f"rows of metrics.jsonl: {steps}")
    newest: dict[str, int] = {}
    for (id, idx), (_, version) in sorted(segments.items()):
        step = sequences[id][0]
        if not step - 1 - staleness <= version <= step - 1:
            found.too_old.append(f"{id} of step {step}: segment {idx} is of version {version}")
        if version < newest.get(id, 0):
            found.too_old.append(f"{id}: segment {idx} is of version {version}, after {newest[id]}")
        newest[id] = version
    return found


@contextmanager
def _index(run: RunFolder) -> Iterator[Index]:
    with tempfile.TemporaryDirectory(prefix="look-") as name:
        folder = Path(name)
        (folder / "segments").mkdir()
        fork_queue(run.queue, folder, 1 << 30)
        index = Index(folder / "index.db", 1)
        try:
            yield index
        finally:
            index.close()
