"""Events in, decisions out: the one door through which the state of a run changes.

`Core.handle(event, now)` updates the ledger of sequences, versions and workers, then asks every open step what can
go on. It reads no clock, touches no file and knows no process, so a journal of events replays to the same decisions.

Reports may come late or twice: what a dead task says, or what was said before, changes nothing. A worker's reports
come in the order in which it made them, and its death after the last of them.
"""

import math
from dataclasses import dataclass

from pipeline.core import events as ev
from pipeline.core.dag import STAGES, Progress, Stage, StepProgress, is_ready
from pipeline.core.decisions import (
    CommitBatch,
    CommitTrained,
    Decision,
    Dispatch,
    EndRun,
    EndTask,
    FenceReplica,
    LoadVersion,
    RecordStep,
    SealVersion,
    SetTimer,
    StartTask,
    StartWorker,
)
from pipeline.core.events import Role
from pipeline.core.fleet import Fleet, Worker
from pipeline.core.scheduler import choose_dispatch
from pipeline.core.sequences import WAITING, Sequences, plan_batch
from pipeline.core.steps import RunPlan, Steps
from pipeline.core.versions import Versions

__all__ = ["Core", "RunPlan"]

_SERVING = {"rollout": Role.ROLLOUT, "reward": Role.REWARD}
"""Stages whose tasks are given sequences one by one."""


@dataclass(frozen=True, slots=True)
class _Task:
    id: str
    stage: str
    step: int
    worker: str


