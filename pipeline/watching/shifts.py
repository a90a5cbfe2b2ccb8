"""The shifts that were made: from which role to which, how long each half took, what it aborted and held."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pipeline.core.decisions import Decision, ShiftDown, ShiftUp
from pipeline.core.events import Role
from pipeline.core.reports import BlockBound, BlockLost, Report, ShiftBegun, ShiftEnded
from pipeline.core.worker import Worker
from pipeline.wire_shift import Slept, WakeFailed, Woken

Phases = dict[str, float]


@dataclass(slots=True, kw_only=True)
class Shift:
    """Of one block. `down_s`, `up_s`: by phase, of the slowest of its workers, and `all`, from order to report.
    `held_bytes`: what those that sleep now hold still, and those that are awake now. `decision`: the plan that asked
    for it; None: a training did, or work for which there was no block."""

    block: int
    old: Role | None
    new: Role | None
    begun_s: float
    decision: int | None = None
    ended_s: float | None = None
    down_s: Phases = field(default_factory=dict)
    up_s: Phases = field(default_factory=dict)
    num_aborted: int = 0
    asleep_bytes: int = 0
    awake_bytes: int = 0
    failure: str = ""

    @property
    def is_shift(self) -> bool:
        """Between two roles; else the block was taken up from nothing."""
        return self.old is not None and self.new is not None and self.old is not self.new

    def line(self) -> dict[str, Any]:
        return {
            "block": self.block,
            "old": self.old,
            "new": self.new,
            "decision": self.decision,
            "begun": self.begun_s,
            "took_s": None if self.ended_s is None else self.ended_s - self.begun_s,
            "down_s": self.down_s,
            "up_s": self.up_s,
            "aborted": self.num_aborted,
            "asleep_bytes": self.asleep_bytes,
            "awake_bytes": self.awake_bytes,
            "failure": self.failure,
        }


class Shifts:
    """`block_of` tells on which block a worker lives."""

    def __init__(self) -> None:
        self._open: dict[int, Shift] = {}
        self._ordered: dict[str, float] = {}
        self._ended: list[Shift] = []

    def ended(self) -> list[Shift]:
        """Those that have ended since this was asked last."""
        found, self._ended = self._ended, []
        return found

    def take(self, reports: Iterable[Report], decision: int | None, planned: Iterable[int]) -> None:
        """What is told of blocks. `planned`: those that the plan of this number moves."""
        for report in reports:
            match report:
                case ShiftBegun():
                    self._begin(report, decision if report.block in planned else None)
                case ShiftEnded():
                    self._end(report.block, report.at_s)
                case BlockLost():
                    self._end(report.block, None, "lost")
                case BlockBound() if report.role is not None:
                    self._end(report.block, report.at_s)

    def _begin(self, report: ShiftBegun, decision: int | None) -> None:
        before = self._open.get(report.block)
        if before is not None:  # its old role sleeps already, or something else is wanted of it meanwhile
            before.new, before.decision = report.new, before.decision if decision is None else decision
            return
        begun = Shift(block=report.block, old=report.old, new=report.new, begun_s=report.at_s, decision=decision)
        self._open[report.block] = begun

    def order(
        self, decisions: Iterable[Decision], workers: dict[str, Worker], blocks: dict[str, int], now: float
    ) -> None:
        for decision in decisions:
            if not isinstance(decision, ShiftDown | ShiftUp):
                continue
            self._ordered[decision.worker] = now
            block = blocks.get(decision.worker)
            if isinstance(decision, ShiftDown) and block is not None and block not in self._open:
                role = workers[decision.worker].role
                self._open[block] = Shift(block=block, old=role, new=None, begun_s=now)

    def heard(self, message: Slept | Woken | WakeFailed, block: int | None, now: float) -> None:
        ordered = self._ordered.pop(message.worker, None)
        shift = self._open.get(block) if block is not None else None
        if shift is None:
            return
        took_s = {} if ordered is None else {"all": now - ordered}
        match message:
            case Slept():
                _merge(shift.down_s, message.seconds | took_s)
                shift.num_aborted += message.num_aborted
                shift.asleep_bytes += message.held_bytes
            case Woken():
                _merge(shift.up_s, message.seconds | took_s)
                shift.awake_bytes += message.held_bytes
            case WakeFailed():
                shift.failure = message.reason

    def _end(self, block: int, at_s: float | None, failure: str = "") -> None:
        shift = self._open.pop(block, None)
        if shift is not None:
            shift.ended_s, shift.failure = at_s, shift.failure or failure
            self._ended.append(shift)


def _merge(phases: Phases, seconds: Phases) -> None:
    """Workers of a block do it side by side."""
    for phase, value in seconds.items():
        phases[phase] = max(value, phases.get(phase, 0.0))


def figures(shifts: Iterable[Shift]) -> dict[str, float]:
    """Of those that ended between two roles, by the names of metrics."""
    done = [s for s in shifts if s.is_shift and s.ended_s is not None]
    found = {
        "shift/num": float(len(done)),
        "shift/num_rollout_reward": float(sum(Role.TRAIN not in (s.old, s.new) for s in done)),
        "shift/num_train": float(sum(Role.TRAIN in (s.old, s.new) for s in done)),
        "shift/aborted": float(sum(s.num_aborted for s in done)),
    }
    for name, parts in (("shift/down_s", [s.down_s for s in done]), ("shift/up_s", [s.up_s for s in done])):
        seconds = [phases["all"] for phases in parts if "all" in phases]
        if seconds:
            found[name] = sum(seconds) / len(seconds)
    return found
