"""What the guard chooses, what it may leave out, and the form in which a choice is kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.errors import ConfigError
from pipeline.core.events import Role
from pipeline.core.modes import ModeName
from pipeline.core.planner.settings import PlannerSettings
from pipeline.run_folder import RunFolder, read_json, write_json
from pipeline.simulator.admission import Admission
from pipeline.simulator.choice import Choice, choice_of
from pipeline.simulator.guard import MARGIN, ceiling, choose, scale_of
from pipeline.simulator.lengths import POLICY_16K, VERDICT_4K, lognormal_mixture
from pipeline.simulator.modes import Schedule, static_schedules, train_sizes
from pipeline.simulator.profiles import known_model
from pipeline.simulator.result import simulate
from pipeline.simulator.setup import Setup, paper_setup

COARSE = PlannerSettings(num_steps=16, tick_share=0.2)
"""So that a choice takes a second or two."""


def small(gpu: str = "h800", num_prompts: int = 4, group: int = 2) -> Setup:
    """16 GPUs, 32 short responses."""
    setup = paper_setup(group, gpu, num_gpus=16)
    work = replace(
        setup.workload,
        num_prompts=num_prompts,
        num_each=8,
        rollout=lognormal_mixture([(s, m / 8, d) for s, m, d in POLICY_16K], 2048),
        verdict=lognormal_mixture([(s, m / 8, d) for s, m, d in VERDICT_4K], 512),
    )
    return replace(setup, workload=work)


@pytest.fixture(scope="module")
def choice() -> Choice:
    return choose(small(), settings=COARSE)


def test_what_is_left_out_changes_no_choice(choice: Choice) -> None:
    quick, whole = choice, choose(small(), settings=COARSE, skips=False)
    assert quick.dropped and not whole.dropped and set(quick.predicted) <= set(whole.predicted)
    assert quick.schedule == whole.schedule and quick.gain == pytest.approx(whole.gain, rel=0.02)
    assert all(whole.predicted[s] == v for s, v in quick.predicted.items())
    assert {s.mode for s in whole.predicted} == set(ModeName)
    assert {s.mode for s in (*quick.predicted, *quick.dropped)} == set(ModeName)


def test_no_schedule_is_faster_than_its_ceiling() -> None:
    setup = small("h20", num_prompts=16)
    for schedule in static_schedules(setup):
        assert simulate(setup, schedule, seed=5).sequences_per_s < 1.03 * ceiling(setup, schedule), str(schedule)


def test_shiftable_is_chosen_only_where_it_is_predicted_to_win(choice: Choice) -> None:
    best = choice.best_static
    assert best is not None and choice.best_shiftable is not None
    wins = choice.predicted[choice.best_shiftable] > MARGIN * choice.predicted[best]
    assert choice.schedule == (choice.best_shiftable if wins else best)
    assert [s.mode for s in choice.runners_up].count(choice.schedule.mode) == 0
    assert list(choice.predicted.values()) == sorted(choice.predicted.values(), reverse=True)


def test_the_configurations_staleness_and_judging_hold_for_all(choice: Choice) -> None:
    bound = choose(small(), settings=COARSE, staleness=0, judging=Admission.BARRIER)
    assert {(s.staleness, s.judging) for s in (*bound.predicted, *bound.dropped)} == {(0, Admission.BARRIER)}
    free = [*choice.predicted, *choice.dropped]
    assert {s.staleness for s in free if s.mode is ModeName.COLOCATED} == {0}
    assert {s.staleness for s in free if s.mode is not ModeName.COLOCATED} == {1}


def test_training_sizes_that_memory_does_not_hold_are_no_candidates() -> None:
    large = replace(small("h200"), policy=known_model("qwen2.5-72b"), rollout_gpus=4)
    # 14 bytes x 72.7e9 parameters are 64 GB on each of 16 GPUs of 141, and 127 GB on each of 8.
    found = choose(large, settings=COARSE)
    assert {s.train for s in (*found.predicted, *found.dropped)} == {16}
    with pytest.raises(ConfigError, match=r"72\.7e9 parameters does not fit into 8 GPUs"):
        choose(replace(large, num_gpus=8))


def test_a_large_cluster_is_chosen_for_on_a_smaller_one() -> None:
    assert scale_of(paper_setup(2, "h800", num_gpus=32)) == 1
    large = replace(small(num_prompts=32), num_gpus=64)
    assert scale_of(large) == 2
    assert scale_of(replace(large, num_gpus=1024)) == 32
    assert scale_of(replace(large, workload=replace(large.workload, num_prompts=1))) == 1
    half = large.scaled_down(2)
    assert (half.num_gpus, half.workload.num_sequences * 2) == (32, large.workload.num_sequences)
    for size in train_sizes(half):
        assert half.train_s(size) == pytest.approx(large.train_s(2 * size), rel=1e-9)
        for old, new in ((Role.TRAIN, Role.ROLLOUT), (Role.ROLLOUT, Role.TRAIN)):
            assert half.shift_s(old, new, size) == pytest.approx(large.shift_s(old, new, 2 * size), rel=1e-9)
        assert half.train.fits(size) == large.train.fits(2 * size)


def test_where_nodes_are_not_whole_all_gpus_together_are_a_candidate_still() -> None:
    """Training sizes are whole nodes: 8 of 12."""
    found = choose(replace(small(), num_gpus=12), settings=COARSE)
    assert "colocated 12/12" in {str(s) for s in (*found.predicted, *found.dropped)}


def test_speeds_of_a_smaller_cluster_count_the_sequences_that_the_whole_has() -> None:
    """Of 8 prompts a fifth is 2, which would be 10: a step takes as long, and has fewer sequences."""
    whole = replace(small(num_prompts=8), num_gpus=40, gpus_per_node=8)
    tenth = replace(whole, workload=replace(whole.workload, num_prompts=10))
    assert scale_of(whole) == scale_of(tenth) == 5
    few, many = choose(whole, settings=COARSE), choose(tenth, settings=COARSE)
    assert few.schedule == many.schedule and few.sequences_per_s == pytest.approx(0.8 * many.sequences_per_s)


def test_the_gain_of_a_static_choice_counts_what_was_given_up() -> None:
    first, second, third = (
        Schedule(mode=mode, rollout=8, train=8)
        for mode in (ModeName.ROLLOUT_REWARD_COLOCATED, ModeName.DISAGGREGATED, ModeName.COLOCATED)
    )
    found = Choice(schedule=first, predicted={first: 30.0, third: 10.0}, dropped={second: 25.0})
    assert found.gain == 1.2
    assert replace(found, dropped={second: 31.0}).gain == 1.0, "a speed of its first steps only"
    shifts = replace(second, mode=ModeName.SHIFTABLE)
    assert replace(found, schedule=shifts, predicted={shifts: 30.0, third: 10.0}).gain == 3.0


def test_a_choice_is_read_back_from_a_runs_folder_as_it_was(choice: Choice, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r")
    run.create()
    write_json(run.choice, choice.record())
    record = read_json(run.choice)
    assert choice_of(record) == choice
    assert record["train_gpus"] == choice.schedule.train and record["gain"] == choice.gain
    twice = choice.of_whole(2)
    assert choice_of(json.loads(json.dumps(twice.record()))) == twice
    assert twice.schedule.train == 2 * choice.schedule.train and twice.gain == pytest.approx(choice.gain)
    with pytest.raises(KeyError):
        choice_of({})