class Core:
    """The state of a run."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.sequences = Sequences()
        self.versions = Versions()
        self.fleet = Fleet()
        self.steps = Steps(plan)
        self.ended: EndRun | None = None
        self._tasks: dict[str, _Task] = {}
        self._num_tasks = 0
        self._ending: set[str] = set()
        self._timers: dict[str, float] = {}
        """When each armed timer is due."""
        self._now = -math.inf
        self._out: list[Decision] = []

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Take one event; return what is to be done, in order. After EndRun nothing more is decided."""
        if self.ended:
            return []
        self._now, self._out = now, []
        self._take(event)
        if not self.ended:
            self._go_on()
        return self._out

    def window(self, step: int) -> tuple[list[tuple[str, float, float]], float, float]:
        """The spans of what ran since the step before was recorded, and the begin and end of that time."""
        return self.steps.window(step)

    # --- taking events ---------------------------------------------------------------------------------------------

    def _take(self, event: ev.Event) -> None:
        match event:
            case ev.RunRestored():
                self._restore(event)
            case ev.NodeJoined():
                self.fleet.join(event.node, event.num_slots)
                self._place()
            case ev.NodeLost():
                self._end("failed", f"node {event.node} is lost: {event.reason}")
            case ev.WorkerReady() | ev.WorkerDied() | ev.VersionLoaded() | ev.UpdateFailed():
                self._take_of_worker(event, self.fleet.workers[event.worker])
            case ev.TaskStarted():
                pass  # dispatching starts with the task's registration: orders follow it on the same channel
            case ev.TaskEnded():
                self._end_task(event)
            case ev.SequenceAdmitted():
                step = self.steps.get(event.step)
                if step and step.stages["prompts"] is Progress.RUNNING:
                    self.sequences.admit(event.step, event.ids)
            case ev.SegmentClosed():
                for segment in event.segments:
                    self.sequences.close(event.task, segment)
            case ev.VerdictGiven():
                for verdict in event.verdicts:
                    self.sequences.judge(event.task, verdict)
            case ev.BatchCommitted():
                self.steps[event.step].finish("batch", self._now)
            case ev.BatchTrained():
                self.sequences.trained(event.step)
                self.steps[event.step].finish("train", self._now)
                for worker in self.fleet.ready(Role.TRAIN):
                    self.steps.rewind(worker.version)  # it may have died and come back meanwhile
            case ev.VersionSealed():
                if self.versions.seal(event.version):
                    self._clear_timer(f"seal:{event.version}")
                    for worker in self.fleet.ready(Role.ROLLOUT):
                        self._load_version(worker)
            case ev.StepRecorded():
                self.steps[event.step].finish("record", self._now)
                self.sequences.forget(event.step)
                self.fleet.progress()
            case ev.TimerFired():
                if self._now >= self._timers.get(event.name, math.inf):  # else it was cleared or set anew meanwhile
                    self._end("failed", f"limit exceeded: {event.name}")
            case ev.CancelAsked():
                self.steps.stop(event.reason)

    def _take_of_worker(
        self, event: ev.WorkerReady | ev.WorkerDied | ev.VersionLoaded | ev.UpdateFailed, worker: Worker
    ) -> None:
        """A worker that is not ready for work has a limit, `worker:NAME`."""
        match event:
            case ev.WorkerReady():
                if worker.report(event.version):
                    self._clear_timer(f"worker:{worker.name}")
                    if worker.role is Role.TRAIN:
                        self.steps.rewind(event.version)
                    self._load_version(worker)
            case ev.VersionLoaded():
                if worker.load(event.version):
                    self._clear_timer(f"worker:{worker.name}")
                    self._load_version(worker)
            case ev.UpdateFailed():
                if worker.refuse(event.version):
                    self._emit(FenceReplica(worker=worker.name, reason=event.reason))
            case ev.WorkerDied():
                if worker.die():
                    self._clear_timer(f"worker:{worker.name}")
                    self._bury(worker, event.reason)

    def _restore(self, event: ev.RunRestored) -> None:
        self.versions = Versions(event.version)
        self.steps.restore(event)
        for step in event.steps:
            for sequence in step.sequences:
                self.sequences.restore(step.step, sequence)

    def _place(self) -> None:
        for worker in self.fleet.place(list(self.plan.replicas)):
            self._start_worker(worker)
        missing = self.fleet.unplaced(list(self.plan.replicas))
        if missing and len(self.fleet.nodes) == self.plan.num_nodes:
            self._end("failed", f"no node has slots left for {', '.join(missing)}; free: {self.fleet.free()}")

    def _bury(self, worker: Worker, reason: str) -> None:
        """A dead worker's sequences wait again, its single tasks are begun again, a new process takes its place."""
        for task in [t for t in self._tasks.values() if t.worker == worker.name]:
            self._forget_task(task)
            self.sequences.release(task.id)
            if task.stage not in _SERVING:
                self.steps[task.step].stages[task.stage] = Progress.PENDING
        if worker.deaths > self.plan.restarts:
            self._end("failed", f"{worker.name} on {worker.node} died {worker.deaths} times without progress: {reason}")
        else:
            self._start_worker(worker)

    def _end_task(self, event: ev.TaskEnded) -> None:
        task = self._tasks.get(event.task)
        if task is None:
            return
        self._forget_task(task)
        if not event.ok:
            self._end("failed", f"stage {task.stage} of step {task.step} failed on {task.worker}: {event.error}")
            return
        match task.stage:
            case "rollout" | "reward":
                self.sequences.release(task.id)
            case "train":
                self.fleet.workers[task.worker].version = task.step
                self._emit(CommitTrained(step=task.step))
            case "publish":
                self.versions.write(task.step)
                self._emit(SealVersion(version=task.step))
                self._set_timer(f"seal:{task.step}", self.plan.stage_s)
            case _:
                self.steps[task.step].finish(task.stage, self._now)

    # --- going on --------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin what can begin, feed what runs, finish what is complete; again until nothing changes."""
        while steps := self.steps.open():
            progressed = [self._advance(step) for step in steps]
            if not any(progressed):
                return
        self._end("cancelled" if self.steps.stopping else "done", self.steps.stopping)

    def _advance(self, step: StepProgress) -> bool:
        before = self.steps.before(step)
        changed = False
        for stage in STAGES:
            match step.stages[stage.name]:
                case Progress.PENDING if is_ready(stage, step, before):
                    changed |= self._begin(stage, step)
                case Progress.RUNNING:
                    changed |= self._serve(stage, step)
        return changed

    def _begin(self, stage: Stage, step: StepProgress) -> bool:
        if stage.role is None:
            step.begin(stage.name, self._now)
            self._write(stage, step)
            return True
        ready = self.fleet.ready(stage.role)
        if not ready:
            return False
        step.begin(stage.name, self._now)
        for worker in ready if stage.everywhere else ready[:1]:
            self._start_task(stage, step, worker)
        return True

    def _write(self, stage: Stage, step: StepProgress) -> None:
        if stage.name == "batch":
            ids, dropped = plan_batch(self.sequences.of_step(step.step))
            self.sequences.batch(step.step, ids, dropped)
            self._emit(CommitBatch(step=step.step, ids=ids, dropped=dropped))
        else:
            self._emit(RecordStep(step=step.step))

    def _serve(self, stage: Stage, step: StepProgress) -> bool:
        """Feed a running stage. True if it came to its end."""
        if stage.name == "publish":
            return self._finish_publish(step)
        role = _SERVING.get(stage.name)
        if role is None:
            return False
        tasks = step.tasks[stage.name]
        assert len(self.sequences.of_step(step.step)) == self.plan.sequences_per_step, step
        if any(s.place.role is role for s in self.sequences.of_step(step.step)):
            self._feed(role, stage, step)
        elif tasks:
            for task, worker in tasks.items():
                if task not in self._ending:
                    self._ending.add(task)
                    self._emit(EndTask(task=task, worker=worker))
        else:
            step.finish(stage.name, self._now)
            return True
        return False

    def _feed(self, role: Role, stage: Stage, step: StepProgress) -> None:
        tasks = step.tasks[stage.name]
        for worker in self.fleet.ready(role):
            if worker.name not in tasks.values():
                self._start_task(stage, step, worker)
        waiting = [i for i in self.sequences.waiting[WAITING[role]] if self.sequences[i].step == step.step]
        if not waiting:
            return
        load = {t: sum(1 for _ in self.sequences.running_on(t)) for t in tasks if t not in self._ending}
        for task, ids in choose_dispatch(waiting, load).items():
            turns = tuple(self.sequences.dispatch(i, task) for i in ids)
            self._emit(Dispatch(task=task, worker=tasks[task], ids=tuple(ids), turns=turns))

    def _load_version(self, worker: Worker) -> None:
        """A rollout replica that serves an older version than the sealed one takes that one before any work."""
        if worker.role is Role.ROLLOUT and worker.version < self.versions.current:
            worker.ask(self.versions.current)
            self._emit(LoadVersion(worker=worker.name, version=self.versions.current))
            self._set_timer(f"worker:{worker.name}", self.plan.stage_s)

    def _finish_publish(self, step: StepProgress) -> bool:
        """A step is published when its version is served, by all replicas that can: those that load are waited for."""
        if self.versions.current < step.step or not self.fleet.ready(Role.ROLLOUT) or self.fleet.loading(Role.ROLLOUT):
            return False
        step.finish("publish", self._now)
        return True

    # --- small verbs -----------------------------------------------------------------------------------------------

    def _start_worker(self, worker: Worker) -> None:
        version = self.versions.current
        worker.start(version)
        self._emit(
            StartWorker(worker=worker.name, role=worker.role, node=worker.node, slots=worker.slots, version=version)
        )
        self._set_timer(f"worker:{worker.name}", self.plan.engine_start_s)

    def _start_task(self, stage: Stage, step: StepProgress, worker: Worker) -> None:
        self._num_tasks += 1
        task = _Task(f"{stage.name}-{step.step}-{self._num_tasks}", stage.name, step.step, worker.name)
        self._tasks[task.id] = task
        step.tasks[stage.name][task.id] = worker.name
        version = step.step if stage.name in ("publish", "checkpoint", "evaluate") else step.step - 1
        self._emit(StartTask(task=task.id, stage=stage.name, step=step.step, worker=worker.name, version=version))
        self._set_timer(f"task:{task.id}", self.plan.stage_s)

    def _forget_task(self, task: _Task) -> None:
        del self._tasks[task.id]
        self._ending.discard(task.id)
        self.steps[task.step].tasks.get(task.stage, {}).pop(task.id, None)
        self._clear_timer(f"task:{task.id}")

    def _end(self, status: str, reason: str) -> None:
        self.ended = EndRun(status=status, reason=reason)
        self._emit(self.ended)

    def _set_timer(self, name: str, after_s: float) -> None:
        self._timers[name] = self._now + after_s
        self._emit(SetTimer(name=name, after_s=after_s))

    def _clear_timer(self, name: str) -> None:
        if self._timers.pop(name, None) is not None:
            self._emit(SetTimer(name=name, after_s=0.0))

    def _emit(self, decision: Decision) -> None:
        self._out.append(decision)
