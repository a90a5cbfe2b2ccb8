"""Boxes of tensors that this node does not hold, out of the memory of nodes that do.

A reader asks its own node's mover, which knows who holds what, and gets pieces through a bounded buffer that both map:
two halves of it for each source, so that one fills while the other is read.

    reader ─Ask▶ mover ─Begun▶ (Filled ▶ reader copies ▶ Emptied) ... all pieces, or Failed

What is given comes in the order of what was asked for, whatever its source.
"""

import mmap
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.segment import Entry
from pipeline.gps.wants import Packed, Want, cut_up, write_wants

BUFFER_BYTES = 64 << 20
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
_MIB = 1 << 20


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Boxes of `version` of the model `store`, as the file `want` says."""

    store: str
    version: int
    want: str


class Begun(msgspec.Struct, frozen=True, tag=True):
    """Which wants come from each source, ascending."""

    sources: list[list[int]]


class Filled(msgspec.Struct, frozen=True, tag=True):
    """The next piece of a source is there."""

    source: int


class Emptied(msgspec.Struct, frozen=True, tag=True):
    source: int


class Failed(msgspec.Struct, frozen=True, tag=True):
    """`is_gone`: another version is where this one was, so asking again is of no use."""

    reason: str
    is_gone: bool = False


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Ask | Begun | Filled | Emptied | Failed)


class End:
    """One end of a reader's connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._stream = sock.makefile("rb")

    def say(self, message: Ask | Begun | Filled | Emptied | Failed) -> None:
        data = _encoder.encode(message)
        self.sock.sendall(len(data).to_bytes(4, "little") + data)

    def hear(self) -> Ask | Begun | Filled | Emptied | Failed:
        """Raises EOFError at the end."""
        head = self._stream.read(4)
        if len(head) < 4:
            raise EOFError("the other end is gone")
        message: Ask | Begun | Filled | Emptied | Failed = _decoder.decode(
            self._stream.read(int.from_bytes(head, "little"))
        )
        return message

    def close(self) -> None:
        self._stream.close()
        self.sock.close()


def address(gps: str) -> str:
    """Of the mover of the node whose shared memory has this base name. Nothing stands for it in a file system."""
    return f"\0{gps}-elsewhere"


def half_bytes(num_sources: int) -> int:
    """Of the buffer's halves, two for each source."""
    return BUFFER_BYTES // (2 * max(1, num_sources)) // _MIB * _MIB or _MIB


@dataclass
class Elsewhere:
    """`gps`: base name of the node's shared memory; `store`: policy or genrm; `folder`: for the files of wants.

    One reading at a time. Sent to another process, it is a connection of its own there.
    """

    gps: str
    store: str
    folder: Path
    limit_s: float
    _connection: "_Connection | None" = field(default=None, compare=False)

    def __reduce__(self) -> tuple[type["Elsewhere"], tuple[str, str, Path, float]]:
        return Elsewhere, (self.gps, self.store, self.folder, self.limit_s)

    def fetch(
        self, version: int, wants: Sequence[Want], entries: Mapping[str, Entry]
    ) -> Iterator[tuple[Packed, memoryview]]:
        """Each with its bytes, which stay only until the next is asked for. Where a source fails, the rest comes from
        others; a want that had come in part comes again. Raises WeightsUnavailable if the version is gone there, or if
        nothing helps for `limit_s`."""
        done, pause_s, deadline = 0, _FIRST_PAUSE_S, time.monotonic() + self.limit_s
        while done < len(wants):
            first = done
            connection = None
            try:
                connection = self._connected()
                for packed, data in connection.stream(self._ask(version, wants[first:]), wants[first:], entries):
                    number = packed.number + first
                    yield packed._replace(number=number), data
                    if packed.want.box.stop == wants[number].box.stop:  # its last part
                        done, pause_s, deadline = number + 1, _FIRST_PAUSE_S, time.monotonic() + self.limit_s
            except _Gone:
                self.close()
                raise
            except (OSError, EOFError, WeightsUnavailable) as error:
                self.close()
                if time.monotonic() > deadline:
                    raise WeightsUnavailable(f"version {version} cannot be read from other nodes: {error}") from error
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except BaseException:  # nobody reads the rest
                if connection is self._connection:
                    self.close()
                raise

    def close(self) -> None:
        if self._connection is not None:
            self._connection.end.close()
        self._connection = None

    def _ask(self, version: int, wants: Sequence[Want]) -> Ask:
        return Ask(self.store, version, str(write_wants(self.folder, wants)))

    def _connected(self) -> "_Connection":
        if self._connection is None:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(self.limit_s)
            try:
                sock.connect(address(self.gps))
                _, (buffer_fd, *_), _, _ = socket.recv_fds(sock, 1, 1)
                buffer = memoryview(mmap.mmap(buffer_fd, BUFFER_BYTES))
                os.close(buffer_fd)
            except (OSError, ValueError) as error:
                sock.close()
                raise WeightsUnavailable(f"there is no mover at {self.gps}: {error}") from error
            self._connection = _Connection(End(sock), buffer)
        return self._connection


class _Gone(WeightsUnavailable):
    """There is a newer one where it was."""


def _error(message: object) -> WeightsUnavailable:
    if isinstance(message, Failed):
        return _Gone(message.reason) if message.is_gone else WeightsUnavailable(message.reason)
    return WeightsUnavailable(f"{message} came from the mover")


class _Connection:
    def __init__(self, end: End, buffer: memoryview) -> None:
        self.end, self._buffer = end, buffer
        self._filled: list[int] = []

    def stream(
        self, ask: Ask, wants: Sequence[Want], entries: Mapping[str, Entry]
    ) -> Iterator[tuple[Packed, memoryview]]:
        """In the order of the wants, from several sources at once."""
        self.end.say(ask)
        begun = self.end.hear()
        if not isinstance(begun, Begun):
            raise _error(begun)
        self._filled = [0] * len(begun.sources)
        of_want = {number: source for source, numbers in enumerate(begun.sources) for number in numbers}
        half = half_bytes(len(begun.sources))
        sources = [self._of(i, numbers, half, wants, entries) for i, numbers in enumerate(begun.sources)]
        for number, want in enumerate(wants):
            left = want.box.size
            while left:
                packed, data = next(sources[of_want[number]])
                left -= packed.want.box.size
                yield packed, data
        for source in sources:
            next(source, None)  # which says that its last piece has been read

    def _of(
        self, source: int, numbers: Sequence[int], half: int, wants: Sequence[Want], entries: Mapping[str, Entry]
    ) -> Iterator[tuple[Packed, memoryview]]:
        """All from one source."""
        for i, piece in enumerate(cut_up([wants[number] for number in numbers], entries, half)):
            while not self._filled[source]:
                filled = self.end.hear()
                if not isinstance(filled, Filled):
                    raise _error(filled)
                self._filled[filled.source] += 1
            self._filled[source] -= 1
            at = (2 * source + i % 2) * half
            for packed in piece.boxes:
                start = at + packed.offset
                yield packed._replace(number=numbers[packed.number]), self._buffer[start : start + packed.nbytes]
            self.end.say(Emptied(source))
