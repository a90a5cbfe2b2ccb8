"""What timeline.jsonl says, put together: who had which slot when, loads, and what ran of each step.

Times are seconds since the epoch. Lines bear the controller's clock; how that goes with the time of day is the least
difference that any line of the attempt shows, for a line is written when it is true, or a little later.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pipeline.core.events import INFERENCE, Role
from pipeline.watching.book import Line
from pipeline.watching.slots import NOBODY

_SHORTEST = 0.1
"""Seconds: what is shorter was not seen, so two changes of a slot are at least this far apart."""


@dataclass(slots=True)
class Row:
    """A slot, from change to change: from `times[i]` on it did `codes[i]`. The last one is NOBODY, at the end."""

    name: str
    times: list[float] = field(default_factory=list)
    codes: list[str] = field(default_factory=list)

    def change(self, at: float, code: str) -> None:
        if self.codes and self.codes[-1] == code:
            return
        self.times.append(at)
        self.codes.append(code)

    def spans(self) -> Iterator[tuple[float, float, str]]:
        return zip(self.times, self.times[1:], self.codes, strict=False)


@dataclass(slots=True)
class Loads:
    """What a role had to do: `running` and `waiting` sequences, tokens per second."""

    running: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`spans`: stage, begin and end of what ran until it was recorded; `lengths`: number of responses and verdicts by
    bin of `pipeline.watching.history`."""

    number: int
    recorded: float
    spans: list[tuple[str, float, float]]
    lengths: dict[Role, dict[int, int]]


@dataclass(slots=True)
class Timeline:
    rows: list[Row] = field(default_factory=list)
    load_times: list[float] = field(default_factory=list)
    loads: dict[Role, Loads] = field(default_factory=lambda: {role: Loads() for role in INFERENCE})
    steps: dict[int, Step] = field(default_factory=dict)
    attempts: list[tuple[float, float]] = field(default_factory=list)
    """First and last sign of life of each."""

    @property
    def began(self) -> float:
        return self.attempts[0][0] if self.attempts else 0.0

    @property
    def ended(self) -> float:
        return self.attempts[-1][1] if self.attempts else 0.0


def read_timeline(lines: Sequence[Line], offsets: Mapping[int, float]) -> Timeline:
    """Of the lines of timeline.jsonl; `offsets` as `clock_offsets` has them."""
    found = Timeline()
    rows: dict[str, Row] = {}
    for attempt, offset in offsets.items():
        own = [line for line in lines if line["attempt"] == attempt]
        if not own:
            continue
        slots: dict[str, Row] = {}
        for line in own:
            at = line["at"] + offset
            match line["kind"]:
                case "slots":
                    slots |= {n: rows.setdefault(name, Row(name)) for n, name in line["names"].items()}
                    for ms, number, code in line["changes"]:
                        slots[str(number)].change(at + ms / 1e3, code)
                case "load":
                    found.load_times.append(at)
                    for role in INFERENCE:
                        _add_load(found.loads[role], line[role.value])
                case "step":
                    found.steps[line["step"]] = _step(line, at)
        ended = max(_last(line) for line in own) + offset
        found.attempts.append((min(line["at"] for line in own) + offset, ended))
        for row in slots.values():
            row.change(ended, NOBODY.code)
    found.rows = sorted(rows.values(), key=_turn)
    return found


def clock_offsets(lines: Iterable[Line]) -> dict[int, float]:
    """Of each attempt: what is added to the controller's clock to get the time of day."""
    found: dict[int, float] = {}
    for line in lines:
        offset = line["wall"] - line["at"]
        found[line["attempt"]] = min(offset, found.get(line["attempt"], offset))
    return found


def thinned(row: Row, shortest_s: float) -> Row:
    """The row without stretches that are shorter: the ones before go on. So slots that change often can be drawn."""
    found = Row(row.name)
    for start, end, code in row.spans():
        if end - start >= shortest_s or not found.codes:
            found.change(start, code)
    if row.times:
        found.times.append(row.times[-1])
        found.codes.append(row.codes[-1])
    return found


def bounded(rows: list[Row], most: int) -> list[Row]:
    """The rows, with no more than `most` changes in all."""
    shortest_s = _SHORTEST
    while sum(len(row.times) for row in rows) > most:
        rows = [thinned(row, shortest_s) for row in rows]
        shortest_s *= 2
    return rows


def step_at(timeline: Timeline, at: float) -> int | None:
    """The step that was recorded next."""
    ordered = sorted(timeline.steps.values(), key=lambda step: step.recorded)
    place = bisect_left([step.recorded for step in ordered], at)
    return ordered[place].number if place < len(ordered) else None


def _last(line: Line) -> float:
    at: float = line["at"]
    return at + line["changes"][-1][0] / 1e3 if line["kind"] == "slots" and line["changes"] else at


def _add_load(loads: Loads, told: list[float]) -> None:
    for values, value in zip((loads.running, loads.waiting, loads.tokens_per_s), told, strict=True):
        values.append(value)


def _step(line: Line, at: float) -> Step:
    spans = [(stage, at + begin / 1e3, at + end / 1e3) for stage, begin, end in line["spans"]]
    lengths = {Role(role): {int(b): n for b, n in found.items()} for role, found in line["lengths"].items()}
    return Step(number=line["step"], recorded=at, spans=spans, lengths=lengths)


def _turn(row: Row) -> tuple[str, int]:
    """Slots of a node by their number."""
    node, _, number = row.name.rpartition(":")
    return node, int(number)
