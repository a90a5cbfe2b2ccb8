"""Events in, decisions out: the one door through which the state of a run changes.

`Core.handle(event, now)` updates the ledger of sequences, versions and workers, then asks every open step what can
go on. It reads no clock, touches no file and knows no process, so a journal of events replays to the same decisions.

Reports may come late or twice: what a dead task says, or what was said before, changes nothing. A worker's reports
come in the order in which it made them, and its death after the last of them.
"""

import math

from pipeline.core import events as ev
from pipeline.core.dag import Progress, Stage, StepProgress
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
    StartNode,
    StartTask,
    StartWorker,
)
from pipeline.core.events import Role
from pipeline.core.fleet import Fleet, Worker
from pipeline.core.limits import Limits
from pipeline.core.scheduler import choose_dispatch
from pipeline.core.sequences import WAITING, Sequences, plan_batch
from pipeline.core.steps import RunPlan, Steps
from pipeline.core.tasks import Task, Tasks
from pipeline.core.versions import Versions

__all__ = ["Core", "RunPlan"]

_SERVING = {"rollout": Role.ROLLOUT, "reward": Role.REWARD}
"""Stages whose tasks are given sequences one by one."""
_LEADS_TO = {"rollout": (Role.ROLLOUT,), "reward": (Role.ROLLOUT, Role.REWARD)}
"""The roles whose sequences such a stage has yet to see."""


