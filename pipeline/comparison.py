"""Runs held against each other: what each achieved, from its metric rows and its configuration. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from statistics import fmean

from pipeline.config import Config
from pipeline.core.events import Role
from pipeline.metrics import TRAINED

Row = Mapping[str, float | None]
_NUM_SKIPPED = 2
"""Steps in which a run fills up."""
_LAST = 5
"""Reward is the mean over so many last steps."""
IDLE = (*(role.value for role in Role), "shift")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one run, or the mean of several. None: it is not known. `idle`: shares of the time of all slots, by the role
    whose slots computed nothing; `shift`: those that nobody had, mostly on their way to a role."""

    num_steps: float
    sequences_per_s: float | None
    tokens_per_s: float | None
    step_s: float | None
    idle: Mapping[str, float]
    shifts_per_step: float
    reward: float | None
    accuracy: float | None
    failed_judges: float | None
    """Share of verdicts."""

    def as_json(self) -> dict[str, object]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


def outcome(rows: Sequence[Row], config: Config) -> Outcome:
    """Times are of the steps that `window` names: from the end of one to the end of another, however they overlap."""
    steps = [row for row in rows if (row.get("step") or 0) > 0]
    first, last = window(len(steps))
    counted = steps[first + 1 : last + 1]
    seconds = (_of(steps[last], "time") - _of(steps[first], "time")) if counted else 0.0
    verdicts = sum(_of(row, "genrm/num_verdicts") for row in steps)
    return Outcome(
        num_steps=len(steps),
        sequences_per_s=sum(_of(row, TRAINED) for row in counted) / seconds if seconds > 0 else None,
        tokens_per_s=sum(_of(row, "perf/total_num_tokens") for row in counted) / seconds if seconds > 0 else None,
        step_s=seconds / len(counted) if counted else None,
        idle=_idle(counted or steps, config),
        shifts_per_step=fmean([_of(row, "shift/num") for row in counted or steps]) if steps else 0.0,
        reward=_mean([row.get("critic/score/mean") for row in steps[-_LAST:]]),
        accuracy=_mean([row.get("val/acc") for row in rows if row.get("val/acc") is not None][-1:]),
        failed_judges=sum(_of(row, "genrm/num_failed") for row in steps) / verdicts if verdicts else None,
    )


def window(num_steps: int) -> tuple[int, int]:
    """Indices of the steps between whose ends is measured: an even number of cycles, because two that roll out together
    alternate in length; without the first ones, where there are enough."""
    last = num_steps - 1
    if last < 1:
        return 0, max(0, last)
    first = min(_NUM_SKIPPED, max(0, last - 2))
    first += (last - first) % 2
    return (first, last) if first < last else (last - 1, last)


def mean_of(outcomes: Sequence[Outcome]) -> Outcome:
    """Raises ValueError without any."""
    if not outcomes:
        raise ValueError("no outcome")

    def mean(name: str) -> float | None:
        return _mean([getattr(one, name) for one in outcomes])

    return Outcome(
        num_steps=mean("num_steps") or 0.0,
        sequences_per_s=mean("sequences_per_s"),
        tokens_per_s=mean("tokens_per_s"),
        step_s=mean("step_s"),
        idle={state: fmean([one.idle.get(state, 0.0) for one in outcomes]) for state in IDLE},
        shifts_per_step=mean("shifts_per_step") or 0.0,
        reward=mean("reward"),
        accuracy=mean("accuracy"),
        failed_judges=mean("failed_judges"),
    )


def _idle(rows: Sequence[Row], config: Config) -> dict[str, float]:
    num_slots = config.cluster.nodes * config.cluster.slots_per_node
    held = {role: fmean([_of(row, f"alloc/{role}_slots") for row in rows]) if rows else 0.0 for role in Role}
    if not any(held.values()):  # a run of before these were recorded
        return {}
    busy = {
        role: fmean([_of(row, f"alloc/{role}_slots") * _of(row, f"role/{role}/util") for row in rows]) for role in Role
    }
    found = {role.value: (held[role] - busy[role]) / num_slots for role in Role}
    return found | {"shift": max(0.0, 1 - sum(held.values()) / num_slots)}


def _of(row: Row, name: str) -> float:
    return row.get(name) or 0.0


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
