"""What a monitor is told of a simulation: the reports that live workers and a controller would send.

Looking changes nothing: a simulation that is observed goes as one that is not, byte for byte.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pipeline.core.events import INFERENCE, Role
from pipeline.core.length_model import Ages
from pipeline.core.monitor import Monitor
from pipeline.core.reports import (
    BlockBound,
    BlockHeard,
    BlockLost,
    QueueReport,
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
from pipeline.core.snapshot import Snapshot
from pipeline.simulator.engine import Replica
from pipeline.simulator.lengths import Array
from pipeline.simulator.simulation import Simulation


@dataclass(slots=True)
class _Counts:
    """What a replica had done in all."""

    stepped: float = 0.0
    decode_s: float = 0.0
    num_tokens: float = 0.0
    read_tokens: float = 0.0
    num_prefilled: float = 0.0
    prefill_s: float = 0.0
    num_started: int = 0
    started_tokens: float = 0.0
    started_prefill_tokens: float = 0.0


class Observer:
    """Tells a monitor what happened in one simulation since it looked last."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor = monitor
        self._bins = {
            role: (view.bin_tokens, len(view.survival) - 1)
            for role in INFERENCE
            for view in [monitor.believed.role(role)]
        }
        self._counts: dict[int, _Counts] = {}
        self._num_shifts = 0
        self._roles: dict[int, Role | None] = {}
        self._ready_at: dict[int, float] = {}  # of shifts in flight
        self._lost: set[int] = set()
        self._train_blocks: tuple[int, ...] = monitor.believed.train.block_indices
        self._num_admitted = self._version = 0
        self._called: tuple[int, float | None] | None = None  # the training that was told of, and its start

    def observe(self, sim: Simulation) -> None:
        self.monitor.feed(*self._placement(sim), *self._steps(sim), *self._ended(sim))
        self.monitor.feed(*self._queues(sim), *self._replicas(sim))

    def snapshot(self, sim: Simulation) -> Snapshot:
        self.observe(sim)
        return self.monitor.snapshot(sim.now)

    # --- blocks

    def _placement(self, sim: Simulation) -> Iterable[Report]:
        for shift in sim.usage.shifts[self._num_shifts :]:
            yield from self._arrive(shift.block, shift.at_s)
            yield ShiftBegun(at_s=shift.at_s, block=shift.block, old=shift.old, new=shift.new)
            self._roles[shift.block] = shift.new
            self._ready_at[shift.block] = shift.at_s + shift.seconds
        self._num_shifts = len(sim.usage.shifts)
        for block in sim.blocks:
            index = block.index
            if block.is_lost:
                if index not in self._lost:
                    self._lost.add(index)
                    self._ready_at.pop(index, None)
                    yield BlockLost(at_s=sim.now, block=index)
                continue
            if index in self._lost:
                self._lost.discard(index)
                if block.role is not None:
                    yield ShiftBegun(at_s=sim.now, block=index, old=None, new=block.role)
                    self._ready_at[index] = block.ready_at
            elif self._roles.get(index) is not block.role:
                yield BlockBound(at_s=sim.now, block=index, role=block.role)
            self._roles[index] = block.role
            yield from self._arrive(index, sim.now)
            if not block.replicas:
                yield BlockHeard(at_s=sim.now, block=index)
        train_blocks = tuple(block.index for block in sim.train_blocks)
        if train_blocks != self._train_blocks:
            self._train_blocks = train_blocks
            yield TrainBlocksChosen(at_s=sim.now, block_indices=train_blocks)

    def _arrive(self, block: int, now: float) -> Iterable[Report]:
        if self._ready_at.get(block, math.inf) <= now:
            yield ShiftEnded(at_s=self._ready_at.pop(block), block=block)

    # --- steps and training

    def _steps(self, sim: Simulation) -> Iterable[Report]:
        for step in sim.steps[self._num_admitted :]:
            yield StepAdmitted(at_s=step.admitted_s, step=step.step)
        self._num_admitted = len(sim.steps)
        for step in sim.steps[self._version : sim.version]:
            assert step.train_started_s is not None and step.trained_s is not None
            yield from self._call(step.step, step.train_started_s, step.train_started_s)
            yield TrainingEnded(at_s=step.trained_s, step=step.step)
            yield VersionPublished(at_s=step.trained_s, version=step.step + 1)
        self._version = sim.version
        if sim.training is not None:
            begun = sim.steps[sim.training].train_started_s if sim.train_end_s is not None else None
            yield from self._call(sim.training, begun, sim.now)
        for step in sim.steps[sim.version :]:
            yield StepProgress(
                at_s=sim.now, step=step.step, num_rolled_out=step.num_rolled_out, num_scored=step.num_scored
            )

    def _call(self, step: int, begun_s: float | None, at_s: float) -> Iterable[Report]:
        if self._called == (step, begun_s):
            return
        self._called = (step, begun_s)
        if begun_s is None:
            yield TrainingCalled(at_s=at_s, step=step)
        else:
            yield TrainingBegun(at_s=begun_s, step=step)

    # --- sequences

    def _ended(self, sim: Simulation) -> Iterable[Report]:
        found: dict[tuple[Role, int], list[float]] = {}
        for role, step, length in sim.finishes or ():
            found.setdefault((role, step), []).append(length)
        sim.finishes = []
        for (role, step), lengths in found.items():
            yield SequencesEnded(at_s=sim.now, role=role, step=step, lengths=tuple(lengths))

    def _queues(self, sim: Simulation) -> Iterable[Report]:
        for role in INFERENCE:
            waiting = [(entry[-1].step, entry[-1].generated) for entry in sim.queues[role].heap]
            fresh: dict[int, int] = {}
            for step, age in waiting:
                if not age:
                    fresh[step] = fresh.get(step, 0) + 1
            if role is Role.REWARD:
                for sequence in sim.held_back:
                    fresh[sequence.step] = fresh.get(sequence.step, 0) + 1
            aborted = [entry for entry in waiting if entry[1]]
            steps, ages = [step for step, _ in aborted], [age for _, age in aborted]
            counts = self._count(role, np.zeros(len(steps), dtype=int), steps, np.asarray(ages), 1)
            yield QueueReport(at_s=sim.now, role=role, num_fresh=fresh, ages=counts[0])

    def _replicas(self, sim: Simulation) -> Iterable[Report]:
        seen: dict[int, _Counts] = {}
        for role, replicas in sim.replicas.items():
            running = [entry[2] for replica in replicas for entry in replica.running]
            now = [_progress(replica, sim.now) for replica in replicas]
            lengths = [s.num_response if role is Role.ROLLOUT else s.num_verdict for s in running]
            nums = [len(replica.running) for replica in replicas]
            left = np.array([s.finish_at for s in running]) - np.repeat([counts.stepped for counts in now], nums)
            ages = np.array(lengths) - left
            rows = np.repeat(np.arange(len(replicas)), nums)
            by_replica = self._count(role, rows, [s.step for s in running], ages, len(replicas))
            for replica, counts, by_step in zip(replicas, now, by_replica, strict=True):
                seen[replica.index] = counts
                before = self._counts.get(replica.index) or _Counts()
                yield _report(replica, sim.now, counts, before, by_step)
        self._counts = seen

    def _count(self, role: Role, rows: Array, steps: list[int], ages: Array, num: int) -> list[dict[int, Ages]]:
        """As `count_ages` does, for all rows at once: of each the counts by step."""
        if not steps:
            return [{} for _ in range(num)]
        width, num_bins = self._bins[role]
        first, last = min(steps), max(steps)
        at = np.clip(ages / width, 0.0, num_bins - 1.0)
        lower = np.minimum(at.astype(int), max(0, num_bins - 2))
        share = at - lower
        num_steps = last - first + 1
        key = (rows * num_steps + np.array(steps) - first) * num_bins + lower
        size = num * num_steps * num_bins
        counts = np.bincount(key, 1 - share, size)
        if num_bins > 1:
            counts += np.bincount(key + 1, share, size)
        table = counts.reshape(num, num_steps, num_bins)
        found: list[dict[int, Ages]] = [{} for _ in range(num)]
        for row, i in np.argwhere(table.any(axis=2)).tolist():
            found[row][first + i] = tuple(table[row, i].tolist())
        return found


