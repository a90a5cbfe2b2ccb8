"""A run's journal, taken again by a core and told to a monitor: what the planner would see of the run.

Steps of a run count from 1, those of a monitor from 0. Training lasts until its version is sealed. Of a verdict that is
being written the journal does not tell how far it is: it counts as just begun. Which replica runs what is not told
either: each is taken to have its share.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from pipeline.core import events as ev
from pipeline.core.core import Core
from pipeline.core.events import INFERENCE, Role
from pipeline.core.length_model import Ages, count_ages
from pipeline.core.monitor import Monitor
from pipeline.core.reports import (
    BlockBound,
    BlockHeard,
    QueueReport,
    ReplicaReport,
    Report,
    SequencesEnded,
    StepAdmitted,
    StepProgress,
    TrainingBegun,
    TrainingEnded,
    VersionPublished,
)
from pipeline.core.sequences import RUNNING, WAITING, Sequence
from pipeline.core.snapshot import Snapshot
from pipeline.simulator.priors import monitor_of
from pipeline.simulator.setup import Setup
from pipeline.simulator.simulation import NUM_AHEAD


class Replay:
    """Of one attempt. `gpus`: of each role, which fill blocks in the order rollout, reward, train."""

    def __init__(self, core: Core, believed: Setup, gpus: dict[Role, int]) -> None:
        """Raises ValueError where a role's GPUs do not fill blocks."""
        size = believed.block
        if any(num % size for num in gpus.values()):
            parts = ", ".join(f"{num} for {role.value}" for role, num in gpus.items())
            raise ValueError(f"GPUs would change hands {size} at a time, and the run's do not divide so: {parts}")
        order = [role for role in Role for _ in range(gpus[role] // size)]
        self._core, self._setup = core, believed
        self._blocks = {role: [i for i, of in enumerate(order) if of is role] for role in Role}
        first = monitor_of(
            believed,
            train_blocks=self._blocks[Role.TRAIN],
            staleness=core.plan.staleness,
            num_steps=core.plan.total_steps - NUM_AHEAD,
        ).believed
        self._first = first
        self.monitor = Monitor(first)
        self.version = 0
        self.num_closed: Counter[int] = Counter()
        """Responses that were finished, by step of the run."""

    def take(self, at: float, event: ev.Event) -> None:
        if isinstance(event, ev.RunRestored):
            self.version = event.version
            self.monitor = Monitor(replace(self._first, at_s=at, version=event.version, num_admitted=event.version))
            self.monitor.feed(
                *(BlockBound(at_s=at, block=i, role=role) for role, found in self._blocks.items() for i in found)
            )
        self._core.handle(event, at)
        self.monitor.feed(*self._reports(at, event))

    def snapshot(self, at: float) -> Snapshot:
        open_steps = {step: self._core.sequences.of_step(step) for step in self._core.steps if step > self.version}
        everything = [sequence for sequences in open_steps.values() for sequence in sequences]
        self.monitor.feed(*(BlockHeard(at_s=at, block=i) for found in self._blocks.values() for i in found))
        for step, sequences in open_steps.items():
            left = Counter(sequence.place.role for sequence in sequences)
            rolled = len(sequences) - left[Role.ROLLOUT]
            self.monitor.feed(
                StepProgress(at_s=at, step=step - 1, num_rolled_out=rolled, num_scored=rolled - left[Role.REWARD])
            )
        for role in INFERENCE:
            waiting = [s for s in everything if s.place == WAITING[role]]
            running = [s for s in everything if s.place == RUNNING[role]]
            self.monitor.feed(self._queue(at, role, waiting), *self._replicas(at, role, running))
        return self.monitor.snapshot(at)

    def _reports(self, at: float, event: ev.Event) -> Iterable[Report]:
        match event:
            case ev.RunRestored():
                yield from (StepAdmitted(at_s=at, step=step.step - 1) for step in event.steps)
            case ev.SequenceAdmitted():
                yield StepAdmitted(at_s=at, step=event.step - 1)
            case ev.SegmentClosed():
                for segment in event.segments:
                    if segment.finish in (ev.Finish.STOP, ev.Finish.LENGTH) and segment.id in self._core.sequences:
                        sequence = self._core.sequences[segment.id]
                        self.num_closed[sequence.step] += 1
                        lengths = (float(sequence.num_tokens),)
                        yield SequencesEnded(at_s=at, role=Role.ROLLOUT, step=sequence.step - 1, lengths=lengths)
            case ev.TaskStarted() if event.task.startswith("train-"):
                yield TrainingBegun(at_s=at, step=int(event.task.split("-")[1]) - 1)
            case ev.VersionSealed() if event.version > self.version:
                self.version = event.version
                yield TrainingEnded(at_s=at, step=event.version - 1)
                yield VersionPublished(at_s=at, version=event.version)

    def _queue(self, at: float, role: Role, waiting: list[Sequence]) -> QueueReport:
        fresh = [s for s in waiting if role is Role.REWARD or not s.num_tokens]
        aborted = [s for s in waiting if role is Role.ROLLOUT and s.num_tokens]
        return QueueReport(
            at_s=at, role=role, num_fresh=Counter(s.step - 1 for s in fresh), ages=self._ages(role, aborted)
        )

    def _replicas(self, at: float, role: Role, running: list[Sequence]) -> Iterable[ReplicaReport]:
        view = self._first.role(role)
        each = self._first.block_slots // view.num_slots
        places = [(block, block * each + i) for block in self._blocks[role] for i in range(each)]
        for k, (block, replica) in enumerate(places):
            mine = running[k :: len(places)]
            yield ReplicaReport(
                at_s=at,
                replica=replica,
                block=block,
                role=role,
                num_running=len(mine),
                ages=self._ages(role, mine),
                kv_tokens=len(mine) * view.prompt_tokens + sum(_age(role, s) for s in mine),
            )

    def _ages(self, role: Role, sequences: list[Sequence]) -> dict[int, Ages]:
        view = self._first.role(role)
        steps = sorted({s.step for s in sequences})
        return {
            step - 1: count_ages(
                (_age(role, s) for s in sequences if s.step == step), view.bin_tokens, len(view.survival) - 1
            )
            for step in steps
        }


def _age(role: Role, sequence: Sequence) -> float:
    return float(sequence.num_tokens) if role is Role.ROLLOUT else 0.0
