"""Events in, decisions out: the one door through which the state of a run changes.

`Core.handle(event, now)` updates the ledger of sequences, versions and workers, then asks every open step what can
go on. It reads no clock, touches no file and knows no process, so a journal of events replays to the same decisions.
"""

from collections.abc import Iterator
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
from pipeline.core.fleet import Fleet, Replicas, Worker, WorkerState
from pipeline.core.scheduler import choose_dispatch
from pipeline.core.sequences import Sequences, SequenceState, plan_batch
from pipeline.core.versions import Versions

_BY_NAME = {stage.name: stage for stage in STAGES}
_SERVING = {"rollout": Role.ROLLOUT, "reward": Role.REWARD}
"""Stages whose tasks are given sequences one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What the core must know of the configuration."""

    total_steps: int
    sequences_per_step: int
    replicas: tuple[Replicas, ...]
    num_nodes: int
    save_freq: int
    evaluate_freq: int
    restarts: int
    stage_s: float
    engine_start_s: float

    def skipped(self, step: int) -> set[str]:
        """Stages that are not due in `step`; the last step is always evaluated and saved."""
        last = step == self.total_steps
        skip = set()
        if not self.evaluate_freq or not (last or step % self.evaluate_freq == 0):
            skip.add("evaluate")
        if not (last or step % self.save_freq == 0):
            skip.add("checkpoint")
        return skip


@dataclass(frozen=True, slots=True)
class _Task:
    id: str
    stage: str
    step: int
    worker: str


