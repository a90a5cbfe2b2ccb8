"""The metric row of a step: what its stage tasks measured, merged, and what follows from it. Pure.

Names are those of the field (`critic/score/mean`, `actor/pg_loss`, `timing_s/rollout`, `perf/throughput`); ours have
their own prefixes (`genrm/`, `queue/`, `mismatch/`, `tracking/`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

Row = dict[str, float | None]
"""Metric name to value; None stands for a value that was not finite. A row is JSON."""
Span = tuple[str, float, float]
"""A stage, when it began and when it ended, in seconds of one clock."""

_Pieces = dict[str, list[tuple[float, float]]]

_TIMING = {"checkpoint": "save_checkpoint", "batch": "queue", "record": "queue"}
"""Stages whose time has another name; `queue` is the writing of batches and rows to the queue's index."""
_WORKING = ("prompts", "rollout", "reward", "train", "publish", "evaluate")
_COUNTS = ("rollout/num_", "genrm/num_", "genrm/failed_", "reward/num_", "reward/sum_")
"""Additive: every replica reports its own share."""
_SUM = "reward/sum_"
TRAINED, DROPPED = "queue/num_trained", "queue/num_dropped"


class Parts(Protocol):
    """What a step left behind: the metrics of each stage's tasks, (trained, dropped), and the longest wait."""

    @property
    def metrics(self) -> Mapping[str, Sequence[Mapping[str, float]]]: ...
    @property
    def num_sequences(self) -> tuple[int, int]: ...
    @property
    def queue_depth(self) -> int: ...


def step_row(
    step: int,
    parts: Parts,
    spans: Iterable[Span],
    began: float,
    ended: float,
    watched: Mapping[str, float] = MappingProxyType({}),
) -> Row:
    """The row of `step`, which lasted from `began` to `ended` (the end of the step before, and its own). `watched`:
    what the watcher has to say of that time.

    `spans` are the stages that ran in between, on the same clock; one may overlap another (a save runs beside the
    next rollout). `timing_s/control` is the time in which none of them ran. `perf/throughput` counts the response
    tokens of the step's batch, those of groups without variance too, per second of the whole step.
    """
    row = _merged(task for tasks in parts.metrics.values() for task in tasks) | dict(watched)
    row["training/global_step"] = float(step)
    row["queue/depth"] = float(parts.queue_depth)
    row[TRAINED], row[DROPPED] = map(float, parts.num_sequences)
    pieces = _pieces(spans, began, ended)
    row |= dict(_means(row)) | _judge(row) | _times(pieces, began, ended)
    row["timing_s/control"] += _idle(row, pieces)
    if "response_length/mean" in row and "train/num_sequences" in row:
        tokens = round(row["response_length/mean"] * row["train/num_sequences"])
        row["perf/total_num_tokens"] = float(tokens)
        row["perf/throughput"] = tokens / max(ended - began, 1e-9)
    return only_finite(row)


def only_finite(row: Mapping[str, float | None]) -> Row:
    """The row with None for values that are not finite, and their number as `tracking/nonfinite`."""
    clean = {name: value if value is not None and math.isfinite(value) else None for name, value in row.items()}
    return clean | {"tracking/nonfinite": float(sum(value is None for value in clean.values()))}


def _merged(tasks: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Counts are added up; of any other name the last task's value holds (a task that was repeated)."""
    row: dict[str, float] = {}
    for metrics in tasks:
        for name, value in metrics.items():
            row[name] = row.get(name, 0.0) + value if name.startswith(_COUNTS) else float(value)
    return row


def _judge(row: Mapping[str, float]) -> dict[str, float]:
    """Rates of the generative judge. `wrong` and `correct` are what the exact checker says, where there is one."""
    rates = {
        "genrm/fail_rate": ("genrm/num_failed", "genrm/num_verdicts"),
        "genrm/out_tokens/mean": ("genrm/num_tokens", "genrm/num_verdicts"),
        "genrm/false_positive_rate": ("genrm/num_false_positive", "genrm/num_wrong"),
        "genrm/false_negative_rate": ("genrm/num_false_negative", "genrm/num_correct"),
    }
    return {name: row.get(part, 0.0) / row[whole] for name, (part, whole) in rates.items() if row.get(whole)}


def _means(row: dict[str, float]) -> Iterator[tuple[str, float]]:
    """Of each reward function and of each figure that it gave, in place of the sums."""
    for name in [name for name in row if name.startswith(_SUM)]:
        function, _, figure = name.removeprefix(_SUM).partition("/")
        yield f"reward/{function}/{figure or 'mean'}", row.pop(name) / row[f"reward/num_scored_{function}"]


def _pieces(spans: Iterable[Span], began: float, ended: float) -> _Pieces:
    """Of each stage, by the name of its time: when it ran between `began` and `ended`."""
    pieces: _Pieces = {}
    for stage, start, end in spans:
        clipped = (max(start, began), min(end, ended))
        if clipped[0] <= clipped[1]:
            pieces.setdefault(_TIMING.get(stage, stage), []).append(clipped)
    return pieces


def _times(pieces: _Pieces, began: float, ended: float) -> dict[str, float]:
    seconds = {f"timing_s/{stage}": _covered(ran) for stage, ran in pieces.items()}
    seconds["timing_s/step"] = seconds["perf/time_per_step"] = ended - began
    seconds["timing_s/control"] = ended - began - _covered([piece for ran in pieces.values() for piece in ran])
    return seconds


def _idle(row: Mapping[str, float], pieces: _Pieces) -> float:
    """Time within the stages in which their tasks did not work yet or any more: messages, decisions, processes. Only
    of stages that ran alone: what of two that overlapped was idle, nobody waited for."""
    spent = {stage: row.get(f"task_s/{stage}", 0.0) for stage in _WORKING}
    spent["publish"] += row.get("task_s/load", 0.0)
    alone = [stage for stage in _WORKING if spent[stage] and stage in pieces and not _overlaps(stage, pieces)]
    return sum(max(0.0, row[f"timing_s/{stage}"] - spent[stage]) for stage in alone)


def _overlaps(stage: str, pieces: _Pieces) -> bool:
    others = [piece for other in _WORKING if other != stage for piece in pieces.get(other, ())]
    return any(start < end_of and begin_of < end for start, end in pieces[stage] for begin_of, end_of in others)


def _covered(pieces: list[tuple[float, float]]) -> float:
    """Length of the union of the intervals."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(pieces):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
