"""What is known of a run: reports in, a picture for the planner out. No clock: time comes with the reports.

It starts from a snapshot of what is believed before anything was measured: placement and limits, which are facts, and
costs, lengths and times, each of which gives way to what is measured. Each believed figure counts as few measurements;
the reason for how many stands beside it: here, in `watched_role`, `throughput` and `length_model`.
"""

import math
from collections import defaultdict
from dataclasses import dataclass, replace

from pipeline.core.events import INFERENCE, Role
from pipeline.core.iteration import IterationCost
from pipeline.core.recent import RecentMean
from pipeline.core.reports import (
    BlockBound,
    BlockHeard,
    BlockKnown,
    BlockLost,
    CacheKnown,
    QueueReport,
    ReplicaEnded,
    ReplicaReport,
    Report,
    SequencesEnded,
    ShiftBegun,
    ShiftEnded,
    StepAdmitted,
    StepProgress,
    TrainBlocksChosen,
    TrainingBegun,
    TrainingCalled,
    TrainingEnded,
    VersionPublished,
)
from pipeline.core.snapshot import BlockView, Snapshot, TrainView
from pipeline.core.watched_role import WatchedRole

SILENT_S = 5.0
"""Five reports that did not come: as long as a node may be silent (limits.heartbeat_s)."""
_BELIEVED_TRAININGS, _MEMORY_TRAININGS = 0.3, 3.0
"""A training is believed to 10 %, and one measured differs from the next by 6 %, as its tokens do: (6 / 10)^2. The
memory is that of lengths, which trainings follow."""
_BELIEVED_SHIFTS, _MEMORY_SHIFTS = 1.0, 8.0
"""The blocks of one or two shifts."""
_OVERDUE = 0.1, 0.02
"""Shares of the expected time that a shift, and a training, is still taken to need when it should be over."""


@dataclass(slots=True, kw_only=True)
class _Place:
    """A block, as it is now."""

    view: BlockView
    heard_s: float
    begun_s: float | None = None
    """Of the shift in flight."""
    old: Role | None = None
    is_lost: bool = False
    since_s: float = -math.inf
    """When it last changed hands."""


