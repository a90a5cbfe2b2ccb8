"""Survival by age, from those that ended and those that run."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.length_model import LengthModel, bins_of, count_ages

WIDTH, LONGEST, NUM_BINS = 100, 3200, 32
EDGES = np.arange(NUM_BINS + 1) * WIDTH


def long_tailed(rng: np.random.Generator, num: int) -> np.ndarray:
    return np.clip(np.rint(rng.lognormal(math.log(900), 0.7, num)), 1, LONGEST)


def share_longer(lengths: np.ndarray) -> np.ndarray:
    """The last is 0: nothing is longer than the limit."""
    return np.array([(lengths > edge).mean() for edge in EDGES])


def model(belief: np.ndarray) -> LengthModel:
    return LengthModel(WIDTH, belief.tolist())


def test_complete_steps_give_the_shares_that_were_seen() -> None:
    """Beside the belief, which counts as 64 sequences."""
    rng = np.random.default_rng(5)
    belief, seen = share_longer(long_tailed(rng, 5000) * 0.5), long_tailed(rng, 1000)
    lengths = model(belief)
    lengths.end(0, seen.tolist())
    assert lengths.survival([]) == pytest.approx((64 * belief + 1000 * share_longer(seen)) / 1064)


@pytest.mark.parametrize("share_of_belief", [0.5, 1.0, 1.5])
def test_those_that_run_do_not_make_all_look_short(share_of_belief: float) -> None:
    """All of a step have reached 800 tokens at most; more than half are longer."""
    rng = np.random.default_rng(6)
    truth = share_longer(long_tailed(rng, 200_000))
    belief = share_longer(np.clip(np.rint(long_tailed(rng, 20_000) * share_of_belief), 1, LONGEST))
    drawn = long_tailed(rng, 2048)
    reached = rng.uniform(400, 800, len(drawn))  # not all began together
    lengths = model(belief)
    lengths.end(0, drawn[drawn <= reached].tolist())
    in_flight = count_ages(reached[drawn > reached].tolist(), WIDTH, NUM_BINS)
    found = np.array(lengths.survival([in_flight]))
    ended_only = share_longer(drawn[drawn <= reached])
    assert np.abs(found - truth)[:9].max() < 0.04
    assert np.abs(ended_only - truth)[:9].max() > 0.4, "what the test is about"


def test_a_wrong_belief_fades_and_so_do_old_steps() -> None:
    rng = np.random.default_rng(7)
    truth = share_longer(long_tailed(rng, 200_000))
    lengths = model(share_longer(np.clip(long_tailed(rng, 20_000) * 2.0, 1, LONGEST)))
    for step in range(3):
        lengths.end(step, long_tailed(rng, 512).tolist())
        lengths.close(step + 1)
    assert np.abs(np.array(lengths.survival([])) - truth).max() < 0.05
    for step in range(3, 15):
        lengths.end(step, [3150.0] * 512)
        lengths.close(step + 1)
    assert lengths.survival([])[-2] > 0.97


def test_a_sequence_at_an_edge_is_not_longer_than_it() -> None:
    lengths = LengthModel(10, [1.0, 0.0, 0.0, 0.0])
    lengths.end(0, [20.0] * 64)
    assert lengths.survival([]) == (1.0, 0.5, 0.0, 0.0)


@settings(max_examples=200, deadline=None)
@given(
    belief=st.lists(st.floats(0, 1), min_size=1, max_size=8),
    ended=st.lists(st.floats(0, 1000), max_size=20),
    running=st.lists(st.floats(0, 1000), max_size=20),
)
def test_survival_falls_from_1_to_0_whatever_was_seen(
    belief: list[float], ended: list[float], running: list[float]
) -> None:
    num_bins = len(belief)
    lengths = LengthModel(10, [1.0, *sorted(belief, reverse=True)[1:], 0.0])
    lengths.end(3, ended)
    found = lengths.survival([count_ages(running, 10, num_bins)])
    assert found[0] == 1 and found[-1] == 0 and len(found) == num_bins + 1
    assert all(0 <= later <= earlier for earlier, later in itertools.pairwise(found))


def test_ages_keep_their_sum_and_their_mean() -> None:
    counts = count_ages([0.0, 5.0, 10.0, 27.5], 10, 4)
    assert counts == (1.5, 1.5, 0.25, 0.75)
    assert count_ages([40.0, 99.0], 10, 4) == (0.0, 0.0, 0.0, 2.0)
    assert count_ages([3.0], 10, 1) == (1.0,)


@pytest.mark.parametrize(
    ("longest", "most", "bins"), [(16_384, 32, (512, 32)), (4096, 16, (256, 16)), (20, 32, (1, 20))]
)
def test_bins_cover_the_limit(longest: int, most: int, bins: tuple[int, int]) -> None:
    assert bins_of(longest, most) == bins
    assert bins[0] * (bins[1] - 1) < longest <= bins[0] * bins[1]
