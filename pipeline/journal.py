"""The journal of events: one JSON line per event that the core took, for replay in tests and for debugging."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pipeline.core.events import EVENTS, Event


class Journal:
    """Appends to `path`; a torn last line (the writer was killed) is ignored by `read`."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the controller

    def write(self, event: Event, at: float) -> None:
        line = {"at": at, "wall": time.time(), "event": type(event).__name__, **msgspec.to_builtins(event)}
        self._file.write(msgspec.json.encode(line) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[tuple[float, Event]]:
    """The events in the order in which the core took them, each with its time."""
    for line in path.read_bytes().split(b"\n"):
        try:
            entry = msgspec.json.decode(line)
        except msgspec.DecodeError:
            return
        at, kind = entry.pop("at"), EVENTS[entry.pop("event")]
        entry.pop("wall")
        yield at, msgspec.convert(entry, kind)