class Monitor:
    def __init__(self, believed: Snapshot, *, silent_s: float = SILENT_S) -> None:
        self.believed, self._silent_s = believed, silent_s
        self._version, self._num_admitted = believed.version, believed.num_admitted
        self._places = {view.index: _Place(view=view, heard_s=believed.at_s) for view in believed.blocks}
        self._roles = {
            role: WatchedRole(believed.role(role), believed.at_s, believed.num_sequences) for role in INFERENCE
        }
        self._progress: dict[int, StepProgress] = {}
        self._train_blocks = believed.train.block_indices
        self._train_s = RecentMean(believed.train.step_s, weight=_BELIEVED_TRAININGS, memory=_MEMORY_TRAININGS)
        self._training: Report | None = None
        self._shift_s = {
            role: RecentMean(seconds, weight=_BELIEVED_SHIFTS, memory=_MEMORY_SHIFTS)
            for role, seconds in believed.shift_s.items()
        }
        self._release_s = RecentMean(believed.release_s, weight=_BELIEVED_SHIFTS, memory=_MEMORY_SHIFTS)
        self._last_shift_s = believed.last_shift_s
        self._published: list[float] = []  # the last three times
        self._cycle_s = believed.cycle_s

    def feed(self, *reports: Report) -> None:
        for report in reports:
            self._take(report)

    def snapshot(self, now: float) -> Snapshot:
        held: defaultdict[int, list[ReplicaReport]] = defaultdict(list)
        for state in self._roles.values():
            for report in state.replicas.values():
                held[report.block].append(report)
        blocks = tuple(self._block(place, held[index], now) for index, place in self._places.items())
        steps = [step for step in range(self._version, self._num_admitted) if not self._is_scored(step)]
        return replace(
            self.believed,
            at_s=now,
            version=self._version,
            num_admitted=self._num_admitted,
            blocks=blocks,
            rollout=self._roles[Role.ROLLOUT].view(steps),
            reward=self._roles[Role.REWARD].view(steps),
            train=self._train(blocks, now),
            shift_s={role: mean.value for role, mean in self._shift_s.items()},
            release_s=max(0.0, self._release_s.value),
            last_shift_s=self._last_shift_s,
            cycle_s=self._cycle_s,
        )

    def figures(self, now: float) -> dict[str, float]:
        """What people look at and the planner does not need, by the names of metrics."""
        found = {"role/train/expected_s": self._train_s.value, "planner/cycle_s": self._cycle_s}
        for role, state in self._roles.items():
            num = len(state.replicas)
            held = sum(report.kv_tokens for report in state.replicas.values())
            found |= {
                f"role/{role.value}/running": state.num_running,
                f"role/{role.value}/waiting": state.num_waiting,
                f"role/{role.value}/tokens_per_s": state.tokens.per_s(now),
                f"role/{role.value}/arrivals_per_s": state.came.per_s(now),
                f"role/{role.value}/finishes_per_s": state.ended.per_s(now),
                f"role/{role.value}/kv_use": held / (num * state.believed.kv_tokens) if num else 0.0,
                f"role/{role.value}/slowness": state.throughput.slowness,
            }
        return found

    def cost(self, role: Role) -> IterationCost:
        """As measured."""
        return self._roles[role].throughput.cost

    def rest_tokens(self, role: Role) -> float:
        """What one that runs has before it, on average."""
        return self._roles[role].rest_tokens

    @property
    def cycle_s(self) -> float:
        return self._cycle_s

    def lengths(self, role: Role) -> tuple[float, ...]:
        """Histogram of generated lengths, in the role's bins."""
        return self._roles[role].lengths.histogram()

    def iteration_table(self, role: Role) -> dict[tuple[int, int], float]:
        """Measured seconds of an iteration by batch and context (lower ends of powers of two)."""
        return self._roles[role].throughput.table()

    def _take(self, report: Report) -> None:
        match report:
            case ReplicaReport():
                self._take_replica(report)
            case ReplicaEnded():
                self._roles[report.role].replicas.pop(report.replica, None)
            case BlockHeard():
                self._hear(report.block, report.at_s)
            case QueueReport():
                self._roles[report.role].queue = report
            case SequencesEnded():
                self._end(report)
            case StepAdmitted():
                self._num_admitted = max(self._num_admitted, report.step + 1)
                self._roles[Role.ROLLOUT].came.add(report.at_s, self.believed.num_sequences)
            case StepProgress():
                if report.step >= self._version:
                    self._progress[report.step] = report
            case BlockKnown():
                view = BlockView(index=report.block, node=report.node, role=None)
                self._places.setdefault(report.block, _Place(view=view, heard_s=report.at_s))
            case BlockBound() | ShiftBegun() | ShiftEnded() | BlockLost():
                self._place(report)
            case CacheKnown():
                state = self._roles[report.role]
                state.believed = replace(state.believed, kv_tokens=report.kv_tokens)
            case TrainBlocksChosen():
                self._choose_train_blocks(report.block_indices)
            case TrainingCalled() | TrainingBegun():
                self._training = report
            case TrainingEnded():
                if isinstance(self._training, TrainingBegun):
                    self._train_s.add(report.at_s - self._training.at_s)
                self._training = None
            case VersionPublished():
                self._publish(report)

    def _take_replica(self, report: ReplicaReport) -> None:
        """One that is older than a shift of its block says what was measured, and nothing of what runs."""
        place, state = self._places[report.block], self._roles[report.role]
        state.measure(report)
        if place.view.role is report.role and report.at_s >= place.since_s:
            state.replicas[report.replica] = report
            self._hear(report.block, report.at_s)

    def _choose_train_blocks(self, indices: tuple[int, ...]) -> None:
        """Another number of blocks trains in inverse proportion, until it is measured."""
        if indices and self._train_blocks and len(indices) != len(self._train_blocks):
            step_s = self._train_s.value * len(self._train_blocks) / len(indices)
            self._train_s = RecentMean(step_s, weight=_BELIEVED_TRAININGS, memory=_MEMORY_TRAININGS)
        self._train_blocks = indices

    def _end(self, report: SequencesEnded) -> None:
        state, num = self._roles[report.role], len(report.lengths) + report.num_unknown
        state.lengths.end(report.step, report.lengths)
        state.ended.add(report.at_s, num)
        if report.role is Role.ROLLOUT:
            self._roles[Role.REWARD].came.add(report.at_s, num)

    def _publish(self, report: VersionPublished) -> None:
        if report.version <= self._version:
            self._published = []
            self._version = report.version
            return
        self._version = report.version
        self._published = [*self._published, report.at_s][-3:]
        if len(self._published) > 1:
            self._cycle_s = (self._published[-1] - self._published[0]) / (len(self._published) - 1)
        self._progress = {step: p for step, p in self._progress.items() if step >= self._version}
        for state in self._roles.values():
            state.lengths.close(self._version)

    def _place(self, report: BlockBound | ShiftBegun | ShiftEnded | BlockLost) -> None:
        place = self._places[report.block]
        self._hear(report.block, report.at_s)
        if isinstance(report, ShiftEnded):
            if place.begun_s is not None and place.view.role is not None:
                self._measure_shift(place, place.view.role, report.at_s - place.begun_s)
            place.begun_s = None
            return
        for state in self._roles.values():
            state.empty(report.block)
        place.begun_s, place.since_s = None, report.at_s
        match report:
            case BlockLost():
                place.is_lost = True
            case BlockBound():
                place.view = replace(place.view, role=report.role)
            case ShiftBegun():
                place.view = replace(place.view, role=report.new)
                place.begun_s, place.old = report.at_s, report.old
                if report.new in INFERENCE and report.old in INFERENCE and report.new is not report.old:
                    self._last_shift_s = report.at_s

    def _hear(self, block: int, at_s: float) -> None:
        place = self._places[block]
        place.heard_s = max(place.heard_s, at_s)
        place.is_lost = False

    def _measure_shift(self, place: _Place, new: Role, seconds: float) -> None:
        if place.old is Role.TRAIN:
            self._release_s.add(seconds - self._shift_s[new].value)
        elif place.old is not None:
            self._shift_s[new].add(seconds)

    def _block(self, place: _Place, held: list[ReplicaReport], now: float) -> BlockView:
        return replace(
            place.view,
            ready_in_s=self._ready_in_s(place, now),
            num_running=sum(r.num_running for r in held),
            num_tokens=sum(r.kv_tokens for r in held),
            is_silent=place.is_lost or now - place.heard_s > self._silent_s,
        )

    def _ready_in_s(self, place: _Place, now: float) -> float:
        if place.begun_s is None or place.view.role is None:
            return 0.0
        expected = self._shift_s[place.view.role].value
        if place.old is Role.TRAIN:
            expected += max(0.0, self._release_s.value)
        return _left(expected, now - place.begun_s, _OVERDUE[0])

    def _train(self, blocks: tuple[BlockView, ...], now: float) -> TrainView:
        step_s, left_s = self._train_s.value, None
        if isinstance(self._training, TrainingBegun):
            left_s = _left(step_s, now - self._training.at_s, _OVERDUE[1])
        elif self._training:
            left_s = step_s + max((b.ready_in_s for b in blocks if b.index in self._train_blocks), default=0.0)
        is_waiting = self._training is None and self._version < self._num_admitted and self._is_scored(self._version)
        return TrainView(block_indices=self._train_blocks, step_s=step_s, is_waiting=is_waiting, left_s=left_s)

    def _is_scored(self, step: int) -> bool:
        progress = self._progress.get(step)
        return progress is not None and progress.num_scored >= self.believed.num_sequences


def _left(expected: float, elapsed: float, overdue: float) -> float:
    return max(expected - elapsed, overdue * expected)
