"""Boxes that are wanted from another node, and the pieces in which they travel.

Who wants writes its boxes down once, in a file whose name is made of what it says; then both ends know what goes over
the line, and in which order, from a version's number alone. A piece is at most as large as half of the bounded buffer
that it arrives in. What lies in one run of an image travels as it lies there; the rest is packed, box after box.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.layout import Box
from pipeline.gps.ranges import byte_ranges
from pipeline.gps.segment import ITEM_BYTES, Entry
from pipeline.run_folder import write_atomic

PIECE_BYTES = 32 << 20
_ALIGN = 8


class Want(NamedTuple):
    """A box of the tensor `name`."""

    name: str
    box: Box


class Packed(NamedTuple):
    """Where a box lies in a piece, in bytes; its elements are in the order of a contiguous tensor. `number` counts the
    wants: a large one comes in several pieces."""

    number: int
    want: Want
    offset: int
    nbytes: int


class Piece(NamedTuple):
    """`nbytes` of it; `at`: where these lie in the image, if they do so in one run, else -1."""

    boxes: tuple[Packed, ...]
    nbytes: int
    at: int


def cut_up(wants: Sequence[Want], entries: Mapping[str, Entry], most: int = PIECE_BYTES) -> list[Piece]:
    """In the order of the wants. Raises KeyError for a tensor that is not there."""
    found: list[Piece] = []
    boxes: list[Packed] = []
    used = 0

    def close() -> None:
        nonlocal used
        if boxes:
            found.append(Piece(tuple(boxes), used, -1))
            boxes.clear()
            used = 0

    for number, want in enumerate(wants):
        entry = entries[want.name]
        for box in _rows(want.box, ITEM_BYTES[entry.dtype], most):
            nbytes = box.size * ITEM_BYTES[entry.dtype]
            at = _one_run(entry, box)
            if at >= 0 and nbytes * 2 > most:  # worth a piece of its own: it needs no packing
                close()
                found.append(Piece((Packed(number, Want(want.name, box), 0, nbytes),), nbytes, at))
                continue
            if used + nbytes > most:
                close()
            boxes.append(Packed(number, Want(want.name, box), used, nbytes))
            used += -(-nbytes // _ALIGN) * _ALIGN
    close()
    return found


def _rows(box: Box, item_bytes: int, most: int) -> Iterator[Box]:
    """The box, in parts that are not too large: cut along its first dimension, and where one row is, along the next."""
    size = box.size * item_bytes
    if size <= most or not box.start:
        yield box
        return
    axis = next(d for d, length in enumerate(box.shape) if length > 1)
    count = max(1, box.shape[axis] * most // size)
    for first in range(box.start[axis], box.stop[axis], count):
        last = min(first + count, box.stop[axis])
        start = (*box.start[:axis], first, *box.start[axis + 1 :])
        stop = (*box.stop[:axis], last, *box.stop[axis + 1 :])
        yield from _rows(Box(start, stop), item_bytes, most)


def _one_run(entry: Entry, box: Box) -> int:
    """Where the box lies in the image, if in one run; else -1."""
    runs = byte_ranges(entry, box)
    at, nbytes = next(runs)
    return at if nbytes == box.size * ITEM_BYTES[entry.dtype] else -1


def write_wants(folder: Path, wants: Iterable[Want], most: int = PIECE_BYTES) -> Path:
    """Returns the file that says so, and how large pieces may be; it may have been there."""
    text = json.dumps([most, [[name, box.start, box.stop] for name, box in wants]])
    path = folder / f"want-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    if not path.exists():
        write_atomic(path, text)
    return path


def read_wants(path: Path) -> tuple[list[Want], int]:
    try:
        most, boxes = json.loads(path.read_text())
        return [Want(name, Box(tuple(start), tuple(stop))) for name, start, stop in boxes], most
    except (OSError, ValueError) as error:
        raise WeightsUnavailable(f"what is wanted should stand in {path}: {error}") from error
