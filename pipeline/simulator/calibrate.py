"""Costs as a run had them, fitted from its journal and its metrics.

The run must have had one replica per role, barriers and staleness 0 (`placement.admission=barrier`), so that its stages
do not overlap. Of the rollout engine the journal says when responses of which length ended: between two such moments
the number of iterations and of the sequences in each is known, which separates the time of an iteration from that of a
sequence in it. What a task takes before is prefill. The judge's engine is taken to be of the same kind, as much slower
or faster as the judging took. All else of a step is added to training, of which time per token is told apart from fixed
time by the steps' different sizes.
"""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np

from pipeline.core.events import Finish, SegmentClosed, SegmentInfo, TaskEnded, TaskStarted
from pipeline.core.iteration import IterationCost
from pipeline.core.modes import ModeName
from pipeline.journal import read_journal
from pipeline.simulator.admission import Admission
from pipeline.simulator.cost import MeasuredTrain, RoleCost
from pipeline.simulator.lengths import Array
from pipeline.simulator.modes import Schedule
from pipeline.simulator.result import simulate
from pipeline.simulator.setup import Measured, Setup

_REWEIGHTED = 50  # rounds of least squares with weights, which come to the least sum of absolute errors
_SMALLEST_ERROR_S = 3e-3  # of a moment in the journal: errors below it weigh alike
SCHEDULE = Schedule(mode=ModeName.DISAGGREGATED, rollout=1, reward=1, train=1, staleness=0, judging=Admission.BARRIER)
"""Of the run that is calibrated from, and of what is then predicted."""


@dataclass(frozen=True, slots=True)
class _Task:
    """One rollout task: seconds from its start to each close, and the tokens that each sequence has then."""

    closes: list[tuple[float, int]]
    lengths: Array


def calibrated(setup: Setup, folder: Path) -> Setup:
    """`setup`, whose workload is that of the run in `folder`, with its costs. Raises ValueError for a short run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > 0]
    tasks = _rollout_tasks(folder / "journal" / "attempt_1.jsonl")
    if len(rows) < 10 or len(tasks) < 10:
        raise ValueError(f"{folder}: {min(len(rows), len(tasks))} steps are too few to calibrate from; 10 are enough")
    iteration_s, sequence_s, start_s = _fit_engine(tasks)
    prompts = setup.workload.num_sequences * setup.workload.prompt_tokens
    engine = IterationCost(overhead_s=iteration_s, per_sequence_s=sequence_s, prefill_s=start_s / prompts)
    stages = ("rollout", "reward", "train")
    spent = {name: median(row[f"timing_s/{name}"] for row in rows) for name in stages}
    token_s, fixed_s = _fit_line(
        np.array([row["train/num_tokens"] for row in rows]), np.array([row["timing_s/train"] for row in rows])
    )
    rest_s = median(row["timing_s/step"] - sum(row[f"timing_s/{stage}"] for stage in stages) for row in rows)
    # Training is by tokens of responses; the simulator counts prompts too.
    tokens = setup.workload.num_sequences * setup.workload.rollout.mean
    token_s *= tokens / (tokens + prompts)
    train = MeasuredTrain(token_s=token_s, fixed_s=fixed_s + rest_s)
    found = replace(setup, measured=Measured(rollout=_role(engine), reward=_role(engine), train=train))
    steps = simulate(found, SCHEDULE).steps
    judged = median((s.scored_s or 0.0) - (s.rolled_out_s or 0.0) for s in steps)
    rolled = median((s.rolled_out_s or 0.0) - s.admitted_s for s in steps)
    return replace(
        found,
        measured=Measured(
            rollout=_role(engine),
            reward=_role(engine.slower(spent["reward"] / judged)),
            train=replace(train, fixed_s=train.fixed_s + max(0.0, spent["rollout"] - rolled)),
        ),
    )


def _role(engine: IterationCost) -> RoleCost:
    return RoleCost(num_gpus=1, iteration=engine, kv_tokens=math.inf, wake_s=0.0, update_s=0.0)


def _rollout_tasks(path: Path) -> list[_Task]:
    started: dict[str, float] = {}
    closed: dict[str, list[tuple[float, tuple[SegmentInfo, ...]]]] = {}
    ended = []
    for at, event in read_journal(path):
        if isinstance(event, TaskStarted):
            started[event.task] = at
        elif isinstance(event, SegmentClosed) and event.task in started:
            closed.setdefault(event.task, []).append((at - started[event.task], event.segments))
        elif isinstance(event, TaskEnded) and event.ok and event.task in closed:
            ended.append(_task(closed[event.task]))
    return ended


def _task(closed: list[tuple[float, tuple[SegmentInfo, ...]]]) -> _Task:
    tokens: dict[str, int] = {}
    closes: list[tuple[float, int]] = []
    for seconds, segments in closed:
        for segment in segments:
            tokens[segment.id] = tokens.get(segment.id, 0) + segment.num_tokens
        done = [tokens[s.id] for s in segments if s.finish in (Finish.STOP, Finish.LENGTH)]
        if done and (not closes or max(done) > closes[-1][1]):
            closes.append((seconds, max(done)))
    return _Task(closes, np.array(sorted(tokens.values()), dtype=float))


def _fit_engine(tasks: list[_Task]) -> tuple[float, float, float]:
    """Seconds per iteration, per sequence of an iteration, and of a task before its first iteration."""

    def served(task: _Task, low: int, high: int) -> float:
        """Tokens that all sequences together get from iteration `low` to `high`."""
        return float((np.minimum(task.lengths, high) - np.minimum(task.lengths, low)).sum())

    table, seconds = [], []
    for task in tasks:
        for (t0, low), (t1, high) in zip(task.closes, task.closes[1:], strict=False):
            table.append((float(high - low), served(task, low, high)))
            seconds.append(t1 - t0)
    iteration_s, sequence_s = _least_absolute(np.array(table), np.array(seconds))
    starts = [t - low * iteration_s - served(task, 0, low) * sequence_s for task in tasks for t, low in task.closes[:1]]
    return iteration_s, sequence_s, max(0.0, median(starts))


def _fit_line(x: Array, y: Array) -> tuple[float, float]:
    """Slope and value at 0, neither negative."""
    slope, constant = _least_absolute(np.stack([x, np.ones_like(x)], axis=1), y)
    return slope, constant


def _least_absolute(table: Array, seconds: Array) -> tuple[float, float]:
    """Two coefficients, not negative, with the least sum of absolute errors: others' load disturbs few moments much."""
    if len(seconds) < 2:
        raise ValueError("the journal has too few moments to fit an engine")
    weight = np.ones_like(seconds)
    fit: Array = np.zeros(2)
    for _ in range(_REWEIGHTED):
        fit = np.asarray(np.linalg.lstsq(table * weight[:, None], seconds * weight, rcond=None)[0])
        weight = 1 / np.sqrt(np.maximum(np.abs(table @ fit - seconds), _SMALLEST_ERROR_S))
    if fit.min() >= 0:
        return float(fit[0]), float(fit[1])
    only = [float(median(seconds[table[:, i] > 0] / table[table[:, i] > 0, i])) for i in (0, 1)]
    return (0.0, only[1]) if fit[0] < 0 else (only[0], 0.0)
