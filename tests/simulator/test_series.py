"""The numbers behind the plots."""

import numpy as np
import pytest

from pipeline.core.events import Role
from pipeline.core.modes import ModeName
from pipeline.simulator.cluster import LOST, SHIFT, Block, LostNode, Stay, Usage, Work
from pipeline.simulator.modes import Schedule
from pipeline.simulator.result import Result, simulate, window
from pipeline.simulator.series import ROLES, Timeline, share_of_time, stretches, timeline, utilisation, worked
from pipeline.simulator.setup import Setup, paper_setup

STEPS = 8


@pytest.fixture(scope="module")
def setup() -> Setup:
    return paper_setup(2, "h800", num_gpus=16, num_sequences=64)


@pytest.fixture(scope="module")
def pool(setup: Setup) -> Result:
    """GPUs change hands twice a step."""
    schedule = Schedule(mode=ModeName.TRAINER_POOL, rollout=4, reward=4, train=8)
    return simulate(setup, schedule, num_steps=STEPS, is_traced=True)


@pytest.fixture(scope="module")
def shown(setup: Setup, pool: Result) -> Timeline:
    return timeline(setup, pool)


def test_work_is_spread_over_the_bins_it_falls_in() -> None:
    def work(start: float, end: float, amount: float, role: Role = Role.ROLLOUT) -> Work:
        return Work(start_s=start, end_s=end, role=role, num_gpus=1, amount=amount)

    trace = [work(0, 4, 8), work(1, 2, 3), work(3.5, 4.5, 1), work(0, 4, 100, Role.REWARD)]
    edges = np.array([0.0, 1.0, 2.0, 4.0])
    assert worked(trace, Role.ROLLOUT, edges).tolist() == pytest.approx([2, 2 + 3, 4 + 0.5])
    assert worked(trace, Role.TRAIN, edges).tolist() == [0, 0, 0]


def test_rates_add_up_to_the_sequences_of_the_run(setup: Setup, pool: Result) -> None:
    """Each sequence is rolled out, judged and trained once, whatever the bins."""
    end = pool.steps[-1].trained_s
    assert end is not None
    edges = np.linspace(0, end, 77)
    trained = worked(pool.usage.trace, Role.TRAIN, edges).sum()
    assert trained == pytest.approx(STEPS * 64)
    for role in (Role.ROLLOUT, Role.REWARD):
        assert worked(pool.usage.trace, role, edges).sum() == pytest.approx(pool.usage.num_tokens[role])


def test_a_timeline_shows_whole_steps_and_all_their_shifts(setup: Setup, pool: Result, shown: Timeline) -> None:
    ends = [step.trained_s or 0.0 for step in pool.steps]
    first, last = window(STEPS, 3)
    assert last - first == 4 and shown.edges_s[0] == 0
    assert shown.published_s == pytest.approx([at - ends[first] for at in ends[first : last + 1]])
    assert shown.edges_s[-1] == pytest.approx(shown.published_s[-1])
    times = {shift.at_s - ends[first] for shift in pool.usage.shifts if ends[first] <= shift.at_s < ends[last]}
    assert shown.shifts_s == pytest.approx(sorted(times)) and len(times) >= 4
    trained = shown.rates[Role.TRAIN].sum() * (shown.edges_s[1] - shown.edges_s[0])
    assert trained == pytest.approx(4 * 64)


def test_each_gpu_is_in_one_state_at_any_time(shown: Timeline) -> None:
    assert shown.stretches[0].start_s == 0 and shown.stretches[-1].end_s == pytest.approx(shown.edges_s[-1])
    for one, other in zip(shown.stretches, shown.stretches[1:], strict=False):
        assert one.end_s == pytest.approx(other.start_s) and one.gpus != other.gpus
    assert {sum(stretch.gpus.values()) for stretch in shown.stretches} == {16}
    split = [stretch.gpus for stretch in shown.stretches]
    assert {"rollout": 4, "reward": 4, "train": 8} in split and {"rollout": 12, "reward": 4} in split
    assert {"rollout": 4, "reward": 4, SHIFT: 8} in split


