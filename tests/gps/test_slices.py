import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.layout import Box, whole
from pipeline.gps.slices import Slice, coalesce, refine
from tests.gps.arrays import any_layout, any_shapes, cell


def test_slices_are_cut_at_all_edges() -> None:
    have = ((0, Box((0,), (5,))), (1, Box((5,), (9,))))
    want = ((0, Box((0,), (3,))), (1, Box((3,), (6,))))
    assert refine("a", have, want) == [
        Slice(Box((0,), (3,)), (0,), (0,)),
        Slice(Box((3,), (5,)), (0,), (1,)),
        Slice(Box((5,), (6,)), (1,), (1,)),
    ]


def test_what_nobody_holds_is_named() -> None:
    with pytest.raises(WeightsUnavailable, match=r"nobody holds a\[5:6, 0:2\], which rank 1 wants"):
        refine("a", ((0, Box((0, 0), (5, 2))),), ((0, Box((0, 0), (2, 2))), (1, Box((2, 0), (6, 2)))))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_slices_are_all_that_is_wanted_once_and_held_by_those_they_name(data: st.DataObject) -> None:
    shapes = data.draw(any_shapes())
    have, want = data.draw(any_layout(shapes)), data.draw(any_layout(shapes))
    for name, pattern in want.patterns.items():
        seen = {rank: np.zeros(shapes[name], int) for rank, _ in pattern}
        for box, holders, receivers in refine(name, have.patterns[name], pattern):
            for receiver in receivers:
                cell(seen[receiver], box)[...] += 1
            assert set(holders) == {r for r, outer in have.patterns[name] if outer.contains(box)}
        wanted = {rank: np.zeros(shapes[name], int) for rank, _ in pattern}
        for rank, box in pattern:
            cell(wanted[rank], box)[...] = 1
        assert all(np.array_equal(seen[rank], wanted[rank]) for rank in seen)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
def test_coalesced_boxes_are_the_same_elements_in_fewer_boxes(shape: list[int], data: st.DataObject) -> None:
    """A grid of boxes, some left out; with none left out it is one box again."""
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n)))}) for n in shape]
    grid = [whole(())]
    for edges in cuts:
        grid = [Box((*b.start, low), (*b.stop, high)) for b in grid for low, high in itertools.pairwise(edges)]
    kept = data.draw(st.lists(st.sampled_from(grid), unique=True)) if data.draw(st.booleans()) else grid
    merged = coalesce(data.draw(st.permutations(kept)))
    before, after = np.zeros(shape, int), np.zeros(shape, int)
    for boxes, seen in ((kept, before), (merged, after)):
        for box in boxes:
            cell(seen, box)[...] += 1
    assert np.array_equal(before, after) and len(merged) <= len(kept)
    assert len(kept) < len(grid) or merged == [whole(tuple(shape))]
