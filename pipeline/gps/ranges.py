"""Boxes as ranges of a store's bytes, for those who move bytes and know nothing of tensors."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path

from pipeline.gps.layout import Box, row_major
from pipeline.gps.segment import ITEM_BYTES, Entry
from pipeline.run_folder import read_json, write_json

Range = tuple[int, int]
"""Offset in the image, and number of bytes."""


def byte_ranges(entry: Entry, box: Box) -> Iterator[Range]:
    """Where a box of a tensor lies: one range for each run of neighbours."""
    item, strides = ITEM_BYTES[entry.dtype], row_major(entry.shape)
    run = len(entry.shape)  # the dimensions from here on are whole: they make one run
    while run and (box.start[run - 1], box.stop[run - 1]) == (0, entry.shape[run - 1]):
        run -= 1
    outer = max(run - 1, 0)
    length = item
    for axis in range(outer, len(entry.shape)):
        length *= box.stop[axis] - box.start[axis]
    inner = sum(box.start[axis] * strides[axis] for axis in range(outer, len(entry.shape)))
    for index in itertools.product(*(range(box.start[d], box.stop[d]) for d in range(outer))):
        first = inner + sum(i * stride for i, stride in zip(index, strides, strict=False))
        yield entry.offset + first * item, length


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Sorted, those that touch as one."""
    found: list[Range] = []
    for offset, length in sorted(ranges):
        if found and found[-1][0] + found[-1][1] == offset:
            found[-1] = (found[-1][0], found[-1][1] + length)
        else:
            found.append((offset, length))
    return found


def common(ranges: Iterable[Range], others: Iterable[Range]) -> list[Range]:
    """What is in both; each sorted, its ranges apart."""
    one, other = list(ranges), list(others)
    found, i, j = [], 0, 0
    while i < len(one) and j < len(other):
        start, stop = max(one[i][0], other[j][0]), min(sum(one[i]), sum(other[j]))
        if start < stop:
            found.append((start, stop - start))
        if sum(one[i]) < sum(other[j]):
            i += 1
        else:
            j += 1
    return found


def write_share(prefix: Path, rank: int, node: int, ranges: Iterable[Range]) -> None:
    """What a training rank writes of each version, for all nodes to read. `node`: the number of its node among those
    of the ranks."""
    write_json(Path(f"{prefix}-{rank}"), {"node": node, "ranges": merged(ranges)}, durable=False)


def read_share(prefix: Path, node: int) -> list[Range]:
    """What all ranks of one node write. Raises LookupError if nobody said so."""
    told = [read_json(path) for path in prefix.parent.glob(f"{prefix.name}-*") if path.suffix == ""]
    found = [tuple(part) for one in told if one and one["node"] == node for part in one["ranges"]]
    if not found:
        raise LookupError(f"no rank of node {node} has said in {prefix}-* what it writes")
    return merged((offset, length) for offset, length in found)
