"""What the planner of a run decided, what was shifted, and what that was worth: read from planner/decisions.jsonl."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.watching.book import Line, read_book


@dataclass(slots=True)
class Decided:
    """A decision, the shifts that it led to, and what it was worth, where that is known."""

    line: Line
    shifts: list[Line] = field(default_factory=list)
    worth: Line | None = None

    @property
    def chosen(self) -> Line | None:
        found = self.line["candidates"]
        return found[self.line["chosen"]] if 0 <= self.line["chosen"] < len(found) else None

    @property
    def cost_s(self) -> tuple[float | None, float | None]:
        """Predicted and measured: seconds in which its blocks served nobody, per block of the run."""
        predicted = self.chosen["penalty_s"] if self.chosen and self.line["moves"] else None
        took = [shift["took_s"] for shift in self.shifts if shift["took_s"] is not None]
        num_blocks = sum(map(len, self.line["blocks"].values()))
        return predicted, sum(took) / num_blocks if took and num_blocks else None

    def as_json(self) -> dict[str, Any]:
        predicted, measured = self.cost_s
        cost = {"predicted_s": predicted, "measured_s": measured}
        return {**self.line, "shifts": self.shifts, "worth": self.worth, "cost": cost}


@dataclass(frozen=True, slots=True)
class Decisions:
    decisions: list[Decided]
    shifts: list[Line]
    """All of them, also those that no decision asked for: trainings."""

    def as_json(self) -> dict[str, Any]:
        return {"decisions": [decided.as_json() for decided in self.decisions], "shifts": self.shifts}


def read_decisions(path: Path) -> Decisions:
    """In the order in which they were made. A run may still be writing them."""
    found: dict[tuple[int, int], Decided] = {}
    shifts: list[Line] = []
    for line in read_book(path):
        match line["kind"]:
            case "decision":
                found[line["attempt"], line["number"]] = Decided(line)
            case "shift":
                shifts.append(line)
            case "worth":
                if decided := found.get((line["attempt"], line["number"])):
                    decided.worth = line
    for shift in shifts:  # one that was quick may be written before its decision
        if decided := found.get((shift["attempt"], shift["decision"])):
            decided.shifts.append(shift)
    return Decisions(list(found.values()), shifts)
