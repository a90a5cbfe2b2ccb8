"""Events in, decisions out: the one door through which the state of a run changes.

`Core.handle(event, now)` updates the ledger of sequences, versions and workers, then asks every open step what can
go on. It reads no clock, touches no file and knows no process, so a journal of events replays to the same decisions.

Reports may come late or twice: what a dead task says, or what was said before, changes nothing. A worker's reports
come in the order in which it made them, and its death after the last of them.
"""

from pipeline.core import events as ev
from pipeline.core.crew import Crew
from pipeline.core.dag import OWN_PATH, Progress, Stage, StepProgress
from pipeline.core.decisions import (
    CommitBatch,
    CommitTrained,
    Decision,
    EndRun,
    EndTask,
    RecordStep,
    StartTask,
)
from pipeline.core.events import INFERENCE, Role
from pipeline.core.feeding import Feeder, Server, due
from pipeline.core.fleet import Capacity
from pipeline.core.outbox import Outbox
from pipeline.core.own import OwnStages
from pipeline.core.placement import Placement
from pipeline.core.sequences import RUNNING, WAITING, Sequences, plan_batch
from pipeline.core.steps import RunPlan, Steps
from pipeline.core.tasks import NEEDS_NO_SLOTS, SERVING, Task, Tasks
from pipeline.core.worker import Worker

__all__ = ["Core", "RunPlan"]

_SAVE_MARGIN = 1.5
"""A save is not begun unless so many times the last one's time is left."""
_LEADS_TO = {"rollout": (Role.ROLLOUT,), "reward": (Role.ROLLOUT, Role.REWARD)}
"""The roles whose sequences such a stage has yet to see."""


