"""What a step's batch looks like, in numbers: the same names from every trainer."""

import math
from collections.abc import Mapping, Sequence

from pipeline.core.events import Finish
from pipeline.queue.schema import SequenceRow
from stages.rl.advantages import Advantages
from stages.rl.staleness import lag_metrics


def batch_metrics(rows: Sequence[SequenceRow], advantages: Advantages, version: int) -> dict[str, float]:
    """Of all sequences of the step, trained or not; what has no value (a mean of nothing) is left out.

    `version`: the one that the step trains from.
    """
    used = advantages.used_N.tolist()
    lengths = [float(len(row.tokens)) for row in rows]
    metrics = {
        "train/num_sequences": float(len(rows)),
        "train/num_groups_used": float(advantages.num_groups_used),
        "train/num_tokens": float(sum(row.num_sampled for row, is_used in zip(rows, used, strict=True) if is_used)),
        **_spread("critic/score", [row.score for row in rows if row.score is not None]),
        **_spread("critic/advantages", advantages.values_N[advantages.used_N].tolist()),
        **_spread("response_length", lengths),
        **lag_metrics(rows, version),
    }
    if rows:
        metrics["response_length/clip_ratio"] = sum(row.finish == Finish.LENGTH for row in rows) / len(rows)
        metrics["prompt_length/mean"] = sum(len(row.prompt_ids) for row in rows) / len(rows)
    return metrics


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Results are JSON, which has no NaN; a skipped update is told by its own count."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    return {f"{name}/mean": sum(values) / len(values), f"{name}/max": max(values), f"{name}/min": min(values)}
