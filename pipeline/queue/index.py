"""The index: which sequences, segments, batches and step rows exist, and where their payload lies. SQLite.

One process holds it (the lock is taken before the WAL is opened, so there is no shared memory file and a second
server is refused), and in it one thread speaks to it. What is not committed here does not exist.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.core.errors import Fenced
from pipeline.queue.segments import Block

SCHEMA = """
CREATE TABLE IF NOT EXISTS block(
    no INTEGER PRIMARY KEY, file TEXT NOT NULL, offset INTEGER NOT NULL, length INTEGER NOT NULL, crc INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS seq(
    id TEXT PRIMARY KEY, step INTEGER NOT NULL, prompt_no INTEGER NOT NULL, member INTEGER NOT NULL,
    state TEXT NOT NULL, reason TEXT NOT NULL DEFAULT '', score REAL, failure TEXT NOT NULL DEFAULT '',
    attempt INTEGER NOT NULL DEFAULT 0, turn INTEGER NOT NULL DEFAULT 0,  -- of the owner
    prompt_block INTEGER NOT NULL, prompt_row INTEGER NOT NULL, verdict_block INTEGER, verdict_row INTEGER
    ) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS seq_of_step ON seq(step, prompt_no, member);
CREATE TABLE IF NOT EXISTS seg(
    seq_id TEXT NOT NULL, idx INTEGER NOT NULL, attempt INTEGER NOT NULL, turn INTEGER NOT NULL,
    version INTEGER NOT NULL, replica TEXT NOT NULL, num_tokens INTEGER NOT NULL, finish TEXT NOT NULL,
    block INTEGER NOT NULL, row INTEGER NOT NULL,
    kv_version INTEGER,  -- NULL: version
    PRIMARY KEY(seq_id, idx)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS batch(
    step INTEGER PRIMARY KEY, ids TEXT NOT NULL, state TEXT NOT NULL,  -- ids: JSON, in the order of training
    parts TEXT NOT NULL);  -- JSON: what was measured of the step before it was recorded
CREATE TABLE IF NOT EXISTS step(step INTEGER PRIMARY KEY, row TEXT NOT NULL);  -- row: JSON
"""


def add_new_columns(db: sqlite3.Connection) -> None:
    """To the tables of an index that was made before they existed."""
    if "kv_version" not in {column for _, column, *_ in db.execute("PRAGMA table_info(seg)")}:
        db.execute("ALTER TABLE seg ADD COLUMN kv_version INTEGER")


class Index:
    """One connection. Every method runs on the thread that commits; see GroupCommit."""

    def __init__(self, path: Path, attempt: int) -> None:
        """Take the index for this process.

        Raises BlockingIOError if another process holds it, Fenced if a later attempt has held it.
        """
        path.touch(mode=0o600)  # SQLite gives its WAL the same mode
        self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        try:
            self._take(attempt)
        except sqlite3.OperationalError as error:
            self._db.close()
            if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:  # the other bits say why it is busy
                raise BlockingIOError(f"{path} is held by another process") from None
            raise

    def _take(self, attempt: int) -> None:
        for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL"):
            self._db.execute(f"PRAGMA {pragma}")
        ((highest,),) = self.fetch("PRAGMA user_version")
        if attempt < highest:
            raise Fenced(f"attempt {attempt} may not serve a queue that attempt {highest} has served")
        self._db.executescript(f"BEGIN EXCLUSIVE; PRAGMA user_version = {attempt}; {SCHEMA} COMMIT;")
        add_new_columns(self._db)

    def begin(self, synced: bool) -> None:
        """`synced`: its COMMIT survives the machine; else only the death of this process."""
        self._db.execute(f"PRAGMA synchronous={'FULL' if synced else 'NORMAL'}")
        self._db.execute("BEGIN")

    def commit(self) -> None:
        """Durable when it returns, as `begin` says."""
        self._db.execute("COMMIT")

    @contextmanager
    def part(self) -> Iterator[None]:
        """A part of the transaction that leaves nothing behind if it raises."""
        self._db.execute("SAVEPOINT part")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK TO part")
            raise
        finally:
            self._db.execute("RELEASE part")

    def fetch(self, sql: str, *values: Any) -> list[Any]:
        return self._db.execute(sql, values).fetchall()

    def write(self, sql: str, *values: Any) -> None:
        self._db.execute(sql, values)

    def write_each(self, sql: str, rows: Iterable[Sequence[Any]]) -> None:
        self._db.executemany(sql, rows)

    def add_block(self, block: Block) -> int:
        """Record a block; returns its number."""
        inserted = self._db.execute(
            "INSERT INTO block(file, offset, length, crc) VALUES (?, ?, ?, ?)",
            (block.file, block.offset, block.length, block.crc),
        )
        assert inserted.lastrowid is not None
        return inserted.lastrowid

    def close(self) -> None:
        self._db.close()
