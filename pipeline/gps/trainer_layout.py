"""How training ranks hold a model: whole, cut by tensors, as flat shards, by layers.

Each function gives the layout of `num_ranks` ranks for canonical `shapes`. What a rank has nothing of is not there.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence

from pipeline.gps.layout import Box, Layout, Part, Place, Shape, Shapes, alone, cut, row_major, stored, whole

FLAT = "flat"
"""The one tensor of a rank with flat shards."""

_COLUMNS = re.compile(r"(.*\.)?((q|k|v|gate|up)_proj\.(weight|bias)|(embed_tokens|lm_head)\.weight)")
_ROWS = re.compile(r".*\.(o|down)_proj\.weight")
_FUSED_EXPERTS = re.compile(r"(?P<prefix>.*\.experts)\.(?P<kind>gate_up|down)_proj")
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def ddp(shapes: Shapes, num_ranks: int) -> Layout:
    """Every rank holds everything."""
    return stored(shapes, [list(shapes)] * num_ranks)


def fsdp2(shapes: Shapes, num_ranks: int) -> Layout:
    """torch `fully_shard`: each tensor by its rows, as `torch.chunk` cuts; the last ranks have fewer, or none."""
    return _sharded(shapes, num_ranks, dict.fromkeys(shapes, 0))


def tensor_parallel(shapes: Shapes, num_ranks: int) -> Layout:
    """Rows of what makes activations wider and of both embeddings, columns of what makes them narrow again; the rest
    is on every rank. Cut as `torch.chunk` cuts, heads or not."""
    axes = {}
    for name in shapes:
        if _COLUMNS.fullmatch(name):
            axes[name] = 0
        elif _ROWS.fullmatch(name):
            axes[name] = 1
    return _sharded(shapes, num_ranks, axes)


def flat_shards(shapes: Shapes, num_ranks: int) -> Layout:
    """ZeRO and FSDP1: all tensors one after the other, and each rank has an equal range of that (padded at the end)."""
    total = sum(math.prod(shape) for shape in shapes.values())
    length = -(-total // num_ranks)
    ranks: list[list[Part]] = [[] for _ in range(num_ranks)]
    at = 0
    for name, shape in shapes.items():
        end, strides = at + math.prod(shape), row_major(shape)
        for rank in range(at // length if length else 0, num_ranks):
            low, high = max(at, rank * length), min(end, (rank + 1) * length)
            if low >= high:
                break
            for box in flat_boxes(shape, low - at, high - at):
                first = at + sum(i * s for i, s in zip(box.start, strides, strict=True))
                ranks[rank].append(Part(name, box, Place(FLAT, first - rank * length, strides)))
        at = end
    return Layout(tuple(map(tuple, ranks)), ({FLAT: length},) * num_ranks)


def pipelined(stages: Sequence[Layout]) -> Layout:
    """The ranks of all stages, one stage after the other; each stage has its own layers."""
    return Layout(tuple(r for s in stages for r in s.ranks), tuple(p for s in stages for p in s.padded))


def stages_of(shapes: Shapes, num_stages: int) -> list[dict[str, Shape]]:
    """Layers cut as `torch.chunk` cuts; what comes before them is in the first stage, what comes after in the last."""
    layers = {name: int(found[1]) for name in shapes if (found := _LAYER.search(name))}
    length = -(-(max(layers.values(), default=-1) + 1) // num_stages)
    stages: list[dict[str, Shape]] = [{} for _ in range(num_stages)]
    for name, shape in shapes.items():
        if name in layers:
            stages[layers[name] // length][name] = shape
        else:
            stages[0 if "embed" in name else -1][name] = shape
    return stages


def unfused(layout: Layout, shapes: Shapes) -> Layout:
    """Under canonical names, where a trainer has the experts of a layer in one tensor: gate_up_proj [experts,
    2 * inner, hidden] and down_proj [experts, hidden, inner]. `shapes`: of the tensors as the trainer has them."""
    ranks = ((q for part in parts for q in _unfused(part, shapes[part.name])) for parts in layout.ranks)
    return Layout(tuple(map(tuple, ranks)), layout.padded)


def _unfused(part: Part, shape: Shape) -> Iterator[Part]:
    fused = _FUSED_EXPERTS.fullmatch(part.name)
    if fused is None:
        yield part
        return
    _, box, place = part
    inner = shape[1] // 2 if fused["kind"] == "gate_up" else shape[1]
    kinds = ("gate", "up") if fused["kind"] == "gate_up" else ("down",)
    for expert in range(box.start[0], box.stop[0]):
        for number, kind in enumerate(kinds):
            first, last = (min(max(row - number * inner, 0), inner) for row in (box.start[1], box.stop[1]))
            if first < last:
                ahead = (expert - box.start[0], first + number * inner - box.start[1])
                offset = place.offset + sum(n * stride for n, stride in zip(ahead, place.strides, strict=False))
                own = Box((first, box.start[2]), (last, box.stop[2]))
                yield Part(
                    f"{fused['prefix']}.{expert}.{kind}_proj.weight",
                    own,
                    place._replace(offset=offset, strides=place.strides[1:]),
                )


def flat_boxes(shape: Shape, low: int, high: int) -> Iterator[Box]:
    """The elements `low` up to `high` of a contiguous tensor, as few boxes: of a matrix at most three."""
    if low >= high:
        return
    if len(shape) < 2:
        yield Box((low,), (high,)) if shape else Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = -(-low // row), high // row
    if first > last:  # inside of one row
        yield from _in_row(shape, last, low - last * row, high - last * row)
        return
    yield from _in_row(shape, first - 1, low - (first - 1) * row, row if low < first * row else 0)
    if first < last:
        yield cut(shape, 0, first, last)
    yield from _in_row(shape, last, 0, high - last * row)


def _in_row(shape: Shape, row: int, low: int, high: int) -> Iterator[Box]:
    for box in flat_boxes(shape[1:], low, high):
        yield Box((row, *box.start), (row + 1, *box.stop))


def _sharded(shapes: Shapes, num_ranks: int, axes: Mapping[str, int]) -> Layout:
    """Each tensor along its axis, as `torch.chunk` cuts; what has no axis, or no dimension, is on every rank."""
    ranks: list[list[Part]] = [[] for _ in range(num_ranks)]
    for name, shape in shapes.items():
        axis = axes.get(name)
        if 0 in shape:
            continue
        if axis is None or not shape:
            for parts in ranks:
                parts.append(alone(name, whole(shape)))
            continue
        length = -(-shape[axis] // num_ranks)
        for rank, parts in enumerate(ranks):
            start, stop = min(rank * length, shape[axis]), min((rank + 1) * length, shape[axis])
            if start < stop:
                parts.append(alone(name, cut(shape, axis, start, stop)))
    return Layout(tuple(map(tuple, ranks)), ({},) * num_ranks)
