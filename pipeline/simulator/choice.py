"""What the guard chose, and the form in which a run keeps it."""

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pipeline.core.modes import ModeName
from pipeline.simulator.admission import Admission
from pipeline.simulator.modes import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    schedule: Schedule
    predicted: dict[Schedule, float]
    """Sequences per second of all that were simulated to the end, best first."""
    dropped: dict[Schedule, float] = field(default_factory=dict)
    """Of the others: the speed at which one was given up, or that it cannot exceed."""
    stands_for: int = 1
    """What was simulated is a cluster so many times smaller; schedules and speeds are those of the whole."""
    took_s: float = field(default=0.0, compare=False)
    """Of the processor."""

    @property
    def sequences_per_s(self) -> float:
        return self.predicted[self.schedule]

    @property
    def gain(self) -> float:
        """Predicted speed of the choice over that of the best static schedule. Of a static choice: over the next one,
        also over one that was given up, at the speed that it had then."""
        speed, is_shiftable = self.sequences_per_s, self.schedule.mode is ModeName.SHIFTABLE
        rated = self.predicted if is_shiftable else {**self.dropped, **self.predicted}
        others = [v for s, v in rated.items() if s.mode is not ModeName.SHIFTABLE and s != self.schedule]
        return speed / (max(others, default=speed) if is_shiftable else min(speed, max(others, default=speed)))

    @property
    def best_static(self) -> Schedule | None:
        return next((s for s in self.predicted if s.mode is not ModeName.SHIFTABLE), None)

    @property
    def best_shiftable(self) -> Schedule | None:
        return next((s for s in self.predicted if s.mode is ModeName.SHIFTABLE), None)

    @property
    def runners_up(self) -> list[Schedule]:
        """The best of each other mode, best first."""
        best: dict[ModeName, Schedule] = {}
        for schedule in self.predicted:
            if schedule.mode is not self.schedule.mode:
                best.setdefault(schedule.mode, schedule)
        return list(best.values())

    def of_whole(self, scale: int, faster: float | None = None) -> "Choice":
        """The choice for a cluster that is so many times as large. `faster`: how many times as many sequences its steps
        have, of which each takes as long; not `scale` where that does not divide the prompts."""
        times = scale if faster is None else faster
        return replace(
            self,
            schedule=_times(self.schedule, scale),
            predicted={_times(s, scale): v * times for s, v in self.predicted.items()},
            dropped={_times(s, scale): v * times for s, v in self.dropped.items()},
            stands_for=scale,
        )

    def record(self) -> dict[str, Any]:
        """For JSON; `choice_of` reads it back."""
        return {
            "schedule": asdict(self.schedule),
            "train_gpus": self.schedule.train,
            "sequences_per_s": self.sequences_per_s,
            "gain": self.gain,
            "predicted": [{"schedule": asdict(s), "sequences_per_s": v} for s, v in self.predicted.items()],
            "dropped": [{"schedule": asdict(s), "at_most": v} for s, v in self.dropped.items()],
            "stands_for": self.stands_for,
            "took_s": self.took_s,
        }


def choice_of(record: dict[str, Any]) -> Choice:
    """Of what `Choice.record` made, through JSON or not. Raises KeyError or ValueError for anything else."""
    return Choice(
        schedule=_schedule(record["schedule"]),
        predicted={_schedule(row["schedule"]): row["sequences_per_s"] for row in record["predicted"]},
        dropped={_schedule(row["schedule"]): row["at_most"] for row in record["dropped"]},
        stands_for=record["stands_for"],
        took_s=record["took_s"],
    )


def _schedule(found: dict[str, Any]) -> Schedule:
    named = {
        "mode": ModeName(found["mode"]),
        "admission": Admission(found["admission"]),
        "judging": Admission(found["judging"]),
    }
    return Schedule(**{**found, **named})


def _times(schedule: Schedule, scale: int) -> Schedule:
    return replace(
        schedule, rollout=schedule.rollout * scale, reward=schedule.reward * scale, train=schedule.train * scale
    )
