"""Runs held against each other, from their rows."""

from pathlib import Path

import pytest

from pipeline.comparison import mean_of, outcome, window
from pipeline.config import Config, load_files

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def config() -> Config:
    return load_files([ROOT / "configs/emulated.yaml"], ["cluster.slots_per_node=8"])


def row(step: int, time: float, **more: float) -> dict[str, float | None]:
    return {"step": step, "time": time, "queue/num_trained": 16.0, "perf/total_num_tokens": 320.0, **more}


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [(0, (0, 0)), (1, (0, 0)), (2, (0, 1)), (3, (0, 2)), (4, (1, 3)), (5, (2, 4)), (9, (2, 8)), (12, (3, 11))],
)
def test_an_even_number_of_cycles_is_measured_where_there_are_enough(num_steps: int, expected: tuple[int, int]) -> None:
    assert window(num_steps) == expected


def test_speed_is_of_the_steps_after_the_first_ones(config: Config) -> None:
    ends = [100.0, 110.0, 112.0, 120.0, 122.0]  # two at a time, as they roll out together
    found = outcome([row(0, 90.0), *(row(n, at) for n, at in enumerate(ends, 1))], config)
    assert (found.num_steps, found.step_s) == (5, 5.0)
    assert found.sequences_per_s == pytest.approx(2 * 16 / 10) and found.tokens_per_s == pytest.approx(64.0)


def test_idle_time_is_told_by_role_and_adds_up(config: Config) -> None:
    usage = {
        "alloc/rollout_slots": 4.0,
        "alloc/reward_slots": 2.0,
        "alloc/train_slots": 1.0,
        "role/rollout/util": 0.75,
        "role/reward/util": 0.5,
        "role/train/util": 1.0,
    }
    found = outcome([row(n, 10.0 * n, **usage) for n in range(1, 6)], config)
    assert found.idle == pytest.approx({"rollout": 1 / 8, "reward": 1 / 8, "train": 0.0, "shift": 1 / 8})
    assert outcome([row(n, 10.0 * n) for n in range(1, 6)], config).idle == {}, "rows of before it was recorded"


def test_what_is_not_known_is_none(config: Config) -> None:
    found = outcome([row(1, 5.0)], config)
    assert (found.sequences_per_s, found.step_s, found.reward, found.accuracy, found.failed_judges) == (None,) * 5
    rows = [row(0, 0.0, **{"val/acc": 0.1}), row(1, 5.0, **{"critic/score/mean": 0.5, "val/acc": 0.3})]
    found = outcome([*rows, row(2, 9.0, **{"critic/score/mean": 0.7})], config)
    assert (found.reward, found.accuracy) == (pytest.approx(0.6), 0.3)


def test_a_mean_leaves_out_what_some_do_not_know(config: Config) -> None:
    known = outcome([row(n, 10.0 * n, **{"critic/score/mean": 0.4}) for n in range(1, 6)], config)
    unknown = outcome([row(n, 20.0 * n) for n in range(1, 6)], config)
    both = mean_of([known, unknown])
    assert both.sequences_per_s == pytest.approx((1.6 + 0.8) / 2) and both.reward == pytest.approx(0.4)
    with pytest.raises(ValueError, match="no outcome"):
        mean_of([])
