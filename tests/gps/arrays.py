"""Layouts carried out on arrays: what each rank has of a model whose elements are all different."""

import math
from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from pipeline.gps import trainer_layout as trainers
from pipeline.gps.layout import Box, Layout, Part, Place, Shapes
from pipeline.gps.transfer_plan import TransferPlan

PADDING = -1
Arrays = dict[str, np.ndarray]


def numbered(shapes: Shapes) -> Arrays:
    found, first = {}, 0
    for name, shape in shapes.items():
        found[name] = np.arange(first, first + math.prod(shape)).reshape(shape)
        first += math.prod(shape)
    return found


def empty(layout: Layout, rank: int) -> Arrays:
    return {tensor: np.full(size, PADDING) for tensor, size in layout.sizes(rank).items()}


def cell(of: np.ndarray, box: Box) -> np.ndarray:
    return of[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]


def at(own: Arrays, place: Place, box: Box) -> np.ndarray:
    """The elements of a rank's tensor in which a box lies, as a writable view."""
    flat = own[place.tensor][place.offset :]
    return as_strided(flat, box.shape, [stride * flat.itemsize for stride in place.strides])


def laid_out(layout: Layout, rank: int, model: Arrays) -> Arrays:
    own = empty(layout, rank)
    for name, box, place in layout.ranks[rank]:
        at(own, place, box)[...] = cell(model[name], box)
    return own


def put_together(layout: Layout, ranks: list[Arrays], shapes: Shapes) -> Arrays:
    """The model, from what all ranks have."""
    model = {name: np.full(shape, PADDING) for name, shape in shapes.items()}
    for parts, own in zip(layout.ranks, ranks, strict=True):
        for name, box, place in parts:
            cell(model[name], box)[...] = at(own, place, box)
    return model


def inside(parts: Iterable[Part], name: str, box: Box) -> Place:
    """Where a box lies that is inside of one of the parts."""
    for part in parts:
        if part.name == name and part.box.contains(box):
            ahead = zip(box.start, part.box.start, part.place.strides, strict=True)
            offset = part.place.offset + sum((a - b) * stride for a, b, stride in ahead)
            return Place(part.place.tensor, offset, part.place.strides)
    raise AssertionError(f"no part has {name} {box}")


def carried_out(plan: TransferPlan, have: Layout, held: list[Arrays], want: Layout, num_replicas: int = 1) -> list:
    """What the ranks of each replica have after the plan's copies, and nothing else."""
    replicas = []
    for replica in range(num_replicas):
        ranks = [empty(want, rank) for rank in range(len(want.ranks))]
        for share in plan.shares:
            if share.replica == replica:
                for name in share.names:
                    source = inside(have.ranks[share.source], name, share.box)
                    target = inside(want.ranks[share.rank], name, share.box)
                    of = at(ranks[share.rank], target, share.box)
                    assert (of == PADDING).all(), "copied twice"
                    of[...] = at(held[share.source], source, share.box)
        replicas.append(ranks)
    return replicas


def equal(one: list[Arrays], other: list[Arrays]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


KINDS = {
    "ddp": trainers.ddp,
    "fsdp2": trainers.fsdp2,
    "tensor_parallel": trainers.tensor_parallel,
    "flat_shards": trainers.flat_shards,
}
_NAMES = (
    "model.embed_tokens.weight",
    "model.layers.0.self_attn.q_proj.weight",
    "model.layers.0.self_attn.o_proj.weight",
    "model.layers.0.mlp.down_proj.weight",
    "model.layers.1.mlp.up_proj.weight",
    "model.layers.1.conv.weight",
    "model.norm.weight",
    "lm_head.weight",
)


@st.composite
def any_shapes(draw: st.DrawFn) -> dict[str, tuple[int, ...]]:
    """One to three dimensions; matrices where the name says so. Also empty ones."""
    found = {}
    for name in draw(st.lists(st.sampled_from(_NAMES), min_size=1, unique=True)):
        dims = 1 if "norm" in name else 3 if "conv" in name else 2
        found[name] = tuple(draw(st.integers(0 if dims == 3 else 1, 9)) for _ in range(dims))
    return found


@st.composite
def any_layout(draw: st.DrawFn, shapes: Shapes) -> Layout:
    kind = draw(st.sampled_from([*KINDS, "pipelined"]))
    num_ranks = draw(st.integers(1, 5))
    if kind != "pipelined":
        return KINDS[kind](shapes, num_ranks)
    stages = trainers.stages_of(shapes, draw(st.integers(1, 3)))
    inner = draw(st.sampled_from(list(KINDS.values())))
    return trainers.pipelined([inner(stage, num_ranks) for stage in stages])