class Core:
    """The state of a run."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.sequences = Sequences()
        self.versions = Versions()
        self.fleet = Fleet()
        self.steps = Steps(plan)
        self.ended: EndRun | None = None
        self._tasks = Tasks()
        self._limits = Limits(plan)
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
                self._join(event)
            case ev.NodeLost():
                self._lose(event.node, event.reason)
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
            case ev.StepRecorded():
                self.steps[event.step].finish("record", self._now)
                self.sequences.forget(event.step)
                self.fleet.progress()
            case ev.TimerFired():
                if reason := self._limits.expired(event.name, self._now):
                    self._expire(event.name, reason)
            case ev.CancelAsked():
                self.steps.stop(event.reason)

    def _take_of_worker(
        self, event: ev.WorkerReady | ev.WorkerDied | ev.VersionLoaded | ev.UpdateFailed, worker: Worker
    ) -> None:
        match event:  # a worker that is not ready for work has a limit, `worker:NAME`
            case ev.WorkerReady():
                if worker.report(event.version):
                    self._clear_timer(f"worker:{worker.name}")
                    if worker.role is Role.TRAIN:
                        self.steps.rewind(event.version)
            case ev.VersionLoaded():
                if worker.load(event.version):
                    self._clear_timer(f"worker:{worker.name}")
            case ev.UpdateFailed():
                if worker.refuse(event.version, event.reason):
                    self._fence(worker)
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
        self._limit("nodes", "engine_start_s", 2)  # the first start of each may fail

    def _join(self, event: ev.NodeJoined) -> None:
        """The node's workers are started: those that died with its former life first."""
        self._clear_timer(f"node:{event.node}")
        if not self.fleet.nodes:
            self._go_back(event.version)
        for worker in self.fleet.join(event.node, event.num_slots):
            self._start_worker(worker)
        self._place()
        if len(self.fleet.nodes) == self.plan.num_nodes:
            self._clear_timer("nodes")

    def _go_back(self, version: int) -> None:
        """The only memory there is holds `version`, the newest checkpoint's: what was lost with the node before is
        trained and published again."""
        for written in (self.versions.current, self.versions.current + 1):
            self._clear_timer(f"seal:{written}")
        self.sequences.suspect(self.versions.current)
        self.versions = Versions(version)
        self.steps.rewind(version, unpublish=True)

    def _lose(self, node: str, reason: str) -> None:
        """Nothing runs on the node any more. Its memory is gone too, so with others the run cannot be led on."""
        for worker in self.fleet.lose(node):
            if worker.die():
                self._clear_timer(f"worker:{worker.name}")
                self._release_tasks(worker)
        self._clear_timer(f"node:{node}")
        if self.plan.num_nodes > 1:
            self._end("failed", f"node {node} is lost: {reason}")
        elif self.fleet.losses[node] > self.plan.restarts:
            times = self.fleet.losses[node]
            self._end("failed", f"node {node} was lost {times} times without progress: {reason}")
        else:
            self._emit(StartNode(node=node))
            self._limit(f"node:{node}", "engine_start_s")
            if "nodes" in self._limits:
                self._limit("nodes", "engine_start_s", 2)

    def _place(self) -> None:
        for worker in self.fleet.place(list(self.plan.replicas)):
            self._start_worker(worker)
        missing = self.fleet.unplaced(list(self.plan.replicas))
        if missing and len(self.fleet.nodes) == self.plan.num_nodes:
            self._end("failed", f"no node has slots left for {', '.join(missing)}; free: {self.fleet.free()}")

    def _bury(self, worker: Worker, reason: str) -> None:
        """A new process takes the dead worker's place."""
        self._release_tasks(worker)
        worker.deaths += 1
        if worker.deaths > self.plan.restarts:
            cause = f"{worker.fault}\n{reason}" if worker.fault else reason
            self._end("failed", f"{worker.name} on {worker.node} died {worker.deaths} times without progress: {cause}")
        else:
            self._start_worker(worker)

    def _release_tasks(self, worker: Worker) -> None:
        """Its sequences wait again, its single tasks are begun again."""
        for task in self._tasks.of(worker.name):
            self._forget_task(task)
            self.sequences.release(task.id)
            if task.stage not in _SERVING:
                self.steps[task.step].stages[task.stage] = Progress.PENDING

    def _expire(self, limit: str, reason: str) -> None:
        """A limit ran out. Where somebody can be started afresh for it, that is done; else the run cannot go on."""
        kind, _, name = limit.partition(":")
        worker = self.fleet.workers.get(self._tasks[name].worker if kind == "task" else name)
        if kind == "node":
            self._lose(name, reason)
        elif worker is not None and worker.expire(reason):
            self._fence(worker)
        else:
            self._end("failed", reason)

    def _fence(self, worker: Worker) -> None:
        """It is killed. Its own limit holds until its death is known, those of its tasks do no more."""
        for task in self._tasks.of(worker.name):
            self._clear_timer(f"task:{task.id}")
        self._emit(FenceReplica(worker=worker.name, reason=worker.fault))
        self._limit(f"worker:{worker.name}", "engine_start_s")

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
                self._limit(f"seal:{task.step}", "stage_s")
            case _:
                self.steps[task.step].finish(task.stage, self._now)

    # --- going on --------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin what can begin, feed what runs, finish what is complete; again until nothing changes."""
        self._load_versions()
        while steps := self.steps.open():
            progressed = [self._advance(step) for step in steps]
            if not any(progressed):
                return
        self._end("cancelled" if self.steps.stopping else "done", self.steps.stopping)

    def _advance(self, step: StepProgress) -> bool:
        changed = False
        for stage in self.steps.graph.stages:
            match step.stages[stage.name]:
                case Progress.PENDING if self.steps.is_ready(stage.name, step):
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
        if any(s.place.role in _LEADS_TO[stage.name] for s in self.sequences.of_step(step.step)):
            self._feed(role, stage, step)
        elif tasks:
            for task in (self._tasks[id] for id in tasks):
                if not task.is_ending:
                    task.is_ending = True
                    self._emit(EndTask(task=task.id, worker=task.worker))
        else:
            step.finish(stage.name, self._now)
            return True
        return False

    def _feed(self, role: Role, stage: Stage, step: StepProgress) -> None:
        """Give what waits to the replicas, those of rollout only if they serve the newest version: then no token is
        older than the step allows, and the versions of a sequence never decrease."""
        tasks = step.tasks[stage.name]
        ready = self.fleet.ready(role)
        for worker in ready:
            if worker.name not in tasks.values():
                self._start_task(stage, step, worker)
        waiting = [i for i in self.sequences.waiting[WAITING[role]] if self.sequences[i].step == step.step]
        if role is Role.ROLLOUT:
            current = self.versions.current
            ready = [worker for worker in ready if worker.version == current]
            waiting = [i for i in waiting if self._oldest_version(i) <= current]
        names = {worker.name for worker in ready}
        load = {t: self._load(w) for t, w in tasks.items() if w in names and not self._tasks[t].is_ending}
        for task, ids in choose_dispatch(waiting, load).items():
            turns = tuple(self.sequences.dispatch(i, task) for i in ids)
            self._emit(Dispatch(task=task, worker=tasks[task], ids=tuple(ids), turns=turns))

    def _oldest_version(self, seq_id: str) -> int:
        """The sequence may go on only under this version or a newer one."""
        seq = self.sequences[seq_id]
        return max(self.plan.oldest_version(seq.step), seq.max_version or 0)

    def _load(self, worker: str) -> int:
        """How many sequences it runs, of all steps."""
        return sum(self.sequences.num_running(task.id) for task in self._tasks.of(worker))

    def _load_versions(self) -> None:
        """Rollout replicas that serve an older version than the sealed one take that. Those with nothing to do do it
        at once; of the others one after the other, so that the rest goes on."""
        for worker in self.fleet.ready(Role.ROLLOUT):
            if worker.version < self.versions.current and (
                self.plan.keep_kv or not self._load(worker.name) or not self.fleet.loading(Role.ROLLOUT)
            ):
                version = self.versions.current
                worker.ask(version)
                self._emit(LoadVersion(worker=worker.name, version=version, keep_kv=self.plan.keep_kv))
                self._limit(f"worker:{worker.name}", "stage_s")

    def _finish_publish(self, step: StepProgress) -> bool:
        """A step is published when its version is served, by all replicas that can: those that load are waited for."""
        ready = self.fleet.ready(Role.ROLLOUT)
        is_served = bool(ready) and not self.fleet.loading(Role.ROLLOUT) and min(w.version for w in ready) >= step.step
        if is_served:
            step.finish("publish", self._now)
        return is_served

    # --- small verbs -----------------------------------------------------------------------------------------------

    def _start_worker(self, worker: Worker) -> None:
        version = self.versions.current
        worker.start(version)
        self._emit(
            StartWorker(worker=worker.name, role=worker.role, node=worker.node, slots=worker.slots, version=version)
        )
        self._limit(f"worker:{worker.name}", "engine_start_s")

    def _start_task(self, stage: Stage, step: StepProgress, worker: Worker) -> None:
        task = self._tasks.begin(stage.name, step.step, worker.name)
        step.tasks[stage.name][task.id] = worker.name
        version = step.step if stage.name in ("publish", "checkpoint", "evaluate") else step.step - 1
        if stage.name in ("prompts", "rollout"):
            version = max(0, self.plan.oldest_version(step.step))
        self._emit(StartTask(task=task.id, stage=stage.name, step=step.step, worker=worker.name, version=version))
        self._limit(f"task:{task.id}", "save_s" if stage.name == "checkpoint" else "stage_s")

    def _forget_task(self, task: Task) -> None:
        del self._tasks[task.id]
        self.steps[task.step].tasks.get(task.stage, {}).pop(task.id, None)
        self._clear_timer(f"task:{task.id}")

    def _end(self, status: str, reason: str) -> None:
        self.ended = EndRun(status=status, reason=reason)
        self._emit(self.ended)

    def _limit(self, name: str, key: str, times: int = 1) -> None:
        """`name` may take so many times `limits.<key>`."""
        self._emit(self._limits.arm(name, key, self._now, times))

    def _clear_timer(self, name: str) -> None:
        if self._limits.pop(name, None) is not None:
            self._emit(SetTimer(name=name, after_s=0.0))

    def _emit(self, decision: Decision) -> None:
        self._out.append(decision)
