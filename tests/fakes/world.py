"""A shell without processes: performs the core's decisions in memory, in any order the caller's randomness picks.

Every performed decision puts its events into `pending`; `tick()` delivers one of them. A dead worker's events are
lost, as they are in life, but what the queue acknowledged before stays known to it.
"""

import random
from dataclasses import dataclass, field

from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.core import Core, RunPlan
from pipeline.core.events import Finish, Role, SegmentInfo, VerdictInfo
from pipeline.core.fleet import Replicas
from pipeline.core.sequences import SequenceState
from pipeline.queue.schema import sequence_id


def make_plan(**changes: object) -> RunPlan:
    values: dict[str, object] = {
        "total_steps": 3,
        "sequences_per_step": 4,
        "replicas": tuple(Replicas(role=r, replicas=1, slots=1) for r in Role),
        "num_nodes": 1,
        "save_freq": 2,
        "evaluate_freq": 2,
        "restarts": 3,
        "stage_s": 100.0,
        "engine_start_s": 100.0,
    }
    return RunPlan(**(values | changes))  # type: ignore[arg-type]


@dataclass
class World:
    core: Core
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    group: int = 2
    failure: str = ""
    """Judge failure given to every second member, if set."""
    now: float = 0.0
    pending: list[tuple[str, ev.Event]] = field(default_factory=list)
    """(worker that reports it or "", event), in order per worker."""
    log: list[de.Decision] = field(default_factory=list)
    events: list[ev.Event] = field(default_factory=list)
    tasks: dict[str, tuple[str, str, int]] = field(default_factory=dict)
    timers: set[str] = field(default_factory=set)
    batches: dict[int, tuple[str, ...]] = field(default_factory=dict)
    rows: list[int] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    trained: dict[str, int] = field(default_factory=dict)
    """Sequence to the step whose weights it went into."""
    trainer_version: int = 0
    sealed: list[int] = field(default_factory=list)

    def start(self, version: int = 0, steps: tuple[ev.RestoredStep, ...] = (), num_slots: int = 3) -> "World":
        self.saved += [version] if version else []
        self.give(ev.RunRestored(version=version, steps=steps))
        self.give(ev.NodeJoined(node="n0", num_slots=num_slots))
        return self

    def give(self, event: ev.Event) -> list[de.Decision]:
        self.now += 1.0
        self.events.append(event)
        decisions = self.core.handle(event, self.now)
        self.log += decisions
        for decision in decisions:
            self.perform(decision)
        return decisions

    def tick(self) -> bool:
        """Deliver the oldest event of a random reporter. False if nothing is pending."""
        reporters = sorted({who for who, _ in self.pending})
        if not reporters:
            return False
        who = self.rng.choice(reporters)
        index = next(i for i, (w, _) in enumerate(self.pending) if w == who)
        self.give(self.pending.pop(index)[1])
        return True

    def run(self, limit: int = 10_000) -> "World":
        for _ in range(limit):
            if self.core.ended or not self.tick():
                return self
        raise AssertionError("the run does not end")

    def kill(self, worker: str) -> None:
        self.pending = [(w, e) for w, e in self.pending if w != worker]
        self.tasks = {t: v for t, v in self.tasks.items() if v[0] != worker}
        self.give(ev.WorkerDied(worker=worker, reason="killed"))

    def perform(self, decision: de.Decision) -> None:
        match decision:
            case de.StartWorker():
                version = decision.version
                if decision.role is Role.TRAIN:
                    version = self.trainer_version = max(self.saved, default=0)
                self.report(decision.worker, ev.WorkerReady(worker=decision.worker, version=version))
            case de.FenceReplica():
                self.pending = [(w, e) for w, e in self.pending if w != decision.worker]
                self.report(decision.worker, ev.WorkerDied(worker=decision.worker, reason=decision.reason))
            case de.StartTask():
                self.tasks[decision.task] = (decision.worker, decision.stage, decision.step)
                self.report(decision.worker, ev.TaskStarted(task=decision.task))
                self._single(decision)
            case de.EndTask():
                self.report(decision.worker, ev.TaskEnded(task=decision.task, ok=True))
            case de.Dispatch():
                self._serve(decision)
            case de.CommitBatch():
                assert decision.step not in self.batches
                self.batches[decision.step] = decision.ids
                assert len(decision.ids) + len(decision.dropped) == self.core.plan.sequences_per_step
                self.report("", ev.BatchCommitted(step=decision.step))
            case de.CommitTrained():
                for seq_id in self.batches[decision.step]:
                    assert self.trained.setdefault(seq_id, decision.step) == decision.step
                num = len(self.batches[decision.step])
                dropped = self.core.plan.sequences_per_step - num
                self.report("", ev.BatchTrained(step=decision.step, num_trained=num, num_dropped=dropped))
            case de.SealVersion():
                self.sealed.append(decision.version)
                self.report("", ev.VersionSealed(version=decision.version))
            case de.LoadVersion():
                self.report(decision.worker, ev.VersionLoaded(worker=decision.worker, version=decision.version))
            case de.RecordStep():
                self.rows.append(decision.step)
                self.report("", ev.StepRecorded(step=decision.step))
            case de.SetTimer():
                (self.timers.add if decision.after_s > 0 else self.timers.discard)(decision.name)
            case de.EndRun() | de.Abort():
                pass

    def report(self, who: str, event: ev.Event) -> None:
        self.pending.append((who, event))

    def _single(self, task: de.StartTask) -> None:
        if task.stage in ("rollout", "reward"):
            return
        if task.stage == "prompts":
            num = self.core.plan.sequences_per_step
            ids = tuple(sequence_id(task.step, i // self.group, i % self.group) for i in range(num))
            self.report(task.worker, ev.SequenceAdmitted(step=task.step, ids=ids))
        if task.stage == "train":
            assert self.trainer_version == task.step - 1 and task.step in self.batches, (task, self.trainer_version)
            self.trainer_version = task.step
        if task.stage == "publish":
            assert self.trainer_version == task.step, (task, self.trainer_version)
        if task.stage == "checkpoint":
            assert self.trainer_version == task.step, (task, self.trainer_version)
            self.saved.append(task.step)
        self.report(task.worker, ev.TaskEnded(task=task.task, ok=True))

    def _serve(self, decision: de.Dispatch) -> None:
        stage = self.tasks[decision.task][1]
        version = self.core.fleet.workers[decision.worker].version
        for seq_id in decision.ids:
            if stage == "rollout":
                segments = tuple(
                    SegmentInfo(id=seq_id, idx=i, num_tokens=3, version=version, finish=finish)
                    for i, finish in enumerate((Finish.FLUSH, Finish.STOP))
                )
                self.report(decision.worker, ev.SegmentClosed(task=decision.task, segments=segments))
            else:
                failed = self.failure and seq_id.endswith("1")
                verdict = VerdictInfo(id=seq_id, score=None if failed else 1.0, failure=self.failure if failed else "")
                self.report(decision.worker, ev.VerdictGiven(task=decision.task, verdicts=(verdict,)))


def check_invariants(core: Core) -> None:
    """Each sequence is in exactly one place, and the queues hold exactly those that wait."""
    queued = [i for queue in core.sequences.waiting.values() for i in queue]
    assert len(queued) == len(set(queued))
    for step in core.steps:
        for seq in core.sequences.of_step(step):
            assert (seq.id in queued) == (seq.state is SequenceState.WAITING), seq
            if seq.state is SequenceState.WAITING:
                assert seq.id in core.sequences.waiting[seq.role]
            assert bool(seq.task) == (seq.state is SequenceState.RUNNING), seq
    taken = [(w.node, s) for w in core.fleet.workers.values() for s in w.slots]
    assert len(taken) == len(set(taken))
