"""R11 at the sampler's level: the same prompts in the same order, wherever a run was stopped."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.sampler import Sampler


def make(num_rows: int = 8, batch_size: int = 4, shuffle: bool = True, seed: int = 0) -> Sampler:
    return Sampler(num_rows=num_rows, batch_size=batch_size, shuffle=shuffle, seed=seed)


def test_r11_steps_do_not_depend_on_those_before() -> None:
    """8 prompts, batch 4, 2 epochs, stopped after step 2: an epoch's end."""
    straight = [make().rows(step) for step in (1, 2, 3, 4)]
    resumed = make()
    assert [resumed.rows(step) for step in (3, 4)] == straight[2:]
    assert [make().rows(step) for step in (4, 3, 2, 1)] == straight[::-1]


def test_order_is_the_same_everywhere() -> None:
    """A change here would break the resume of runs that exist."""
    assert [make(seed=7).rows(step) for step in (1, 2, 3)] == [[6, 3, 2, 1], [7, 0, 4, 5], [7, 3, 6, 2]]


@given(
    num_rows=st.integers(1, 30), batch_size=st.integers(1, 40), seed=st.integers(0, 2**31 - 1), shuffle=st.booleans()
)
def test_every_row_comes_once_per_epoch(num_rows: int, batch_size: int, seed: int, shuffle: bool) -> None:
    sampler = make(num_rows, batch_size, shuffle, seed)
    num_steps = -(-3 * num_rows // batch_size)
    taken = [row for step in range(1, num_steps + 1) for row in sampler.rows(step)]
    for epoch in range(len(taken) // num_rows):
        part = taken[epoch * num_rows : (epoch + 1) * num_rows]
        assert Counter(part) == Counter(range(num_rows))
        assert shuffle or part == list(range(num_rows))


def test_epochs_and_seeds_differ() -> None:
    first = make(100, 100, seed=1)
    assert first.rows(1) != first.rows(2)
    assert first.rows(1) != make(100, 100, seed=2).rows(1)


@pytest.mark.parametrize(("num_rows", "batch_size", "step"), [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_nonsense_is_refused(num_rows: int, batch_size: int, step: int) -> None:
    with pytest.raises(ValueError):
        make(num_rows, batch_size).rows(step)
