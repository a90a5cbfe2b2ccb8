from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.gps.layout import Box
from pipeline.gps.ranges import byte_ranges, merged, read_share, write_share
from pipeline.gps.segment import Entry
from tests.gps.arrays import cell


@given(st.lists(st.integers(1, 4), max_size=3), st.data())
def test_ranges_are_the_bytes_of_the_box_in_as_few_runs(shape: list[int], data: st.DataObject) -> None:
    starts = [data.draw(st.integers(0, n - 1)) for n in shape]
    stops = [data.draw(st.integers(a + 1, n)) for a, n in zip(starts, shape, strict=True)]
    box = Box(tuple(starts), tuple(stops))
    size = int(np.prod(shape, dtype=int))
    entry = Entry("BF16", tuple(shape), 100, 2 * size)
    ranges = list(byte_ranges(entry, box))
    numbers = np.arange(size).reshape(shape)
    expected = [100 + 2 * int(n) + byte for n in cell(numbers, box).ravel() for byte in (0, 1)]
    assert [byte for offset, length in ranges for byte in range(offset, offset + length)] == expected
    assert merged(ranges) == ranges


def test_ranges_that_touch_become_one() -> None:
    assert merged([(8, 4), (0, 4), (4, 4), (20, 1)]) == [(0, 12), (20, 1)]


def test_a_share_is_what_all_ranks_of_a_node_write(tmp_path: Path) -> None:
    prefix = tmp_path / "share-2"
    write_share(prefix, 0, 0, [(0, 10)])
    write_share(prefix, 1, 1, [(10, 10)])
    write_share(prefix, 2, 1, [(30, 10), (20, 10)])
    write_share(tmp_path / "share-1", 0, 1, [(90, 10)])  # another attempt's
    assert (read_share(prefix, 0), read_share(prefix, 1)) == ([(0, 10)], [(10, 30)])
    write_share(prefix, 2, 0, [(20, 20)])  # the rank has moved to another node
    assert (read_share(prefix, 0), read_share(prefix, 1)) == ([(0, 10), (20, 20)], [(10, 10)])
    with pytest.raises(LookupError, match="no rank of node 2 has said"):
        read_share(prefix, 2)
