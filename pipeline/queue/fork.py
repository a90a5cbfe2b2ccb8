"""A queue as it was after one of its steps, as a new queue: what a fork of a run starts from.

Nothing of the old one is changed: its index is copied with its log and only the copy is opened.
"""

import fcntl
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from pipeline.core.errors import RunError
from pipeline.queue.index import SCHEMA, add_new_columns

_LOCK_BYTES = (510, 0x40000002)
"""Length and place of SQLite's lock on a database that is in use; whoever holds the index holds all of it."""
_WAIT_S = 5.0  # for the server of a run that has just died
_POLL_S = 0.02
_OF_STEPS = (
    ("seg", "seq_id IN (SELECT id FROM seq WHERE step > ?)"),
    *((t, "step > ?") for t in ("seq", "batch", "step")),
)


class Recorded(NamedTuple):
    """The newest step whose metric row is durable, and the newest that has sequences; 0 where there is none."""

    finished: int
    begun: int


def recorded(queue: Path) -> Recorded:
    """What a queue that nobody serves holds. Raises RunError if a server has it."""
    with tempfile.TemporaryDirectory(prefix="pivot-queue-") as folder, _copied(queue, Path(folder)) as db:
        (finished,) = db.execute("SELECT coalesce(max(step), 0) FROM step").fetchone()
        (begun,) = db.execute("SELECT coalesce(max(step), 0) FROM seq").fetchone()
    return Recorded(finished, max(finished, begun))


def fork_queue(queue: Path, target: Path, newest: int) -> None:
    """Make `target`, an empty folder with `segments/` in it, the queue as it was when step `newest` was the last one:
    its sequences, batches, rows and their payload, durable when this returns. The fork counts its attempts from 1.
    Raises RunError if a server has `queue`."""
    with _copied(queue, target) as db:
        for table, is_newer in _OF_STEPS:
            db.execute(f"DELETE FROM {table} WHERE {is_newer}", (newest,))
        db.execute(
            "DELETE FROM block WHERE no NOT IN (SELECT prompt_block FROM seq UNION SELECT block FROM seg"
            " UNION SELECT verdict_block FROM seq WHERE verdict_block IS NOT NULL)"
        )
        files = [file for (file,) in db.execute("SELECT DISTINCT file FROM block")]
        db.execute("PRAGMA user_version = 0")
        db.commit()
    for file in files:
        shutil.copyfile(queue / "segments" / file, target / "segments" / file)
        _sync(target / "segments" / file)
    for path in (target / "index.db", target / "segments", target):
        _sync(path)


@contextmanager
def _copied(queue: Path, target: Path) -> Iterator[sqlite3.Connection]:
    """The index, copied to `target` and opened there; an empty one if there is none."""
    (target / "index.db").touch(mode=0o600)
    if (queue / "index.db").exists():
        with open(queue / "index.db", "rb") as held:
            _lock(held, queue)
            for name in ("index.db", "index.db-wal"):
                if (queue / name).exists():
                    shutil.copyfile(queue / name, target / name)
    with closing(sqlite3.connect(target / "index.db")) as db:
        db.execute("PRAGMA locking_mode=EXCLUSIVE")
        db.executescript(SCHEMA)
        add_new_columns(db)
        yield db


def _lock(index: BinaryIO, queue: Path) -> None:
    """Keep servers away for as long as the file is open."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        try:
            fcntl.lockf(index, fcntl.LOCK_SH | fcntl.LOCK_NB, *_LOCK_BYTES)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise RunError(f"a queue server still has {queue} after {_WAIT_S:g} s: is the run alive?") from None
        time.sleep(_POLL_S)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