def _progress(replica: Replica, now: float) -> _Counts:
    """What `Replica.advance` would come to."""
    counts = _Counts(
        stepped=replica.stepped,
        decode_s=replica.decode_s,
        num_tokens=replica.num_tokens,
        read_tokens=replica.read_tokens,
        num_prefilled=replica.num_prefilled,
        prefill_s=replica.prefill_s,
        num_started=replica.num_started,
        started_tokens=replica.started_tokens,
        started_prefill_tokens=replica.started_prefill_tokens,
    )
    start, batch = max(replica.at, replica.prefilled_at), len(replica.running)
    if now > start and batch:
        num = replica.cost.num_iterations(now - start, batch, replica.context)
        if math.isfinite(num):
            counts.stepped += num
            counts.num_tokens += batch * num
            counts.read_tokens += num * (replica.context + batch * num / 2)
        counts.decode_s += now - start
    return counts


def _report(replica: Replica, now: float, counts: _Counts, before: _Counts, ages: dict[int, Ages]) -> ReplicaReport:
    num = counts.stepped - before.stepped
    return ReplicaReport(
        at_s=now,
        replica=replica.index,
        block=replica.block,
        role=replica.role,
        num_running=len(replica.running),
        ages=ages,
        kv_tokens=replica.held + counts.num_tokens - replica.num_tokens,
        num_iterations=num,
        decode_s=counts.decode_s - before.decode_s,
        batch=(counts.num_tokens - before.num_tokens) / num if num else 0.0,
        context=(counts.read_tokens - before.read_tokens) / num if num else 0.0,
        prefill_tokens=counts.num_prefilled - before.num_prefilled,
        prefill_s=counts.prefill_s - before.prefill_s,
        num_started=counts.num_started - before.num_started,
        started_tokens=counts.started_tokens - before.started_tokens,
        started_prefill_tokens=counts.started_prefill_tokens - before.started_prefill_tokens,
    )
