"""What the rules of `pipeline.report.advice` look at: a run in a few figures. Pure."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.core.events import INFERENCE, Role
from pipeline.core.modes import SHARED, ModeName
from pipeline.metrics import DROPPED, TRAINED
from pipeline.report.figures import quantile
from pipeline.report.run import RunRecord
from pipeline.report.spent import shares, tail_share
from pipeline.report.troubles import FAILED

_STARTS = 2
"""Steps in which engines are started for the first time: nothing that was predicted then was known."""
_SERIAL = ("rollout", "reward", "train", "publish", "evaluate", "prompts", "queue", "control", "save_checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Shares are of the slots' time (`slots`, by code of pipeline.watching.slots) or of the steps' (`stages`); None or
    absent: not known."""

    mode: ModeName | None
    staleness: int | None
    is_streaming: bool
    num_steps: int
    slots: Mapping[str, float]
    stages: Mapping[str, float]
    tail: float | None
    lengths: Mapping[Role, tuple[float, float]]
    """Median and 99 % of what each role generated, in tokens."""
    clipped: float | None
    """Share of the responses that reached the limit."""
    judge_failures: Mapping[str, float]
    """By type, as a share of the verdicts."""
    false_positives: float | None
    dropped: float
    """Share of the sequences."""
    groups_used: float | None
    """Share of the groups that had responses of different reward."""
    kv_use: Mapping[Role, float]
    waiting: Mapping[Role, float]
    """Sequences, mean when a step was recorded."""
    num_shifts: int
    predicted_gain_s: float | None
    measured_gain_s: float | None
    """Means over the decisions that shifted something and whose end is known."""
    num_weighed: int
    step_s: float | None
    nonfinite: float
    num_attempts: int

    @property
    def shares_slots(self) -> bool:
        return self.mode is not None and bool(SHARED[self.mode])

    def spent(self, codes: str) -> float:
        """Share of the slots' time that went into these."""
        return sum(self.slots.get(code, 0.0) for code in codes)


def facts_of(record: RunRecord) -> Facts:
    config = record.config
    verdicts, wrong = record.total("genrm/num_verdicts"), record.total("genrm/num_wrong")
    trained, dropped = record.total(TRAINED), record.total(DROPPED)
    whole_s = record.total("timing_s/step")
    worths = [d.worth for d in record.shifting if d.worth and d.line["step"] > _STARTS]
    prompts = config.data.train_batch_size if config else 0
    used = record.mean("train/num_groups_used")
    types = {name for row in record.rows.values() for name in row if name.startswith(FAILED)}
    return Facts(
        mode=ModeName(config.placement.mode) if config else None,
        staleness=config.algorithm.staleness if config else None,
        is_streaming=bool(config and config.placement.admission == "stream"),
        num_steps=len(record.trained),
        slots=shares(record.timeline),
        stages={name: record.total(f"timing_s/{name}") / whole_s for name in _SERIAL} if whole_s else {},
        tail=tail_share(record.timeline),
        lengths={role: found for role in INFERENCE if (found := _lengths(record, role)) is not None},
        clipped=record.mean("response_length/clip_ratio"),
        judge_failures={t.removeprefix(FAILED): record.total(t) / verdicts for t in types if record.total(t)},
        false_positives=record.total("genrm/num_false_positive") / wrong if wrong else None,
        dropped=dropped / (trained + dropped) if trained + dropped else 0.0,
        groups_used=used / prompts if used is not None and prompts else None,
        kv_use={role: value for role in INFERENCE if (value := record.mean(f"role/{role.value}/kv_use")) is not None},
        waiting={role: value for role in INFERENCE if (value := record.mean(f"role/{role.value}/waiting")) is not None},
        num_shifts=len(record.shifting),
        predicted_gain_s=sum(w["predicted_gain_s"] for w in worths) / len(worths) if worths else None,
        measured_gain_s=sum(w["measured_gain_s"] for w in worths) / len(worths) if worths else None,
        num_weighed=len(worths),
        step_s=record.mean("timing_s/step"),
        nonfinite=record.total("train/nonfinite_updates"),
        num_attempts=record.num_attempts,
    )


def _lengths(record: RunRecord, role: Role) -> tuple[float, float] | None:
    counted: Counter[int] = Counter()
    for step in record.timeline.steps.values():
        counted.update(step.lengths.get(role, {}))
    return (quantile(counted, 0.5), quantile(counted, 0.99)) if counted else None
