"""Checkpoints: folders `step_N/{model/,trainer/,state.json,MANIFEST.json}` under any fsspec URL.

A checkpoint is complete when its MANIFEST.json names step N and every file that it lists is there, as long and (files
below HASHED_BYTES) with the content that it says. Nothing else is ever read.

* Local: written aside in `step_N.tmp-*`, every file and folder synced, renamed to `step_N`, parent synced.
* Elsewhere there is no rename: the manifest object is written last and removed first. An object itself is there whole
  or not at all.

So at every instant each complete checkpoint stays complete until `prune` takes it, and `prune` keeps the newest ones.
One process writes: the trainer's worker.
"""

import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, NamedTuple

from pipeline.config import Config
from pipeline.core.errors import ConfigError, RunError
from pipeline.kill_points import kill_point
from pipeline.remote import NOT_THERE, Files
from pipeline.run_folder import RunFolder
from pipeline.stage import TaskContext, current_task

MANIFEST = "MANIFEST.json"
FORMAT = 1
HASHED_BYTES = 64 << 20
"""Larger files are checked by their size alone when a checkpoint is looked for; reading checks the content too."""

_SHARE = 0.9
"""Of `limits.save_s`; the rest is for the report."""
_begun: ContextVar[tuple[TaskContext, float]] = ContextVar("_begun")
"""The stage task that saves, and since when (monotonic)."""
_STEP = re.compile(r"step_(\d+)")
_UNFINISHED_SAVE = re.compile(r"step_(\d+)\.tmp-\w+")
_REMAINS = re.compile(r"step_\d+\.(tmp|old)-\w+")


class Newest(NamedTuple):
    """`step` 0 and `path` "" where there is none; `skipped`: newer ones, each with the reason."""

    step: int
    path: str
    skipped: list[tuple[str, str]]


def local_model(checkpoint: str, copies: str) -> str:
    """The checkpoint's model/ as a local folder; what lies elsewhere is copied below `copies` first, and is then what
    the manifest says. Several may copy at once."""
    files = Files(checkpoint)
    if files.is_local:
        return f"{files.root}/model"
    found = Checkpoint(checkpoint)
    names = sorted(name for name in found.files if name.startswith("model/"))
    content = hashlib.sha256("".join(found.files[name]["sha256"] for name in names).encode()).hexdigest()
    copy = f"{copies}/{checkpoint.rstrip('/').rpartition('/')[2]}-{content[:16]}"
    if not os.path.isdir(copy):
        aside = f"{copy}.tmp-{uuid.uuid4().hex[:8]}"
        try:
            for name in names:
                found.copy(name, f"{aside}/{name}")
            try:
                os.rename(aside, copy)
            except OSError:
                if not os.path.isdir(copy):  # else another was faster
                    raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return f"{copy}/model"


