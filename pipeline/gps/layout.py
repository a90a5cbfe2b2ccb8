"""Who holds which elements of a model's tensors, and where in tensors of its own: plain values, no bytes.

Every tensor is a box of indexes under its canonical name, the one in checkpoints. A *part* says that a box of it lies
at a place in one of a rank's own tensors. So a fused tensor is several canonical names with places in one buffer, a
flat shard has places in one vector, and a replica is the same part on several ranks. Nothing has to divide anything.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
"""Canonical name to shape: the whole model."""


class Box(NamedTuple):
    """Half-open ranges of indexes, one per dimension."""

    start: Shape
    stop: Shape

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def contains(self, other: "Box") -> bool:
        return all(a <= b for a, b in zip(self.start, other.start, strict=True)) and all(
            a >= b for a, b in zip(self.stop, other.stop, strict=True)
        )


class Place(NamedTuple):
    """Where a box lies: its element (i, j, ...), counted from its own start, is number
    `offset + i * strides[0] + j * strides[1] + ...` of the rank's tensor."""

    tensor: str
    offset: int
    strides: Shape


class Part(NamedTuple):
    """A box of the canonical tensor `name`, and its place."""

    name: str
    box: Box
    place: Place


Pattern = tuple[tuple[int, Box], ...]
"""Of one canonical tensor: which ranks have which boxes."""


@dataclass(frozen=True)
class Layout:
    """`ranks`: the parts of each rank, none empty; `padded`: the elements of those of its tensors that are larger than
    its parts need."""

    ranks: tuple[tuple[Part, ...], ...]
    padded: tuple[Mapping[str, int], ...]

    def sizes(self, rank: int) -> dict[str, int]:
        """The elements of each tensor of a rank."""
        found: dict[str, int] = {}
        for _, box, place in self.ranks[rank]:
            last = place.offset + sum((n - 1) * s for n, s in zip(box.shape, place.strides, strict=True))
            found[place.tensor] = max(found.get(place.tensor, 0), last + 1)
        return {**found, **self.padded[rank]}

    @cached_property
    def patterns(self) -> Mapping[str, Pattern]:
        """By canonical name. Tensors that are cut alike share one object."""
        found: defaultdict[str, list[tuple[int, Box]]] = defaultdict(list)
        for rank, parts in enumerate(self.ranks):
            for part in parts:
                found[part.name].append((rank, part.box))
        once: dict[Pattern, Pattern] = {}
        patterns = {}
        for name, boxes in found.items():
            pattern = tuple(boxes)
            patterns[name] = once.setdefault(pattern, pattern)
        return patterns

    @cached_property
    def contents(self) -> tuple[int, ...]:
        """Of each rank a number that is the same where boxes are, wherever they lie. Only within a process."""
        numbers: dict[int, int] = {}
        for parts in self.ranks:
            if id(parts) not in numbers:
                numbers[id(parts)] = hash(frozenset((part.name, part.box) for part in parts))
        return tuple(numbers[id(parts)] for parts in self.ranks)


@lru_cache(maxsize=4096)
def whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


@lru_cache(maxsize=4096)
def row_major(shape: Shape) -> Shape:
    """Strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return tuple(reversed(strides))


@lru_cache(maxsize=4096)
def cut(shape: Shape, axis: int, start: int, stop: int) -> Box:
    """What is between `start` and `stop` along one dimension."""
    starts, stops = [0] * len(shape), list(shape)
    starts[axis], stops[axis] = start, stop
    return Box(tuple(starts), tuple(stops))


def alone(name: str, box: Box) -> Part:
    """A box that is a contiguous tensor of its own, under the canonical name."""
    return Part(name, box, Place(name, 0, row_major(box.shape)))


def stored(shapes: Shapes, names: Iterable[Iterable[str]]) -> Layout:
    """Each rank holds whole tensors: `names` says which."""
    held: dict[tuple[str, ...], tuple[Part, ...]] = {}
    ranks = []
    for of_rank in names:
        key = tuple(of_rank)
        if key not in held:
            held[key] = tuple(alone(name, whole(shapes[name])) for name in key if 0 not in shapes[name])
        ranks.append(held[key])
    return Layout(tuple(ranks), ({},) * len(ranks))


def part_of(parts: Iterable[Part], box: Box) -> Part:
    """A box of a tensor that lies inside of one of its parts. Raises LookupError where it lies in none."""
    for name, outer, place in parts:
        if outer.contains(box):
            ahead = zip(box.start, outer.start, place.strides, strict=True)
            offset = place.offset + sum((inner - first) * stride for inner, first, stride in ahead)
            return Part(name, box, place._replace(offset=offset))
    raise LookupError(f"no part has {box}")
