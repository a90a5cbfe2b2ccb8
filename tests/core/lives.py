"""The three lives as the tables tell them, lived beside a core: what it may do, and what it must not.

`Lives.take` follows each event and each decision through the tables of sequences.py, versions.py and fleet.py, with a
rule of ownership of its own, and requires that the core is in the same place. It counts each (state, change): those
taken, and those refused.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core import sequences, versions
from pipeline.core.core import Core
from pipeline.core.events import Role
from pipeline.core.sequences import Place, SequenceChange
from pipeline.core.versions import VersionChange, VersionState
from pipeline.core.worker import WorkerChange, WorkerState
from tests.core.tables import LIVES, Hits

_ROLE_OF = {"rollout": Role.ROLLOUT, "reward": Role.REWARD, "prompts": Role.ROLLOUT, "evaluate": Role.ROLLOUT}
_THERE = set(WorkerState) - {WorkerState.PLANNED, WorkerState.STARTING, WorkerState.FENCED, WorkerState.DEAD}
_LOSSES = (ev.NodeLost, ev.TimerFired)
_REASONS: Mapping[VersionChange, tuple[type, ...]] = {
    VersionChange.WRITTEN: (ev.TaskEnded,),
    VersionChange.LOST: _LOSSES,
    VersionChange.SEALED: (ev.VersionSealed, *_LOSSES),  # the last node that had not sealed it is lost
    VersionChange.SUPERSEDED: (ev.VersionSealed, *_LOSSES),
}


@dataclass(slots=True)
class _Seq:
    step: int
    place: Place
    task: str = ""
    turn: int = 0
    num_tokens: int = 0
    num_segments: int = 0


@dataclass(slots=True)
class _Task:
    stage: str
    step: int
    worker: str
    is_ending: bool = False


class Lives:
    def __init__(self, hits: Hits) -> None:
        self.hits = hits
        self.sequences: dict[str, _Seq] = {}
        self.versions: dict[int, VersionState] = {}
        self.workers: dict[str, WorkerState] = {}
        self.asked: dict[str, int] = {}
        self.tasks: dict[str, _Task] = {}
        self.bindings: dict[str, tuple[str, tuple[int, ...]]] = {}
        self.shared: set[str] = set()
        """Those that live on slots with others."""
        self.nodes: set[str] = set()
        """Those that joined, cold or warm."""
        self.lost: set[str] = set()
        self.given_up: set[str] = set()
        self.ending: set[str] = set()
        self.yielding: set[str] = set()
        """Replicas that are killed because others need their slots."""
        self.copies: dict[str, de.CopyVersion] = {}
        self.seals: dict[str, int] = {}
        self.strays: dict[str, tuple[ev.Stray, ...]] = {}
        self.are_all_there = False

    @property
    def timers(self) -> set[str]:
        """What has a limit now: each task, each worker that is not ready, each copy and each seal, each lost node, and
        the first coming of all nodes. A task of a fenced worker has none of its own any more."""
        resting = (WorkerState.READY, WorkerState.ASLEEP, WorkerState.DEAD)
        waiting = {f"task:{i}" for i, t in self.tasks.items() if self.workers[t.worker] is not WorkerState.FENCED}
        waiting.update(f"worker:{name}" for name, state in self.workers.items() if state not in resting)
        waiting.update(f"copy:{node}" for node in self.copies)
        waiting.update(f"seal:{node}" for node in self.seals)
        waiting.update(f"stray:{node}" for node in self.strays)
        waiting.update(f"node:{node}" for node in self.lost | self.ending)
        return waiting if self.are_all_there else waiting | {"nodes"}

    def take(self, core: Core, event: ev.Event, decisions: list[de.Decision]) -> None:
        self._event(event)
        self._follow_versions(core, event)
        for worker in [w for w in self.workers if w not in core.fleet.workers]:
            self.bindings.pop(worker, None)
            assert self.workers.pop(worker) in (WorkerState.DEAD, WorkerState.PLANNED), worker
        for decision in decisions:
            self._decision(decision)
        if isinstance(event, ev.NodeLost | ev.TimerFired):
            self.given_up |= {n for n in core.crew.given_up if n not in self.nodes}
        self.are_all_there |= len(self.nodes) == core.plan.num_nodes - len(self.given_up)
        if core.ended is None:
            self._compare(core)

    # --- events ----------------------------------------------------------------------------------------------------

    def _event(self, event: ev.Event) -> None:
        match event:
            case ev.SegmentClosed():
                for segment in event.segments:
                    self._segment(event.task, segment)
            case ev.VerdictGiven():
                for verdict in event.verdicts:
                    if self._owns(event.task, verdict.id, SequenceChange.JUDGED):
                        self._move(verdict.id, SequenceChange.JUDGED)
            case ev.TaskEnded():
                self._task_ended(event)
            case ev.SequenceAdmitted():
                if any(t.stage == "prompts" and t.step == event.step for t in self.tasks.values()):
                    for seq_id in event.ids:
                        self.sequences.setdefault(seq_id, _Seq(event.step, sequences.WAITING[Role.ROLLOUT]))
            case ev.WorkerReady():
                state = self.workers.get(event.worker)
                if event.is_asleep and state is WorkerState.STARTING:
                    self._worker(event.worker, WorkerChange.SLEPT)
                elif not event.is_asleep and (event.worker not in self.shared or state is not WorkerState.STARTING):
                    self._worker(event.worker, WorkerChange.REPORTED)
            case ev.WorkerSlept():
                if self.workers.get(event.worker) is not WorkerState.STARTING:
                    self._worker(event.worker, WorkerChange.SLEPT)
            case ev.WorkerWoken():
                if self.asked.get(event.worker) == event.version:
                    self._worker(event.worker, WorkerChange.WOKEN)
            case ev.WakeFailed():
                if self.workers.get(event.worker) is not WorkerState.LOADING:
                    self._worker(event.worker, WorkerChange.REFUSED)
            case ev.VersionLoaded():
                if self._was_asked(event, WorkerChange.LOADED):
                    self._worker(event.worker, WorkerChange.LOADED)
            case ev.UpdateFailed():
                if self.workers.get(event.worker) is WorkerState.WAKING:
                    return
                if self._was_asked(event, WorkerChange.REFUSED):
                    self._worker(event.worker, WorkerChange.REFUSED)
            case ev.WorkerDied():
                if event.worker in self.yielding:
                    self.yielding.remove(event.worker)
                    del self.bindings[event.worker]
                if self._worker(event.worker, WorkerChange.DIED):
                    for task_id in [t for t, task in self.tasks.items() if task.worker == event.worker]:
                        self._release(task_id)
            case ev.NodeJoined():
                if not self.nodes:
                    self.versions = {event.version: VersionState.SEALED}
                self.nodes.add(event.node)
                self.lost.discard(event.node)
                self.given_up.discard(event.node)
            case ev.NodeLost():
                self._lose(event.node)
            case ev.StraysReported():
                self.strays.pop(event.node, None)
                if event.strays and event.node in self.nodes:
                    self.strays[event.node] = event.strays
            case ev.VersionCopied() | ev.CopyFailed():
                if event.node in self.copies and self.copies[event.node].number == event.number:
                    del self.copies[event.node]
            case ev.VersionSealed():
                if self.seals.get(event.node) == event.version:
                    del self.seals[event.node]
                else:
                    self.hits.refused["version"][(self._version_state(event.version), VersionChange.SEALED)] += 1
            case ev.BatchTrained():
                for seq_id, seq in self.sequences.items():
                    if seq.step == event.step:
                        self._move(seq_id, SequenceChange.TRAINED)
            case ev.StepRecorded():
                ended = [i for i, seq in self.sequences.items() if seq.step == event.step]
                for seq_id in ended:
                    assert self.sequences.pop(seq_id).place in (sequences.TRAINED, sequences.DROPPED)
            case ev.RunRestored():
                self._restore(event)

    def _lose(self, node: str) -> None:
        self.nodes.discard(node)
        self.lost.discard(node)
        self.ending.discard(node)
        self.copies = {n: c for n, c in self.copies.items() if node not in (n, c.source)}
        self.seals.pop(node, None)
        self.strays.pop(node, None)
        for worker, (place, _) in self.bindings.items():
            if place == node and (self.workers[worker], WorkerChange.DIED) in LIVES["worker"]:
                self._worker(worker, WorkerChange.DIED)
                for task_id in [t for t, task in self.tasks.items() if task.worker == worker]:
                    self._release(task_id)
        self.bindings = {worker: binding for worker, binding in self.bindings.items() if binding[0] != node}

    def _restore(self, event: ev.RunRestored) -> None:
        self.versions[event.version] = VersionState.SEALED
        for step in event.steps:
            for stored in step.sequences:
                place = sequences.RESTORED_TO[stored.state]
                self.hits.restored[stored.state] += 1
                self.sequences[stored.id] = _Seq(
                    step.step, place, num_tokens=stored.num_tokens, num_segments=stored.num_segments
                )

    def _segment(self, task: str, segment: ev.SegmentInfo) -> None:
        change = sequences.CHANGE_OF[segment.finish]
        if not self._owns(task, segment.id, change):
            return
        seq = self.sequences[segment.id]
        if segment.num_tokens and segment.idx < seq.num_segments:
            self.hits.refused["sequence"][(seq.place, change)] += 1
        elif self._move(segment.id, change) and segment.num_tokens:
            seq.num_tokens += segment.num_tokens
            seq.num_segments = segment.idx + 1

    def _task_ended(self, event: ev.TaskEnded) -> None:
        task = self.tasks.get(event.task)
        if task is None:
            return
        self._release(event.task)

    def _release(self, task_id: str) -> None:
        del self.tasks[task_id]
        for seq_id, seq in self.sequences.items():
            if seq.task == task_id:
                assert self._move(seq_id, SequenceChange.RELEASED)

    # --- decisions -------------------------------------------------------------------------------------------------

    def _decision(self, decision: de.Decision) -> None:
        match decision:
            case de.EndNode():
                self.ending.add(decision.node)
            case de.StartNode():
                if decision.node in self.nodes:  # a cold one: nobody is left who could warm it
                    self._lose(decision.node)
                self.lost.add(decision.node)
            case de.CopyVersion():
                assert decision.node in self.nodes and decision.source in self.nodes, decision
                assert decision.node not in self.copies and decision.node not in self.seals, decision
                assert all(copy.source != decision.source for copy in self.copies.values()), "one at a time"
                self.copies[decision.node] = decision
            case de.SealVersion():
                assert decision.node not in self.copies and decision.node not in self.seals, decision
                self.seals[decision.node] = decision.version
            case de.StartWorker():
                self._bind(decision)
                self.workers.setdefault(decision.worker, WorkerState.PLANNED)
                assert self._worker(decision.worker, WorkerChange.STARTED), decision
            case de.LoadVersion():
                assert self._worker(decision.worker, WorkerChange.ASKED), decision
                assert self.versions[decision.version] is VersionState.SEALED, decision
                self.asked[decision.worker] = decision.version
            case de.FenceReplica():
                if self.workers[decision.worker] is not WorkerState.FENCED:
                    assert decision.reason.startswith(("limit exceeded: ", "another rank", "its slots")), decision
                    assert self._worker(decision.worker, WorkerChange.EXPIRED), decision
                    if decision.reason.startswith("its slots"):
                        self.yielding.add(decision.worker)
            case de.ShiftDown():
                mine = [task for task in self.tasks.values() if task.worker == decision.worker]
                assert decision.worker in self.shared, decision
                assert {task.stage for task in mine} <= {"rollout", "reward", "prompts", "checkpoint"}, decision
                assert self._worker(decision.worker, WorkerChange.SENT_DOWN), decision
                for task in mine:
                    task.is_ending |= task.stage in ("rollout", "reward")
            case de.ShiftUp():
                assert self._worker(decision.worker, WorkerChange.CALLED), decision
                self.asked[decision.worker] = decision.version
            case de.StartTask():
                states = _THERE if decision.stage in ("prompts", "checkpoint") else (WorkerState.READY,)
                assert self.workers[decision.worker] in states, decision
                assert decision.worker.startswith(_ROLE_OF.get(decision.stage, Role.TRAIN)), decision
                self.tasks[decision.task] = _Task(decision.stage, decision.step, decision.worker)
            case de.EndTask():
                assert not self.tasks[decision.task].is_ending, decision
                self.tasks[decision.task].is_ending = True
            case de.Dispatch():
                task = self.tasks[decision.task]
                assert task.worker == decision.worker and not task.is_ending, decision
                for seq_id, turn in zip(decision.ids, decision.turns, strict=True):
                    seq = self.sequences[seq_id]
                    assert seq.place.role is _ROLE_OF[task.stage] and seq.step == task.step, decision
                    assert self._move(seq_id, SequenceChange.DISPATCHED), decision
                    assert turn == seq.turn + 1, decision
                    seq.task, seq.turn = decision.task, turn
            case de.CommitBatch():
                for seq_id in decision.ids:
                    assert self._move(seq_id, SequenceChange.BATCHED), decision
                for seq_id, reason in decision.dropped:
                    assert reason and self._move(seq_id, SequenceChange.DROPPED), decision

    def _bind(self, start: de.StartWorker) -> None:
        """A replica keeps its slots for as long as their node is there, and no slot is in two bindings."""
        binding = (start.node, start.slots)
        (self.shared.add if start.is_shared else self.shared.discard)(start.worker)
        assert self.bindings.setdefault(start.worker, binding) == binding, start
        assert start.node in self.nodes, start
        roles = Counter(
            (node, slot, worker.partition("-")[0] if worker in self.shared else "")
            for worker, (node, slots) in self.bindings.items()
            for slot in slots
        )
        assert max(roles.values()) == 1, self.bindings
        for stray in self.strays.get(start.node, ()):
            assert start.worker != stray.worker and not set(start.slots) & set(stray.slots), (start, stray)

    # --- the tables ------------------------------------------------------------------------------------------------

    def _owns(self, task: str, seq_id: str, change: SequenceChange) -> bool:
        seq = self.sequences.get(seq_id)
        if seq is None:
            return False
        if seq.task != task:
            self.hits.refused["sequence"][(seq.place, change)] += 1
            return False
        return True

    def _was_asked(self, event: ev.VersionLoaded | ev.UpdateFailed, change: WorkerChange) -> bool:
        if self.asked.get(event.worker) == event.version:
            return True
        if event.worker in self.workers:
            self.hits.refused["worker"][(self.workers[event.worker], change)] += 1
        return False

    def _move(self, seq_id: str, change: SequenceChange) -> bool:
        seq = self.sequences[seq_id]
        after = self._after("sequence", seq.place, change)
        if after is None:
            return False
        assert isinstance(after, Place)
        seq.place = after
        if after.state is not sequences.SequenceState.RUNNING:
            seq.task = ""
        return True

    def _worker(self, name: str, change: WorkerChange) -> bool:
        after = self._after("worker", self.workers[name], change) if name in self.workers else None
        if after is not None:
            assert isinstance(after, WorkerState)
            self.workers[name] = after
        return after is not None

    def _version_state(self, version: int) -> VersionState:
        newest = max((v for v, s in self.versions.items() if s is VersionState.SEALED), default=0)
        default = VersionState.RETIRED if version < newest else VersionState.UNWRITTEN
        return self.versions.get(version, default)

    def _version(self, version: int, change: VersionChange) -> bool:
        after = self._after("version", self._version_state(version), change)
        if after is not None:
            assert isinstance(after, VersionState)
            self.versions[version] = after
        return after is not None

    def _follow_versions(self, core: Core, event: ev.Event) -> None:
        """A version changes by its table, at most one step at a time, and for a reason."""
        for version in range(max(0, core.versions.current - 2), core.versions.current + 3):
            before, after = self._version_state(version), core.versions.state(version)
            if before is not after:
                legal = [c for (state, c), then in versions.LIFE.items() if state is before and then is after]
                assert legal and type(event) in _REASONS[legal[0]], (version, before, after, event)
                assert self._version(version, legal[0])

    def _after(self, life: str, state: object, change: object) -> object | None:
        after = LIVES[life].get((state, change))
        counts = self.hits.refused if after is None else self.hits.taken
        counts[life][(state, change)] += 1
        return after

    # --- the core --------------------------------------------------------------------------------------------------

    def _compare(self, core: Core) -> None:
        """Each sequence is in one place, the one that the tables say; each queue holds exactly those that wait."""
        waiting = dict.fromkeys(core.sequences.waiting, 0)
        num = 0
        for step in core.steps:
            for seq in core.sequences.of_step(step):
                mine = self.sequences[seq.id]
                assert seq.place is mine.place and seq.task == mine.task, (seq, mine)
                assert seq.turn == mine.turn and seq.num_tokens == mine.num_tokens, (seq, mine)
                num += 1
                if seq.place in waiting:
                    waiting[seq.place] += 1
        assert num == len(self.sequences)
        for place, num in waiting.items():
            queue = core.sequences.waiting[place]
            if queue or num:
                assert len(queue) == len(set(queue)) == num, (place, queue)
                assert all(self.sequences[i].place is place for i in queue), (place, queue)
        holding = [w for w in core.fleet.workers.values() if w.holds and w.state is not WorkerState.FENCED]
        holders = Counter((w.node, slot) for w in holding for slot in w.slots)
        assert not holders or max(holders.values()) == 1, core.fleet.workers
        for worker in core.fleet.workers.values():
            if worker.state is WorkerState.PLANNED and self.workers.get(worker.name) is WorkerState.DEAD:
                del self.workers[worker.name]  # its node was given up, and it was bound anew
            assert worker.state is self.workers.get(worker.name, WorkerState.PLANNED), worker
        for version, state in self.versions.items():
            assert core.versions.state(version) is state, core.versions
