import math
from dataclasses import dataclass, field

import pytest

from pipeline.metrics import only_finite, step_row
from pipeline.summary import summarise


@dataclass
class Parts:
    metrics: dict[str, list[dict[str, float]]] = field(default_factory=dict)
    num_sequences: tuple[int, int] = (0, 0)
    queue_depth: int = 0


def test_counts_of_replicas_are_added_and_rates_follow_from_the_sums() -> None:
    rewards = [
        {"genrm/num_verdicts": 6.0, "genrm/num_failed": 3.0, "genrm/num_tokens": 60.0, "genrm/failed_empty": 3.0},
        {"genrm/num_verdicts": 2.0, "genrm/num_tokens": 20.0, "genrm/num_wrong": 4.0, "genrm/num_false_positive": 1.0},
    ]
    rollouts = [{"rollout/num_tokens": 5.0}, {"rollout/num_tokens": 7.0}]
    row = step_row(1, Parts({"rollout": rollouts, "reward": rewards}), [], 0.0, 1.0)
    assert row["rollout/num_tokens"] == 12
    assert (row["genrm/num_verdicts"], row["genrm/failed_empty"]) == (8, 3)
    assert row["genrm/fail_rate"] == pytest.approx(3 / 8)
    assert row["genrm/out_tokens/mean"] == 10
    assert row["genrm/false_positive_rate"] == 0.25


def test_a_rate_without_cases_is_unknown_and_not_zero() -> None:
    row = step_row(1, Parts({"reward": [{"genrm/num_verdicts": 0.0, "genrm/num_wrong": 0.0}]}), [], 0.0, 1.0)
    assert not {"genrm/fail_rate", "genrm/false_positive_rate", "genrm/false_negative_rate"} & row.keys()


def test_what_the_watcher_says_stands_in_the_row() -> None:
    row = step_row(1, Parts(), [], 0.0, 1.0, {"shift/num": 2.0, "role/reward/slowness": math.inf})
    assert (row["shift/num"], row["role/reward/slowness"], row["tracking/nonfinite"]) == (2.0, None, 1.0)


def test_of_a_repeated_task_the_last_word_holds() -> None:
    row = step_row(2, Parts({"train": [{"actor/pg_loss": 1.0}, {"actor/pg_loss": 2.0}]}), [], 0.0, 1.0)
    assert row["actor/pg_loss"] == 2.0


def test_throughput_counts_the_batchs_response_tokens_over_the_whole_step() -> None:
    train = {"train/num_tokens": 200.0, "train/num_sequences": 7.0, "response_length/mean": 300 / 7}
    parts = Parts({"train": [train]}, num_sequences=(7, 1), queue_depth=5)
    row = step_row(3, parts, [], 10.0, 12.0)
    assert (row["perf/total_num_tokens"], row["perf/throughput"], row["perf/time_per_step"]) == (300, 150, 2)
    assert (row["queue/num_trained"], row["queue/num_dropped"], row["queue/depth"]) == (7, 1, 5)
    assert row["training/global_step"] == 3


def test_control_is_the_time_in_which_no_stage_ran() -> None:
    spans = [
        ("checkpoint", 8.0, 11.0),  # of the step before: a part of it lies in this one
        ("prompts", 10.0, 10.5),
        ("rollout", 10.5, 13.0),
        ("rollout", 12.0, 14.0),  # a second replica
        ("reward", 14.5, 15.0),
        ("batch", 15.0, 15.25),
        ("record", 15.25, 15.5),
    ]
    row = step_row(1, Parts(), spans, 10.0, 16.0)
    seconds = {name.removeprefix("timing_s/"): value for name, value in row.items() if name.startswith("timing_s/")}
    assert seconds == {
        "save_checkpoint": 1.0,
        "prompts": 0.5,
        "rollout": 3.5,
        "reward": 0.5,
        "queue": 0.5,
        "step": 6.0,
        "control": 1.0,
    }


def test_a_step_without_a_gap_has_no_control_time() -> None:
    row = step_row(1, Parts(), [("rollout", 0.0, 2.0), ("train", 2.0, 3.0)], 0.0, 3.0)
    assert row["timing_s/control"] == 0


def test_what_is_not_finite_becomes_none_and_is_counted_once() -> None:
    row = only_finite({"a": math.nan, "b": -math.inf, "c": 1.0, "d": None})
    assert row == {"a": None, "b": None, "c": 1.0, "d": None, "tracking/nonfinite": 3}
    assert only_finite(row) == row


def rows() -> list[tuple[int, dict[str, float | None]]]:
    first: list[tuple[int, dict[str, float | None]]] = [(0, {"val/acc": 0.3, "timing_s/step": 9.0})]
    return first + [
        (
            step,
            {
                "critic/score/mean": step / 10,
                "queue/num_trained": 16.0,
                "queue/num_dropped": 1.0,
                "perf/total_num_tokens": 100.0,
                "timing_s/step": 2.0,
                "timing_s/rollout": 1.5,
                "timing_s/control": 0.5,
                "genrm/num_wrong": 4.0,
                "genrm/num_false_positive": 1.0 if step == 1 else 0.0,
            }
            | ({"val/acc": 0.7} if step == 10 else {}),
        )
        for step in range(1, 11)
    ]


def test_a_summary_says_what_the_run_came_to() -> None:
    summary = summarise("done", rows(), 34.5678)
    assert summary == {
        "status": "done",
        "steps": 10,
        "wall_s": 34.568,
        "reward_first": pytest.approx(0.3),
        "reward_last": pytest.approx(0.8),
        "reward_mean_over_steps": 5,
        "eval_first": 0.3,
        "eval_last": 0.7,
        "judge_false_positive_rate": pytest.approx(1 / 40),
        "sequences_trained": 160,
        "sequences_dropped": 10,
        "tokens_per_s": pytest.approx(50.0),
        "stage_seconds": {"control": 5.0, "rollout": 15.0},
    }


def test_a_summary_of_nothing_is_all_unknown() -> None:
    summary = summarise("failed", [], 1.0)
    unknown = {"reward_first", "reward_last", "eval_first", "eval_last", "judge_false_positive_rate", "tokens_per_s"}
    assert {name for name, value in summary.items() if value is None} == unknown
    assert (summary["steps"], summary["sequences_trained"], summary["stage_seconds"]) == (0, 0, {})


def test_a_summary_passes_over_values_that_were_not_finite() -> None:
    summary = summarise("done", [(1, {"critic/score/mean": None}), (2, {"critic/score/mean": 0.5})], 1.0)
    assert summary["reward_first"] == 0.5


def test_time_between_messages_counts_as_control_only_where_a_stage_ran_alone() -> None:
    parts = Parts(metrics={"rollout": [{"task_s/rollout": 1.0}], "reward": [{"task_s/reward": 0.5}]})
    one_by_one = step_row(1, parts, [("rollout", 0.0, 2.0), ("reward", 2.0, 3.0), ("checkpoint", 0.0, 1.0)], 0.0, 3.0)
    assert one_by_one["timing_s/control"] == 1.0 + 0.5
    together = step_row(1, parts, [("rollout", 0.0, 2.0), ("reward", 0.5, 3.0)], 0.0, 3.5)
    assert together["timing_s/control"] == 0.5
