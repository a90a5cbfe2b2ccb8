"""Costs and rates learned from what was measured."""

import math

import numpy as np
import pytest

from pipeline.core.iteration import IterationCost
from pipeline.core.recent import Rate, RecentMean
from pipeline.core.throughput import Throughput

COST = IterationCost(weights_s=4e-3, kv_s=2e-9, compute_s=1e-5, prefill_s=1e-5, overhead_s=2e-3, per_sequence_s=1e-5)


def decode(times: Throughput, truth: IterationCost, seconds: int, start_s: int, rng: np.random.Generator) -> None:
    """One replica's reports of a second each, batch and context changing."""
    for at_s in range(start_s + 1, start_s + seconds + 1):
        batch = float(rng.integers(1, 200))
        context = batch * float(rng.uniform(300, 9000))
        times.add_decode(at_s, 1.0 / truth.iteration_s(batch, context), 1.0, batch, context)


@pytest.mark.parametrize("factor", [0.6, 0.85, 1.0, 1.25, 1.6])
def test_a_wrong_cost_is_right_within_3_percent_after_a_minute_of_one_replica(factor: float) -> None:
    times = Throughput(COST.slower(factor), 0.0)
    decode(times, COST, 60, 0, np.random.default_rng(1))
    assert times.cost.iteration_s(64, 64 * 3000) == pytest.approx(COST.iteration_s(64, 64 * 3000), rel=0.03)
    assert times.cost.prefill_s == COST.slower(factor).prefill_s, "prefill is another factor"


def test_the_cost_follows_a_drift_within_3_percent() -> None:
    times, rng = Throughput(COST, 0.0), np.random.default_rng(2)
    decode(times, COST, 300, 0, rng)
    decode(times, COST.slower(1.5), 240, 300, rng)
    assert times.slowness == pytest.approx(1.5, rel=0.03)
    drifting = COST
    for minute in range(9, 20):
        drifting = drifting.slower(1.01)
        decode(times, drifting, 60, 60 * minute, rng)
    assert times.slowness == pytest.approx(1.01**11, rel=0.03)


def test_a_pause_forgets_nothing_before_there_is_something_new() -> None:
    times = Throughput(COST.slower(1.5), 0.0)
    decode(times, COST, 60, 0, np.random.default_rng(3))
    before = times.slowness
    decode(times, COST, 1, 100_000, np.random.default_rng(4))
    assert times.slowness == pytest.approx(before, rel=0.03)


def test_the_table_holds_measured_iterations_by_powers_of_two() -> None:
    times = Throughput(COST, 0.0)
    times.add_decode(1.0, 100, 2.0, 5.0, 5000.0)
    times.add_decode(1.0, 300, 2.0, 7.9, 8191.0)
    times.add_decode(1.0, 10, 1.0, 8.0, 8192.0)
    assert times.table() == {(4, 4096): 0.01, (8, 8192): 0.1}


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_what_cannot_be_is_not_counted(wrong: float) -> None:
    times = Throughput(COST, 0.0)
    times.add_decode(1.0, wrong, 1.0, 2.0, 100.0)
    times.add_decode(1.0, 10, wrong, 2.0, 100.0)
    times.add_decode(1.0, 10, 1.0, wrong, 100.0)
    times.add_decode(1.0, 10, 1.0, 2.0, wrong)
    times.add_prefill(wrong, 1.0)
    assert times.cost == COST


def test_a_recent_mean_forgets_and_a_rate_needs_no_warm_up() -> None:
    mean = RecentMean(10.0, weight=1.0, memory=5.0)
    for _ in range(40):
        mean.add(2.0)
    assert mean.value == pytest.approx(2.0, abs=0.01)
    rate = Rate(0.0)
    rate.add(1.0, 10)
    assert rate.per_s(0.0) == 0.0 and rate.per_s(2.0) == pytest.approx(5.0, rel=0.05)