class Checkpoint:
    """A complete checkpoint, to read from. Raises RunError where a file is not what the manifest says."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._store = Files(path)
        manifest = self._store.read("cat_file", f"{self._store.root}/{MANIFEST}")
        self.files: dict[str, Any] = json.loads(manifest)["files"]

    def _time_for(self, name: str) -> dict[str, int]:
        return {"num_bytes": self.files[name]["size"]}

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def read(self, name: str) -> bytes:
        if name not in self.files:
            raise RunError(f"{self.path} has no {name}; it has {', '.join(self.files)}")
        data: bytes = self._store.read("cat_file", f"{self._store.root}/{name}", **self._time_for(name))
        if hashlib.sha256(data).hexdigest() != self.files[name]["sha256"]:
            raise RunError(f"{self.path}/{name} is damaged: its sha256 is not that of the manifest")
        return data

    def copy(self, name: str, target: str) -> None:
        """The file as a local one, without having all of it in memory."""
        os.makedirs(os.path.dirname(target), mode=0o700, exist_ok=True)
        self._store.read("get_file", f"{self._store.root}/{name}", target, **self._time_for(name))
        with open(target, "rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != self.files[name]["sha256"]:
                raise RunError(f"{self.path}/{name} is damaged: its sha256 is not that of the manifest")

    def read_json(self, name: str) -> Any:
        return json.loads(self.read(name))


def store_of(run: RunFolder, config: Config) -> "CheckpointStore":
    return CheckpointStore(config.checkpoint.uri or str(run.checkpoints))


class CheckpointStore:
    """The checkpoints of one run; `uri` is their place.

    Where the store is not local, what a stage task does here ends within `limits.save_s`. Raises RunError with the URL
    for whatever goes wrong there.
    """

    def __init__(self, uri: str) -> None:
        self._files = Files(uri)
        self._root, self._is_local = self._files.root, self._files.is_local
        self.uri = self._root if self._is_local else uri.rstrip("/")

    def path(self, step: int) -> str:
        """Where the checkpoint of `step` is: an absolute path, or a URL."""
        return f"{self.uri}/step_{step}"

    def save(self, step: int, files: Iterable[tuple[str, bytes]]) -> str:
        """Make the checkpoint of `step` durable; return its path. `files` are (name inside it, content).

        `files` is consumed one by one, and not at all when `step` is complete already. If anything fails, what was
        there before is untouched.
        """
        self._limit()
        if self._fault(step) is not None:
            if self._is_local:
                self._save_aside(step, files)
            else:
                self._save_in_place(step, files)
        return self.path(step)

    def newest_complete(self, at_most: int | None = None) -> Newest:
        """The newest complete checkpoint, not newer than `at_most`. OSErrors other than "not found" are raised: a
        store that does not answer is no reason to take an older checkpoint."""
        skipped: list[tuple[str, str]] = []
        for step, name in self._newest_first():
            if at_most is not None and step > at_most:
                continue
            if name != f"step_{step}":
                fault: str | None = "a save that did not end"
            else:
                fault = self._fault(step)
            if fault is None:
                return Newest(step, self.path(step), skipped)
            skipped.append((name, fault))
        return Newest(0, "", skipped)

    def complete(self) -> list[int]:
        """The steps of all complete checkpoints, ascending."""
        found = (step for step, name in self._newest_first() if name == f"step_{step}")
        return sorted(step for step in found if self._fault(step) is None)

    def require_unused(self) -> None:
        """A new run would take the checkpoints of another one for its own, and remove them. Raises ConfigError."""
        if steps := self.complete():
            raise ConfigError(
                f"{self.uri} holds checkpoints of another run ({len(steps)}, up to step {max(steps)}): "
                "name a free place, checkpoint.uri=..."
            )

    def prune(self, keep: int) -> list[str]:
        """Remove all complete checkpoints but the newest `keep`, the oldest first, and the remains of saves and
        prunes that died. Damaged folders with a manifest stay: they may be somebody's copy. Returns the names."""
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint is kept")
        self._limit()
        complete = self.complete()
        removed = [f"step_{step}" for step in complete[:-keep]]
        for name in removed:
            self._remove(name)
        for name in self._names():
            match = _STEP.fullmatch(name)
            if _REMAINS.fullmatch(name) or (
                match
                and complete
                and int(match[1]) < complete[-1]
                and not self._files.is_there(self._inside(name, MANIFEST))
            ):
                self._files.change("rm", self._inside(name), recursive=True)
                removed.append(name)
        return removed

    # --- reading -----------------------------------------------------------------------------------------------

    def _inside(self, *names: str) -> str:
        return "/".join((self._root, *names))

    def _names(self) -> list[str]:
        self._files.forget()
        try:
            entries = self._files.read("ls", self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(entry.rstrip("/").rsplit("/", 1)[-1] for entry in entries)

    def _newest_first(self) -> list[tuple[int, str]]:
        """(step, name) of what is, or should have become, a checkpoint."""
        matches = ((_STEP.fullmatch(name) or _UNFINISHED_SAVE.fullmatch(name), name) for name in self._names())
        return sorted(
            ((int(match[1]), name) for match, name in matches if match), key=lambda found: (-found[0], found[1])
        )

    def _fault(self, step: int) -> str | None:
        """Why `step` is no complete checkpoint, or None if it is one."""
        folder = self._inside(f"step_{step}")
        try:
            manifest = json.loads(self._files.read("cat_file", f"{folder}/{MANIFEST}"))
            said, files = manifest["step"], manifest["files"].items()
        except NOT_THERE:
            return f"{MANIFEST} is missing"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"{MANIFEST} cannot be read: {error!r}"
        if said != step:
            return f"its manifest is that of step {said}"
        for name, entry in files:
            try:
                size = self._files.read("info", f"{folder}/{name}")["size"]
                if size != entry["size"]:
                    return f"{name} has {size} bytes, not {entry['size']}"
                if size < HASHED_BYTES:
                    data = self._files.read("cat_file", f"{folder}/{name}")
                    if hashlib.sha256(data).hexdigest() != entry["sha256"]:
                        return f"{name} has another content than the manifest says"
            except NOT_THERE:
                return f"{name} is missing"
        return None

    # --- writing -----------------------------------------------------------------------------------------------

    def _limit(self) -> None:
        """All that a stage task saves and prunes ends a little before `limits.save_s`: at that the task is killed, and
        nobody would learn which store it waited for."""
        task = current_task.get(None)
        if task is None:
            return
        if _begun.get(None) is None or _begun.get()[0] is not task:
            _begun.set((task, time.monotonic()))
        save_s = task.worker.config.limits.save_s
        self._files.limit(_begun.get()[1] + _SHARE * save_s, f"limits.save_s ({save_s:g} s)")

    def _save_aside(self, step: int, files: Iterable[tuple[str, bytes]]) -> None:
        target = self._inside(f"step_{step}")
        aside = f"{target}.tmp-{uuid.uuid4().hex[:8]}"
        try:
            self._write_all(aside, step, files)
            for folder, _, _ in os.walk(aside):
                _sync_folder(folder)
            kill_point("checkpoint.before_rename")
            if os.path.exists(target):  # damaged, else there would be nothing to save
                os.rename(target, f"{target}.old-{uuid.uuid4().hex[:8]}")
            os.rename(aside, target)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        _sync_folder(self._root)
        kill_point("checkpoint.after_rename")

    def _save_in_place(self, step: int, files: Iterable[tuple[str, bytes]]) -> None:
        folder = self._inside(f"step_{step}")
        if self._files.is_there(f"{folder}/{MANIFEST}"):  # of a damaged one: it must not vouch for a mixture
            self._files.change("rm_file", f"{folder}/{MANIFEST}")
            kill_point("checkpoint.manifest_removed")
        self._write_all(folder, step, files)
        kill_point("checkpoint.after_manifest")

    def _write_all(self, folder: str, step: int, files: Iterable[tuple[str, bytes]]) -> None:
        """The files, then the manifest."""
        manifest: dict[str, Any] = {"format": FORMAT, "step": step, "files": {}}
        for name, data in files:
            self._write(f"{folder}/{name}", data)
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            kill_point("checkpoint.file")
        kill_point("checkpoint.before_manifest")
        self._write(f"{folder}/{MANIFEST}", json.dumps(manifest, indent=1).encode())

    def _write(self, path: str, data: bytes) -> None:
        if not self._is_local:
            self._files.change("pipe_file", path, data)
            return
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def _remove(self, name: str) -> None:
        """A death on the way leaves no folder that looks complete."""
        if self._is_local:
            aside = f"{name}.old-{uuid.uuid4().hex[:8]}"
            os.rename(self._inside(name), self._inside(aside))
            name = aside
        else:
            self._files.change("rm_file", self._inside(name, MANIFEST))
        kill_point("checkpoint.prune")
        self._files.change("rm", self._inside(name), recursive=True)


def _sync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
