"""Two layouts cut to their common granularity: the atomic slices, each wholly held and wholly wanted."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.layout import Box, Pattern


class Slice(NamedTuple):
    """A box that every one of `holders` has and every one of `receivers` wants."""

    box: Box
    holders: tuple[int, ...]
    receivers: tuple[int, ...]


def refine(name: str, have: Pattern, want: Pattern) -> list[Slice]:
    """The atomic slices of one tensor that somebody wants. Raises WeightsUnavailable where nobody has one of them.

    Along each dimension the edges of all boxes cut; a slice is a product of intervals. So nothing has to divide
    anything, and there are at most (product over dimensions of the number of edges, less one) slices.
    """
    boxes = [box for _, box in (*have, *want)]
    edges = [sorted({e for box in boxes for e in (box.start[d], box.stop[d])}) for d in range(len(boxes[0].start))]
    found = []
    for intervals in itertools.product(*map(itertools.pairwise, edges)):
        box = Box(tuple(a for a, _ in intervals), tuple(b for _, b in intervals))
        receivers = _with(box, want)
        if not receivers:
            continue
        holders = _with(box, have)
        if not holders:
            raise WeightsUnavailable(f"nobody holds {name}{_text(box)}, which rank {receivers[0]} wants")
        found.append(Slice(box, holders, receivers))
    return found


def coalesce(boxes: Iterable[Box]) -> list[Box]:
    """Boxes of one tensor that do not overlap, those merged that meet in a whole face; sorted."""
    kept = list(boxes)
    if len(kept) < 2:
        return kept
    for axis in reversed(range(len(kept[0].start))):
        others = [d for d in range(len(kept[0].start)) if d != axis]
        kept.sort(key=lambda box: ([(box.start[d], box.stop[d]) for d in others], box.start[axis]))
        merged: list[Box] = []
        for box in kept:
            last = merged[-1] if merged else None
            if (
                last is not None
                and last.stop[axis] == box.start[axis]
                and all(last.start[d] == box.start[d] and last.stop[d] == box.stop[d] for d in others)
            ):
                merged[-1] = Box(last.start, box.stop)
            else:
                merged.append(box)
        kept = merged
    return sorted(kept)


def _with(box: Box, pattern: Pattern) -> tuple[int, ...]:
    return tuple(dict.fromkeys(rank for rank, outer in pattern if outer.contains(box)))


def _text(box: Box) -> str:
    return f"[{', '.join(f'{a}:{b}' for a, b in zip(box.start, box.stop, strict=True))}]"