class Core:
    """The state of a run."""

    def __init__(self, plan: RunPlan) -> None:
        self.plan = plan
        self.sequences = Sequences()
        self.steps = Steps(plan)
        self._tasks = Tasks()
        self._out = Outbox(plan)
        self._own = OwnStages(plan, self._out, self.steps, self._tasks)
        self._save_s = 0.0
        """How long the last save took."""
        self.crew = Crew(plan, self._out, self.steps, self._tasks, self._release_tasks, self._go_back)
        self.fleet, self.versions, self.blocks = self.crew.fleet, self.crew.versions, self.crew.blocks
        self._placement = Placement(plan, self._out, self.crew, self.steps, self.sequences)
        self._feeders = {
            role: Feeder(
                role,
                plan.capacities.get(role, Capacity()),
                self.sequences,
                self._tasks,
                self._out,
                may_move=not plan.is_strict and role is Role.ROLLOUT,
            )
            for role in INFERENCE
        }

    @property
    def ended(self) -> EndRun | None:
        return self._out.ended

    def handle(self, event: ev.Event, now: float) -> list[Decision]:
        """Take one event; return what is to be done, in order. After EndRun nothing more is decided."""
        if self.ended:
            return []
        self._out.begin(now)
        self._take(event)
        if not self.ended:
            self._go_on()
        return self._out.decisions

    def window(self, step: int) -> tuple[list[tuple[str, float, float]], float, float]:
        """The spans of what ran since the step before was recorded, and the begin and end of that time."""
        return self.steps.window(step)

    # --- taking events ---------------------------------------------------------------------------------------------

    def _take(self, event: ev.Event) -> None:
        match event:
            case ev.RunRestored():
                self._restore(event)
            case ev.NodeJoined():
                self.crew.join(event)
            case ev.NodeLost():
                self.crew.lose(event.node, event.reason, is_gone=event.is_gone)
            case ev.StraysReported():
                self.crew.end_strays(event)
            case ev.VersionCopied() | ev.CopyFailed() | ev.VersionSealed():
                self.crew.take(event)
            case (
                ev.WorkerReady()
                | ev.WorkerDied()
                | ev.WorkerSlept()
                | ev.WorkerWoken()
                | ev.WakeFailed()
                | ev.VersionLoaded()
                | ev.UpdateFailed()
            ):
                worker = self.fleet.workers.get(event.worker)
                if worker is not None:
                    self._take_of_worker(event, worker)
            case ev.PlanMade():
                self._placement.take(event)
            case ev.CostsMeasured():
                if not self.plan.is_strict:  # what a strict run dispatches does not depend on time
                    self._feeders[event.role].measure(event.cost, event.rest_tokens)
            case ev.TaskStarted():
                pass  # dispatching starts with the task's registration: orders follow it on the same channel
            case ev.TaskEnded():
                self._end_task(event)
            case ev.SequenceAdmitted():
                step = self.steps.get(event.step)
                if step and step.stages["prompts"] is Progress.RUNNING:
                    self.sequences.admit(event.step, event.ids, event.num_prompt_tokens)
            case ev.SegmentClosed():
                for segment in event.segments:
                    self.sequences.close(event.task, segment)
            case ev.VerdictGiven():
                for verdict in event.verdicts:
                    self.sequences.judge(event.task, verdict)
            case ev.BatchCommitted():
                self.steps[event.step].finish("batch", self._out.now)
            case ev.BatchTrained():
                self.sequences.trained(event.step)
                self.steps[event.step].finish("train", self._out.now)
                self._rewind()  # the trainer may have died and come back meanwhile
            case ev.StepRecorded():
                self.steps[event.step].finish("record", self._out.now)
                self.sequences.forget(event.step)
                self.crew.progress()
            case ev.TimerFired():
                if reason := self._out.expired(event.name):
                    self._expire(event.name, reason)
            case ev.CancelAsked():
                self.steps.stop(event.reason)
                self._own.stop()
                if event.within_s and self._out.left_s("stop") > event.within_s:
                    self._out.limit_to("stop", event.within_s, event.reason)

    def _expire(self, limit: str, reason: str) -> None:
        if limit == "stop":
            self._out.end("cancelled", reason)
        elif limit == "plan":
            self._placement.expire(reason)
        elif not limit.startswith("feed:"):  # those are fed anyway
            self.crew.expire(limit, reason)

    def _take_of_worker(
        self,
        event: ev.WorkerReady
        | ev.WorkerDied
        | ev.WorkerSlept
        | ev.WorkerWoken
        | ev.WakeFailed
        | ev.VersionLoaded
        | ev.UpdateFailed,
        worker: Worker,
    ) -> None:
        match event:  # a worker that is neither ready for work nor asleep has a limit, `worker:NAME`
            case ev.WorkerReady():
                if worker.report(event.version, is_asleep=event.is_asleep, kv_tokens=event.kv_tokens):
                    self._out.clear(f"worker:{worker.name}")
                    if worker.role is Role.TRAIN:
                        self._rewind()
                    elif not event.is_asleep:
                        self._feeders[worker.role].came_up()
            case ev.WorkerSlept():
                if worker.sleep():
                    self._out.clear(f"worker:{worker.name}")
            case ev.WorkerWoken():
                if worker.wake(event.version):
                    self._out.clear(f"worker:{worker.name}")
                    if worker.role is not Role.TRAIN:
                        self._feeders[worker.role].came_up()
            case ev.WakeFailed():
                if worker.fail_to_wake(event.reason):
                    self.crew.fence(worker)
            case ev.VersionLoaded():
                if worker.load(event.version):
                    self._out.clear(f"worker:{worker.name}")
            case ev.UpdateFailed():
                if worker.refuse(event.version, event.reason):
                    self.crew.fence(worker)
            case ev.WorkerDied():
                self.crew.bury(worker, event.reason)

    def _restore(self, event: ev.RunRestored) -> None:
        self.versions.reset(event.version)
        self.steps.restore(event)
        for step in event.steps:
            for sequence in step.sequences:
                self.sequences.restore(step.step, sequence)
        self.crew.expect_nodes()

    def _go_back(self, version: int) -> None:
        """The only memory there is holds `version`, the newest checkpoint's: what was lost with the others is trained
        and published again."""
        self.sequences.suspect(self.versions.current)
        self.steps.rewind(version, unpublish=True)

    def _rewind(self) -> None:
        """What the trainer does not hold is trained again."""
        if ranks := self.fleet.there(Role.TRAIN):
            version = min(rank.version for rank in ranks)
            self.steps.rewind(version)
            self.crew.require_publishable(version)

    def _release_tasks(self, worker: Worker) -> None:
        """Its sequences wait again, its single tasks are begun again."""
        for task in self._tasks.of(worker.name):
            self._forget_task(task)
            self.sequences.release(task.id)
            if task.stage not in SERVING:
                self.steps[task.step].stages[task.stage] = Progress.PENDING

    def _end_task(self, event: ev.TaskEnded) -> None:
        task = self._tasks.get(event.task)
        if task is None:
            return
        self._forget_task(task)
        if not event.ok:
            self._out.end("failed", f"stage {task.stage} of step {task.step} failed on {task.worker}: {event.error}")
            return
        if task.stage in SERVING:
            self.sequences.release(task.id)
            return
        step = self.steps[task.step]
        if event.is_stopped:
            step.stages[task.stage] = Progress.PENDING
            return
        self.sequences.refuse(task.step, event.drops)
        if task.stage == "train":
            self.fleet.workers[task.worker].version = task.step
        if step.tasks.get(task.stage) or step.stages[task.stage] is not Progress.RUNNING:
            return  # other ranks are at it, or have died
        match task.stage:
            case "train":
                self._out.emit(CommitTrained(step=task.step))
            case "publish":
                self.crew.write(task.step)
            case _:
                step.finish(task.stage, self._out.now)
                if task.stage == "checkpoint":
                    self._save_s = step.ended["checkpoint"] - step.started["checkpoint"]

    # --- going on --------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Begin what can begin, feed what runs, finish what is complete; again until nothing changes."""
        self.crew.spread()
        self.crew.load_versions(self._load)
        while not self.ended and (steps := self.steps.open()):
            self._placement.settle(steps)
            progressed = [self._advance(step) for step in steps]
            for role in INFERENCE:
                self._feed(role, steps)
            if not any(progressed):
                self._placement.ask()
                return
        if not self._own.is_stopping:
            self._out.end("cancelled" if self.steps.stopping else "done", self.steps.stopping)

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
            step.begin(stage.name, self._out.now)
            self._write(stage, step)
            return True
        if stage.name == "checkpoint" and _SAVE_MARGIN * self._save_s > self._out.left_s("stop"):
            step.stages["checkpoint"], self.steps.may_save = Progress.SKIPPED, False
            return True
        able = self._able(stage, stage.role, step)
        if not able and (stage.name not in SERVING or self._is_to_serve(stage, step)):
            return False
        step.begin(stage.name, self._out.now)
        for worker in able if stage.everywhere else able[:1]:
            self._start_task(stage, step, worker)
        return True

    def _able(self, stage: Stage, role: Role, step: StepProgress) -> list[Worker]:
        """Who can run the stage now."""
        if stage.name in NEEDS_NO_SLOTS:
            return self.fleet.there(role)
        if stage.path == OWN_PATH:
            return self.fleet.there(role)
        ready = self.fleet.ready(role)
        return [w for w in ready if w.version == step.step] if stage.name == "evaluate" else ready

    def _write(self, stage: Stage, step: StepProgress) -> None:
        if stage.name == "batch":
            ids, dropped = plan_batch(self.sequences.of_step(step.step))
            self.sequences.batch(step.step, ids, dropped)
            self._out.emit(CommitBatch(step=step.step, ids=ids, dropped=dropped))
        else:
            self._out.emit(RecordStep(step=step.step))

    def _serve(self, stage: Stage, step: StepProgress) -> bool:
        """Feed a running stage. True if it came to its end."""
        if stage.name == "publish":
            return self._finish_publish(step)
        role = SERVING.get(stage.name)
        if role is None:
            return False
        tasks = step.tasks[stage.name]
        assert self.sequences.size(step.step) == self.plan.sequences_per_step, step
        if self._is_to_serve(stage, step):
            for worker in self.fleet.ready(role):
                if worker.name not in tasks.values():
                    self._start_task(stage, step, worker)
        elif tasks:
            for task in (self._tasks[id] for id in tasks):
                if not task.is_ending:
                    task.is_ending = True
                    self._out.emit(EndTask(task=task.id, worker=task.worker))
        else:
            step.finish(stage.name, self._out.now)
            return True
        return False

    def _is_to_serve(self, stage: Stage, step: StepProgress) -> bool:
        places = (place for role in _LEADS_TO[stage.name] for place in (WAITING[role], RUNNING[role]))
        return self.sequences.num_of(step.step, *places) > 0

    def _feed(self, role: Role, steps: list[StepProgress]) -> None:
        """Give what waits to the replicas, those of rollout only if they serve the newest version: then no token is
        older than the step allows, and the versions of a sequence never decrease."""
        stage, feeder = role.value, self._feeders[role]
        served = {step.step: step.tasks[stage] for step in steps if step.stages[stage] is Progress.RUNNING}
        oldest = {step: self.plan.oldest_version(step) for step in served}
        queue, waiting = due(self.sequences, role, oldest, self.versions.current)
        if served and (waiting or feeder.is_uneven):
            servers = self._servers(role, {step: served[step] for step in waiting or served})
            feeder.feed(queue, servers, self._out.now)

    def _servers(self, role: Role, served: dict[int, dict[str, str]]) -> list[Server]:
        """The replicas that take sequences of all these steps."""
        found: dict[str, dict[int, str]] = {}
        for step, tasks in served.items():
            for task, name in tasks.items():
                if not self._tasks[task].is_ending:
                    found.setdefault(name, {})[step] = task
        current = self.versions.current
        servers = [
            Server(worker, found[worker.name])
            for worker in self.fleet.ready(role)
            if len(found.get(worker.name, ())) == len(served) and (role is Role.REWARD or worker.version == current)
        ]
        coming = [worker for worker in self.fleet.waking(role) if role is Role.REWARD or worker.asked == current]
        return [*servers, *(Server(worker, {}) for worker in coming)] if servers else []

    def _load(self, worker: str) -> int:
        """How many sequences it runs, of all steps."""
        return sum(self.sequences.num_running(task.id) for task in self._tasks.of(worker))

    def _finish_publish(self, step: StepProgress) -> bool:
        """A step is published when all replicas that are awake serve its version; those that load are waited for. One
        that wakes later does so with the newest."""
        if self.versions.current < step.step or self.fleet.loading(Role.ROLLOUT):
            return False
        is_served = all(worker.version >= step.step for worker in self.fleet.ready(Role.ROLLOUT))
        if is_served:
            step.finish("publish", self._out.now)
        return is_served

    # --- small verbs -----------------------------------------------------------------------------------------------

    def _start_task(self, stage: Stage, step: StepProgress, worker: Worker) -> None:
        task = self._tasks.begin(stage.name, step.step, worker.name)
        step.tasks[stage.name][task.id] = worker.name
        version = step.step if stage.name in ("publish", "checkpoint", "evaluate") else step.step - 1
        if stage.name in ("prompts", "rollout"):
            version = max(0, self.plan.oldest_version(step.step))
        self._out.emit(StartTask(task=task.id, stage=stage.name, step=step.step, worker=worker.name, version=version))
        if not self._own.limit(task):
            self._out.limit(f"task:{task.id}", "save_s" if stage.name == "checkpoint" else "stage_s")

    def _forget_task(self, task: Task) -> None:
        self._tasks.end(task)
        self.steps[task.step].tasks.get(task.stage, {}).pop(task.id, None)
        self._out.clear(f"task:{task.id}")
