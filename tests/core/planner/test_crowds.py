"""Sequences that age together, against sequences that age one by one."""

import numpy as np
import pytest

from pipeline.core.planner.crowds import Crowds
from pipeline.core.planner.preprocess import Array, RoleData, preprocess
from tests.core.planner.cases import ROLLOUT, snapshot, survival

BINS, TOKENS = (20, 9), (100, 37)
RNG = np.random.default_rng(3)


def roles(rollout: object = ((0, ()),), reward: object = ((0, ()),)) -> tuple[RoleData, RoleData]:
    made = snapshot([ROLLOUT] * 4, rollout=rollout, reward=reward, num_bins=BINS, bin_tokens=TOKENS)  # type: ignore[arg-type]
    picture = preprocess(made)
    return picture.rollout, picture.reward


def alive(role: int, age: Array) -> Array:
    """The share that becomes this old, in bins: between the edges a line."""
    return np.interp(age, np.arange(BINS[role] + 1), survival(BINS[role]), right=0.0)


def grow(crowds: Crowds, bins: tuple[float, float]) -> Array:
    tokens = np.asarray(bins)[:, None, None] * np.asarray(TOKENS)[:, None, None]
    return crowds.grow(np.broadcast_to(tokens, crowds.running_rck.shape))


def test_ages_of_a_snapshot_against_each_cohort_by_itself() -> None:
    ages = [RNG.uniform(0, 50, num).tolist() for num in BINS]
    crowds = Crowds(roles(((0, ages[0]),), ((0, ages[1]),)), 3)
    assert crowds.running_rck[:, 1, 0] == pytest.approx([sum(ages[0]), sum(ages[1])])
    old = np.zeros(2)
    for step in ((0.3, 0.0), (0.9, 0.4), (2.35, 1.7), (0.0, 0.1), (6.5, 3.0)):
        old += step
        before = crowds.running_rck
        ended = grow(crowds, step)
        for r in (0, 1):
            start = np.arange(BINS[r], dtype=float)
            left = np.asarray(ages[r]) * alive(r, start + old[r]) / alive(r, start)
            assert crowds.running_rck[r, :, 0] == pytest.approx(left.sum())
            tokens = TOKENS[r] * (left * (start + old[r])).sum()
            assert crowds.tokens_rck[r, 2, 0] == pytest.approx(tokens)
        assert ended == pytest.approx(before - crowds.running_rck)
        assert (ended >= -1e-9).all()


def test_they_come_at_any_time_and_end_as_single_ones_do() -> None:
    """20,000 sequences a role, with lengths drawn one by one. They start when the others are between two bins."""
    crowds = Crowds(roles(), 2)
    starts: list[list[tuple[float, int]]] = [[], []]
    old, ended, num_each = np.zeros(2), np.zeros(2), 1000
    for turn in range(40):
        if turn < 20:
            crowds.start(np.full((2, 2, 3), [[[num_each, 0, 0]]], dtype=float))
            for r in (0, 1):
                starts[r].append((old[r], num_each))
        step = (0.37, 0.83)
        ended += grow(crowds, step)[:, 0, 0]
        old += step
        assert ended + crowds.running_rck[:, 0, 0] == pytest.approx(num_each * min(turn + 1, 20))
    for r in (0, 1):
        edges = np.asarray(survival(BINS[r]))
        lengths = np.interp(RNG.uniform(0, 1, (20, num_each)), edges[::-1], np.arange(BINS[r], -1, -1))
        begun = np.asarray([at for at, _ in starts[r]])[:, None]
        running = (lengths > old[r] - begun).sum()
        exact = sum(num * alive(r, np.asarray(old[r] - at)) for at, num in starts[r])
        assert running == pytest.approx(exact, rel=0.05)
        assert crowds.running_rck[r, 0, 0] == pytest.approx(exact, rel=0.04)  # each stands in the two nearest bins
    assert not crowds.running_rck[:, :, 1:].any()


@pytest.mark.parametrize("bins", [(25.0, 1.0), (1e4, 1e12), (np.inf, 0.0)])
def test_a_step_longer_than_all_lengths_ends_them_all(bins: tuple[float, float]) -> None:
    crowds = Crowds(roles(((0, [5.0] * 20),), ((0, [7.0] * 9),)), 1)
    ended = grow(crowds, bins)
    assert ended[0].sum() == pytest.approx(100) and crowds.running_rck[0].sum() == 0
    crowds.start(np.full((2, 1, 3), 2.0))  # the ring is in order: who comes next starts at 0
    assert crowds.tokens_rck[0, 0].sum() == pytest.approx(0, abs=1e-6)
    assert grow(crowds, (1.0, 1.0))[0, 0, 1] == pytest.approx(2 * (1 - survival(20)[1]), rel=1e-3)


def test_what_they_have_before_them() -> None:
    """A whole one at the start, and what the survival curve leaves later."""
    crowds = Crowds(roles(((0, [10.0]),), ((0, [0.0] * 6 + [10.0]),)), 1)
    edges = np.asarray(survival(BINS[1]))
    mean = (edges.sum() - 0.5) * TOKENS[1]
    rest = (edges[6:].sum() / edges[6] - 0.5) * TOKENS[1]
    assert crowds.work_rck[:, 0, 0] == pytest.approx([10.0, 10 * rest / mean])
