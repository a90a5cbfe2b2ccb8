"""What the watcher writes down, one JSON object per line: planner/decisions.jsonl has what the planner was asked and
said, what was shifted, and what that was worth (`kind` is `decision`, `shift` or `worth`), timeline.jsonl what happened
to slots and steps (pipeline.watching.history).

Who reads them needs nothing else of the run. A line that cannot be written is lost, and the run goes on: that is said
once.
"""

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

Line = dict[str, Any]


class Book:
    """Of one attempt. `write` is slow, and to be called off the controller's loop, by one thread."""

    def __init__(self, path: Path, attempt: int, say: Callable[[str], None]) -> None:
        self._path, self._attempt, self._say = path, attempt, say
        self._is_torn = _is_torn(path)
        self._has_failed = False

    def write(self, kind: str, at_s: float, line: Mapping[str, Any]) -> None:
        """`at_s`: of the controller's clock."""
        whole = {"kind": kind, "attempt": self._attempt, "at": at_s, "wall": time.time(), **line}
        try:
            data = json.dumps(whole, separators=(",", ":"), allow_nan=False).encode() + b"\n"
            fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                data = b"\n" + data if self._is_torn else data
                written = os.write(fd, data)
                self._is_torn = written < len(data)
            finally:
                os.close(fd)
            if self._is_torn:
                raise OSError(f"{written} of {len(data)} bytes were written")
        except (OSError, ValueError) as error:
            if not self._has_failed:
                self._has_failed = True
                self._say(f"lines cannot be written to {self._path}: {error}; they are lost, and the run goes on")


def _is_torn(path: Path) -> bool:
    """The attempt before ended within a line."""
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError:
        return False


def read_book(path: Path) -> Iterator[Line]:
    """The lines in the order in which they were written."""
    return (line for line in read_lines(path) if "kind" in line)


def read_lines(path: Path) -> Iterator[Line]:
    """The JSON objects of a file, one per line. Torn lines (a full disk, a writer that was killed) are left out."""
    if not path.exists():
        return
    for text in path.read_bytes().split(b"\n"):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield line


def began(path: Path) -> float | None:
    """When the first line was written, in seconds since the epoch; None where there is none."""
    try:
        with path.open("rb") as file:
            return float(json.loads(file.readline())["wall"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