class Core:
    """The state of a run. `steps` holds the open steps and the one closed before them."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.sequences = Sequences()
        self.versions = Versions()
        self.fleet = Fleet()
        self.steps: dict[int, StepProgress] = {}
        self.ended: EndRun | None = None
        self.stopping = ""
        """Why no new step is begun; empty while the run goes on."""
        self._tasks: dict[str, _Task] = {}
        self._num_tasks = 0
        self._ending: set[str] = set()
        self._loading: set[str] = set()
        self._out: list[Decision] = []

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Take one event; return what is to be done, in order. After EndRun nothing more is decided."""
        if self.ended:
            return []
        self._out = []
        self._take(event, now)
        if not self.ended:
            self._go_on(now)
        return self._out

    # --- taking events ---------------------------------------------------------------------------------------------

    def _take(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.RunRestored():
                self._restore(event)
            case ev.NodeJoined():
                self.fleet.join(event.node, event.num_slots)
                self._place()
            case ev.NodeLost():
                self._end("failed", f"node {event.node} is lost: {event.reason}")
            case ev.WorkerReady():
                worker = self.fleet.workers[event.worker]
                worker.state, worker.version = WorkerState.READY, event.version
                self._clear_timer(f"worker:{worker.name}")
                if worker.role is Role.TRAIN:
                    self._rewind(event.version)
            case ev.WorkerDied():
                self._bury(self.fleet.workers[event.worker], event.reason, now)
            case ev.TaskStarted():
                pass  # dispatching starts with the task's registration: orders follow it on the same channel
            case ev.TaskEnded():
                self._end_task(event, now)
            case ev.SequenceAdmitted():
                self.sequences.admit(event.step, event.ids)
            case ev.SegmentClosed():
                for segment in event.segments:
                    self.sequences.close(event.task, segment)
            case ev.VerdictGiven():
                for verdict in event.verdicts:
                    self.sequences.judge(event.task, verdict)
            case ev.BatchCommitted():
                self.steps[event.step].finish("batch", now)
            case ev.BatchTrained():
                self.sequences.trained(event.step)
                self.steps[event.step].finish("train", now)
                for worker in self.fleet.ready(Role.TRAIN):
                    self._rewind(worker.version)  # it may have died and come back meanwhile
            case ev.VersionSealed():
                self.versions.seal(event.version)
            case ev.VersionLoaded():
                self.fleet.workers[event.worker].version = event.version
                self._loading.discard(event.worker)
            case ev.UpdateFailed():
                self._emit(FenceReplica(worker=event.worker, reason=event.reason))
            case ev.StepRecorded():
                self.steps[event.step].finish("record", now)
                self.sequences.forget(event.step)
                self.fleet.progress()
            case ev.TimerFired():
                self._end("failed", f"limit exceeded: {event.name}")
            case ev.CancelAsked():
                self._stop(event.reason)

    def window(self, step: int) -> tuple[list[tuple[str, float, float]], float, float]:
        """The spans of what ran since the step before was recorded, and the begin and end of that time."""
        this, before = self.steps[step], self.steps.get(step - 1)
        spans = this.spans() + (before.spans() if before else [])
        ended = this.started["record"]
        began = (before.started if before else {}).get("record") or min(s for _, s, _ in this.spans())
        return spans, began, ended

    def _restore(self, event: ev.RunRestored) -> None:
        self.versions.current = event.version
        first = StepProgress.closed(event.version)
        if event.version == 0 and self.plan.evaluate_freq:
            first.stages.update(evaluate=Progress.PENDING, record=Progress.PENDING)
        self.steps[event.version] = first
        for stored in event.steps:
            progress = StepProgress.open(stored.step, self.plan.skipped(stored.step))
            self.steps[stored.step] = progress
            for sequence in stored.sequences:
                self.sequences.restore(stored.step, sequence)
            if stored.batched:
                progress.stages.update(dict.fromkeys(("prompts", "rollout", "reward", "batch"), Progress.DONE))
            elif len(stored.sequences) == self.plan.sequences_per_step:
                progress.stages["prompts"] = Progress.DONE

    def _place(self) -> None:
        for worker in self.fleet.place(list(self.plan.replicas)):
            self._start_worker(worker)
        missing = self.fleet.unplaced(list(self.plan.replicas))
        if missing and len(self.fleet.nodes) == self.plan.num_nodes:
            self._end("failed", f"no node has slots left for {', '.join(missing)}; free: {self.fleet.free()}")

    def _bury(self, worker: Worker, reason: str, now: float) -> None:
        """A dead worker's sequences wait again, its single tasks are begun again, a new process takes its place."""
        worker.state = WorkerState.DEAD
        worker.deaths += 1
        self._loading.discard(worker.name)
        self._clear_timer(f"worker:{worker.name}")
        for task in [t for t in self._tasks.values() if t.worker == worker.name]:
            self._forget_task(task)
            self.sequences.release(task.id)
            if task.stage not in _SERVING:
                self.steps[task.step].stages[task.stage] = Progress.PENDING
        if worker.deaths > self.plan.restarts:
            self._end("failed", f"{worker.name} on {worker.node} died {worker.deaths} times without progress: {reason}")
        else:
            self._start_worker(worker)

    def _rewind(self, version: int) -> None:
        """The trainer holds `version`: the recorded batches above it are trained again, those published stay so."""
        trained = [s.step for s in self.steps.values() if s.stages["train"] is Progress.DONE]
        for number in range(version + 1, max(trained, default=version) + 1):
            step = self.steps.setdefault(number, StepProgress.closed(number))
            again = {"train"} | ({"checkpoint"} - self.plan.skipped(number))
            step.stages |= {stage: Progress.PENDING for stage in again if step.stages[stage] is Progress.DONE}
        self.steps = dict(sorted(self.steps.items()))

    def _end_task(self, event: ev.TaskEnded, now: float) -> None:
        task = self._tasks.get(event.task)
        if task is None:
            return
        self._forget_task(task)
        if not event.ok:
            self._end("failed", f"stage {task.stage} of step {task.step} failed on {task.worker}: {event.error}")
            return
        step = self.steps[task.step]
        match task.stage:
            case "rollout" | "reward":
                self.sequences.release(task.id)
            case "train":
                self.fleet.workers[task.worker].version = task.step
                self._emit(CommitTrained(step=task.step))
            case "publish":
                self.versions.write(task.step)
                self._emit(SealVersion(version=task.step))
            case _:
                step.finish(task.stage, now)

    # --- going on --------------------------------------------------------------------------------------------------

    def _go_on(self, now: float) -> None:
        """Begin what can begin, feed what runs, finish what is complete; again until nothing changes."""
        self._load_versions()
        changed = True
        while changed and not self.ended:
            progressed = [self._advance(step, now) for step in self._open_steps()]
            changed = any(progressed)
        if not self.ended and self._is_over():
            self._end("cancelled" if self.stopping else "done", self.stopping)

    def _open_steps(self) -> Iterator[StepProgress]:
        newest = max(self.steps, default=None)
        if newest is not None and newest < self.plan.total_steps and not self.stopping:
            before = self.steps[newest]
            if before.is_over("publish") and before.is_over("evaluate"):
                self.steps[newest + 1] = StepProgress.open(newest + 1, self.plan.skipped(newest + 1))
        for number in sorted(self.steps):
            step = self.steps[number]
            if step.is_closed and number + 1 in self.steps and self.steps[number + 1].is_closed:
                del self.steps[number]
            elif not step.is_closed and not self._is_abandoned(step):
                yield step

    def _is_abandoned(self, step: StepProgress) -> bool:
        """Once the run stops, only a step whose training has begun is brought to its end."""
        return bool(self.stopping) and (step.step == 0 or step.stages["train"] is Progress.PENDING)

    def _stop(self, reason: str) -> None:
        """Begin no new step; save the newest trained version, due or not."""
        self.stopping = reason
        trained = [s for s in self.steps.values() if s.step and s.stages["train"] is not Progress.PENDING]
        if trained and trained[-1].stages["checkpoint"] is Progress.SKIPPED:
            trained[-1].stages["checkpoint"] = Progress.PENDING

    def _is_over(self) -> bool:
        if not self.steps:
            return False
        if self.stopping:
            return all(step.is_closed or self._is_abandoned(step) for step in self.steps.values())
        return max(self.steps) == self.plan.total_steps and self.steps[self.plan.total_steps].is_closed

    def _advance(self, step: StepProgress, now: float) -> bool:
        before = self.steps.get(step.step - 1) or StepProgress.closed(step.step - 1)
        changed = False
        for stage in STAGES:
            if is_ready(stage, step, before):
                changed |= self._begin(stage, step, now)
            elif step.stages[stage.name] is Progress.RUNNING:
                changed |= self._serve(stage, step, now)
        return changed

    def _begin(self, stage: Stage, step: StepProgress, now: float) -> bool:
        if stage.role is None:
            step.begin(stage.name, now)
            self._write(stage, step)
            return True
        ready = self.fleet.ready(stage.role)
        if not ready:
            return False
        step.begin(stage.name, now)
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

    def _serve(self, stage: Stage, step: StepProgress, now: float) -> bool:
        """Feed a running stage. True if it came to its end."""
        if stage.name == "publish":
            return self._finish_publish(step, now)
        role = _SERVING.get(stage.name)
        if role is None:
            return False
        tasks = step.tasks[stage.name]
        assert len(self.sequences.of_step(step.step)) == self.plan.sequences_per_step, step
        left = [s for s in self.sequences.of_step(step.step) if s.role is role and s.state in _UNFINISHED]
        if left:
            self._feed(role, stage, step)
        elif tasks:
            for task, worker in tasks.items():
                if task not in self._ending:
                    self._ending.add(task)
                    self._emit(EndTask(task=task, worker=worker))
        else:
            step.finish(stage.name, now)
            return True
        return False

    def _feed(self, role: Role, stage: Stage, step: StepProgress) -> None:
        tasks = step.tasks[stage.name]
        for worker in self.fleet.ready(role):
            if worker.name not in tasks.values():
                self._start_task(stage, step, worker)
        waiting = [i for i in self.sequences.waiting[role] if self.sequences[i].step == step.step]
        load = {t: sum(1 for _ in self.sequences.running_on(t)) for t in tasks if t not in self._ending}
        for task, ids in choose_dispatch(waiting, load).items() if waiting else ():
            turns = tuple(self.sequences.dispatch(i, task) for i in ids)
            self._emit(Dispatch(task=task, worker=tasks[task], ids=tuple(ids), turns=turns))

    def _load_versions(self) -> None:
        """Each ready rollout replica that serves an older version than the sealed one takes the new one."""
        for worker in self.fleet.ready(Role.ROLLOUT):
            if worker.version < self.versions.current and worker.name not in self._loading:
                self._loading.add(worker.name)
                self._emit(LoadVersion(worker=worker.name, version=self.versions.current))

    def _finish_publish(self, step: StepProgress, now: float) -> bool:
        if self.versions.current < step.step:
            return False
        serving = self.fleet.ready(Role.ROLLOUT)
        if not serving or any(w.version < step.step for w in serving):
            return False
        step.finish("publish", now)
        return True

    # --- small verbs -----------------------------------------------------------------------------------------------

    def _start_worker(self, worker: Worker) -> None:
        worker.state, worker.version = WorkerState.STARTING, self.versions.current
        self._emit(
            StartWorker(
                worker=worker.name,
                role=worker.role,
                node=worker.node,
                slots=worker.slots,
                version=self.versions.current,
            )
        )
        self._set_timer(f"worker:{worker.name}", self.plan.engine_start_s)

    def _start_task(self, stage: Stage, step: StepProgress, worker: Worker) -> None:
        self._num_tasks += 1
        task = _Task(f"{stage.name}-{step.step}-{self._num_tasks}", stage.name, step.step, worker.name)
        self._tasks[task.id] = task
        step.tasks[stage.name][task.id] = worker.name
        version = step.step if stage.name in ("publish", "checkpoint", "evaluate") else step.step - 1
        self._emit(
            StartTask(task=task.id, stage=stage.name, step=step.step, worker=worker.name, version=version),
        )
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
        self._emit(SetTimer(name=name, after_s=after_s))

    def _clear_timer(self, name: str) -> None:
        self._emit(SetTimer(name=name, after_s=0.0))

    def _emit(self, decision: Decision) -> None:
        self._out.append(decision)


_UNFINISHED = (SequenceState.WAITING, SequenceState.RUNNING)
