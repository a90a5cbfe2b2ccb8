"""Boxes become pieces that are small enough, in order, with each element once."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.layout import Box
from pipeline.gps.segment import Entry
from pipeline.gps.wants import Want, cut_up, read_wants, write_wants

MOST = 4096
SHAPES = {"a": (40, 33), "b": (3, 500, 4), "c": (5000,), "d": (), "e": (2, 3000)}


def entries() -> dict[str, Entry]:
    found, at = {}, 64
    for name, shape in SHAPES.items():
        nbytes = 2 * math.prod(shape)
        found[name] = Entry("BF16", shape, at, nbytes)
        at += nbytes
    return found


@st.composite
def wants(draw: st.DrawFn) -> Want:
    name = draw(st.sampled_from(sorted(SHAPES)))
    ranges = [sorted(draw(st.sets(st.integers(0, length), min_size=2, max_size=2))) for length in SHAPES[name]]
    return Want(name, Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges)))


@settings(deadline=None)
@given(st.lists(wants(), min_size=1, max_size=8))
def test_each_element_travels_once_in_pieces_that_are_small_enough(given_wants: list[Want]) -> None:
    table = entries()
    image = np.arange(64 + sum(entry.nbytes for entry in table.values()), dtype=np.int64)  # each byte is its place
    numbers, seen = [], [np.zeros(SHAPES[want.name], int) for want in given_wants]
    for piece in cut_up(given_wants, table, MOST):
        assert 0 < piece.nbytes <= MOST
        for number, (name, box), offset, nbytes in piece.boxes:
            assert nbytes == 2 * box.size and offset % 2 == 0 and offset + nbytes <= piece.nbytes
            own = given_wants[number]
            assert own.name == name and own.box.contains(box)
            numbers.append(number)
            where = tuple(map(slice, box.start, box.stop))
            seen[number][where] += 1
            if piece.at >= 0:  # its bytes lie in one run
                of_tensor = image[table[name].offset :][: table[name].nbytes].reshape(*SHAPES[name], 2)
                assert np.array_equal(of_tensor[where].ravel(), image[piece.at :][: piece.nbytes])
    assert numbers == sorted(numbers), "in the order of the wants"
    for want, counts in zip(given_wants, seen, strict=True):
        assert counts.sum() == want.box.size and counts[tuple(map(slice, want.box.start, want.box.stop))].min() == 1


@settings(deadline=None)
@given(st.lists(wants(), min_size=1, max_size=8))
def test_the_last_part_of_a_want_is_the_one_that_ends_where_it_ends(given_wants: list[Want]) -> None:
    parts: dict[int, list[Box]] = {}
    for piece in cut_up(given_wants, entries(), MOST):
        for packed in piece.boxes:
            parts.setdefault(packed.number, []).append(packed.want.box)
    for number, boxes in parts.items():
        assert [box.stop == given_wants[number].box.stop for box in boxes] == [False] * (len(boxes) - 1) + [True]


def test_what_is_written_down_is_read_and_has_one_name(tmp_path: Path) -> None:
    some = [Want("a", Box((0, 1), (2, 3))), Want("d", Box((), ()))]
    path = write_wants(tmp_path, some, 77)
    assert path == write_wants(tmp_path, some, 77) != write_wants(tmp_path, some, 78)
    assert read_wants(path) == (some, 77)
    path.write_text("no")
    with pytest.raises(WeightsUnavailable, match=str(path)):
        read_wants(path)