def test_stretches_join_blocks_that_change_at_different_times() -> None:
    def stay(block: int, state: str, start: float, end: float) -> Stay:
        return Stay(block=block, state=state, start_s=start, end_s=end)

    stays = [stay(0, "rollout", 0, 5), stay(0, SHIFT, 5, 6), stay(0, "train", 6, 9), stay(1, "rollout", 0, 9)]
    found = [(s.start_s, s.end_s, s.gpus) for s in stretches(stays, 4, 2, 8)]
    assert found == [
        (0, 3, {"rollout": 8}),
        (3, 4, {SHIFT: 4, "rollout": 4}),
        (4, 6, {"train": 4, "rollout": 4}),
    ]


def test_a_block_that_is_bound_again_on_its_way_never_arrives() -> None:
    usage, block = Usage(), Block(index=3, node=0)
    usage.note_binding(0, block, Role.ROLLOUT, 0)
    usage.note_binding(10, block, Role.TRAIN, 15)
    usage.note_binding(12, block, Role.REWARD, 16)
    usage.note_binding(20, block, None, 20)
    assert [(stay.state, stay.start_s, stay.end_s) for stay in usage.stays(30)] == [
        ("rollout", 0, 10),
        (SHIFT, 10, 12),
        (SHIFT, 12, 16),
        ("reward", 16, 20),
        (LOST, 20, 30),
    ]


def test_idle_and_busy_are_all_of_the_time(setup: Setup, pool: Result) -> None:
    assert sum(pool.idle.values()) + sum(pool.busy.values()) == pytest.approx(1)
    end = pool.steps[-1].trained_s or 0.0
    moved = sum(min(shift.seconds, end - shift.at_s) for shift in pool.usage.shifts)
    assert pool.idle["shift"] == pytest.approx(moved * setup.block / (end * 16))
    assert pool.idle["train"] == pytest.approx(0, abs=1e-6), "it trains whenever it has the GPUs"
    assert min(pool.idle.values()) > -1e-6 and LOST not in pool.idle


def test_a_training_that_goes_on_after_the_end_counts_up_to_it() -> None:
    """Where training is the bottleneck, the next one begins as the last counted one ends."""
    setup = paper_setup(3, "h20", num_sequences=128)
    schedule = Schedule(mode=ModeName.DISAGGREGATED, rollout=16, reward=8, train=8)
    result = simulate(setup, schedule, num_steps=STEPS, is_traced=True)
    end = result.steps[-1].trained_s or 0.0
    assert max(w.end_s for w in result.usage.trace) > end
    within = sum((min(w.end_s, end) - w.start_s) * 8 for w in result.usage.trace if w.role is Role.TRAIN)
    assert result.busy["train"] == pytest.approx(within / (end * 32))


def test_a_lost_node_is_idle_by_itself(setup: Setup) -> None:
    schedule = Schedule(mode=ModeName.DISAGGREGATED, rollout=4, reward=4, train=8)
    lost = LostNode(node=0, at_s=50, back_after_s=100)
    result = simulate(setup, schedule, num_steps=STEPS, scenarios=[lost])
    end = result.steps[-1].trained_s or 0.0
    assert result.idle[LOST] == pytest.approx(100 * 8 / (end * 16))
    assert result.idle["shift"] == pytest.approx(setup.node_start_s * 8 / (end * 16))
    assert sum(result.idle.values()) + sum(result.busy.values()) == pytest.approx(1)


def test_utilisation_is_on_average_what_the_bound_says(setup: Setup) -> None:
    """At staleness 0 each measured step is rolled out, judged and trained within the window."""
    schedule = Schedule(mode=ModeName.COLOCATED, rollout=16, train=16, staleness=0)
    result = simulate(setup, schedule, num_steps=STEPS, is_traced=True)
    used = utilisation(setup, result)
    assert used.min() >= 0 and len(used) == 400
    ends = [step.trained_s or 0.0 for step in result.steps]
    mean = {role: setup.workload.lengths(role).mean if role is not Role.TRAIN else 1.0 for role in ROLES}
    counted = sum(
        w.amount / mean[w.role] * result.least_gpu_s[w.role]
        for w in result.usage.trace
        if w.start_s >= ends[3] and w.end_s <= ends[7]
    )
    assert used.mean() == pytest.approx(counted / ((ends[7] - ends[3]) * 16), rel=1e-6)
    assert used.mean() == pytest.approx(result.sequences_per_s / result.work_bound, rel=0.1)


def test_share_of_time_counts_what_is_at_or_below() -> None:
    values = np.array([0.0, 0.5, 0.5, 1.2])
    assert share_of_time(values, [0.0, 0.4, 0.5, 1.0, 2.0]).tolist() == [0.25, 0.25, 0.75, 0.75, 1.0]
