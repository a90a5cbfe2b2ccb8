"""summary.json: what a run came to, from its metric rows. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.metrics import DROPPED, TRAINED

_ENDS_STEPS = 5
"""`reward_first` and `reward_last` are means over so many steps: one step's mean is mostly noise."""

Rows = Sequence[tuple[int, Mapping[str, float | None]]]
"""(step, row) in ascending order; step 0 holds the evaluation before the first step."""


def summarise(status: str, rows: Rows, wall_s: float) -> dict[str, Any]:
    """What cannot be known (no evaluation, no checker, no step) is None.

    `tokens_per_s` counts the response tokens of the batches over the time of the steps, without the start of the run;
    `judge_false_positive_rate` is that of the judge on the policy's own wrong answers, over all steps.
    """
    rewards = _series(rows, "critic/score/mean")
    accuracy = _series(rows, "val/acc")
    step_s = sum(_series([r for r in rows if r[0] > 0], "timing_s/step"))
    wrong = sum(_series(rows, "genrm/num_wrong"))
    return {
        "status": status,
        "steps": max((step for step, _ in rows), default=0),
        "wall_s": round(wall_s, 3),
        "reward_first": _mean(rewards[:_ENDS_STEPS]),
        "reward_last": _mean(rewards[-_ENDS_STEPS:]),
        "reward_mean_over_steps": _ENDS_STEPS,
        "eval_first": accuracy[0] if accuracy else None,
        "eval_last": accuracy[-1] if accuracy else None,
        "judge_false_positive_rate": sum(_series(rows, "genrm/num_false_positive")) / wrong if wrong else None,
        "sequences_trained": int(sum(_series(rows, TRAINED))),
        "sequences_dropped": int(sum(_series(rows, DROPPED))),
        "tokens_per_s": sum(_series(rows, "perf/total_num_tokens")) / step_s if step_s else None,
        "stage_seconds": _stage_seconds(rows),
    }


def _series(rows: Rows, name: str) -> list[float]:
    return [value for _, row in rows if (value := row.get(name)) is not None]


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _stage_seconds(rows: Rows) -> dict[str, float]:
    prefix = "timing_s/"
    names = {name for _, row in rows for name in row if name.startswith(prefix)} - {"timing_s/step"}
    return {name.removeprefix(prefix): round(sum(_series(rows, name)), 3) for name in sorted(names)}
