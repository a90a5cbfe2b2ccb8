"""The journal of events: one JSON line per event that the core took, for replay in tests and for debugging."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from pipeline.core.errors import RunError
from pipeline.core.events import EVENTS, Event


class Journal:
    """Appends to `path`; an event is written before the core takes it.

    In Python's JSON, which keeps all that an event can hold: numbers that are not finite, text with lone surrogates.
    """

    def __init__(self, path: Path) -> None:
        # Lives as long as the controller. Unbuffered: what a full disk refused must not be tried again at the end.
        self._path = path
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, event: Event, at: float) -> None:
        """Raises OSError where it cannot be written: the run may not go on without."""
        line = {"at": at, "wall": time.time(), "event": type(event).__name__, **msgspec.to_builtins(event)}
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise type(error)(error.errno, error.strerror, str(self._path)) from error

    def close(self) -> None:
        self._file.close()


def read_journal(path: Path) -> Iterator[tuple[float, Event]]:
    """The events in the order in which the core took them, each with its time: equal to what was written, bit for bit.

    A torn last line (the writer was killed) is left out. Raises RunError for any other line that is damaged.
    """
    *lines, _torn = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            at, kind = entry.pop("at"), EVENTS[entry.pop("event")]
            del entry["wall"]
            event: Event = msgspec.convert(entry, kind)
        except (ValueError, KeyError) as error:
            raise RunError(f"{path}, line {number}: not an event of this version: {error!r}") from error
        yield at, event
