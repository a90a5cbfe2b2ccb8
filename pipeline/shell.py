"""Events in ▶ core ▶ decisions performed: the live shell.

Every decision ends in an event: at once (a write to the index), or when an agent or worker reports. The shell keeps
what the core must not see: the result of each task, the probe of each version, how long things took.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from pipeline import wire, wire_gps
from pipeline.bindings import NodeBindings
from pipeline.config import Config
from pipeline.copies import Copies
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.core import Core
from pipeline.core.dag import OWN_PATH, STAGES, Progress
from pipeline.core.events import Role
from pipeline.journal import Journal
from pipeline.kill_points import kill_point
from pipeline.metrics import Row
from pipeline.preload import of_worker
from pipeline.stage import StageSpec, StageTask
from pipeline.step_parts import StepParts
from pipeline.wire_shift import Prepare, Probe, Sleep, Slept, Wake, WakeFailed, Woken

if TYPE_CHECKING:
    from pipeline.queue.client import QueueClient

_PATHS = {stage.name: stage.path for stage in STAGES}


class Job(Protocol):
    """A submitit job in a warm worker."""

    def finish(self) -> None: ...
    def fail(self, reason: str) -> None: ...
    def outcome(self) -> tuple[bool, Any, str]:
        """Whether it succeeded, its result, its error."""


class Executor(Protocol):
    def submit_to(self, worker: str, task: str, call: Callable[[], Any]) -> Job:
        """Put the pickle in place, then launch it in the worker."""


@dataclass
class Node:
    """An agent as the shell sees it."""

    name: str
    peer: bytes
    num_slots: int
    bindings: NodeBindings = field(default_factory=NodeBindings)


@dataclass
class RunningTask:
    job: Job
    stage: str
    step: int
    worker: str
    submitted: float
    started: float = 0.0


class Watcher(Protocol):
    """Who is told what happens, and answers for the planner. Nothing that it does may raise."""

    def heard(self, message: wire.FromWorker | wire.WorkerExited) -> None:
        """Before the event that comes of it."""

    def after(self, event: ev.Event, decisions: list[de.Decision], now: float) -> None:
        """The core took the event; nothing of what it decided is performed."""

    def ask(self, number: int, cause: str) -> None:
        """Ends in PlanMade of this number."""


class Shell:
    """Takes events one by one, in the order in which they came, and performs what the core decides."""

    def __init__(
        self,
        *,
        core: Core,
        config: Config,
        attempt: int,
        journal: Journal,
        send: Callable[[bytes, wire.ToAgent], Awaitable[None]],
        make_row: Callable[[int, StepParts], Row],
        export: Callable[[int, Row], None],
        start_node: Callable[[str], None],
        end_node: Callable[[str, str], None],
        copies: Copies,
        keep_judged: Callable[[int, list[dict[str, Any]]], None] = lambda step, samples: None,
    ) -> None:
        self.core, self.config, self.attempt = core, config, attempt
        self.executor: Executor
        self.queue: QueueClient
        self.watcher: Watcher
        self.nodes: dict[str, Node] = {}
        self.tasks: dict[str, RunningTask] = {}
        self.parts: dict[int, StepParts] = {}
        self.latencies: list[float] = []
        """Seconds from the submission of a task to its start."""
        self.ended: asyncio.Future[de.EndRun] = asyncio.get_running_loop().create_future()
        self._journal, self._send, self._make_row, self._export = journal, send, make_row, export
        self._start_node, self._end_node, self._copies = start_node, end_node, copies
        self._keep_judged = keep_judged
        self._inbox: asyncio.Queue[ev.Event] = asyncio.Queue()
        self._probes: dict[int, Probe] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._launches: list[tuple[str, str, str]] = []
        self._io = ThreadPoolExecutor(1, thread_name_prefix="queue-calls")

    def post(self, event: ev.Event) -> None:
        """An event happened. Call from the loop's thread."""
        self._inbox.put_nowait(event)

    def launch(self, worker: str, task: str, folder: str) -> None:
        """Called by the executor once the task's pickle is in place."""
        self._launches.append((worker, task, folder))

    async def run(self, restored: ev.RunRestored) -> None:
        """Consumes the inbox, produces decisions; ends when the core ends the run. `restored` goes first."""
        await self.take(restored)
        while not self.ended.done():
            await self.take(await self._inbox.get())

    async def take(self, event: ev.Event) -> None:
        now = time.monotonic()
        self._journal.write(event, now)
        failed: list[ev.Event] = []
        if isinstance(event, ev.NodeLost):
            failed = self._copies.node_lost(event.node, event.reason)
            for worker in self.core.fleet.workers.values():
                if worker.node == event.node:
                    self._fail_jobs(worker.name, event.reason)
        decisions = self.core.handle(event, now)
        waiting = sum(map(len, self.core.sequences.waiting.values()))
        for parts in self.parts.values():
            parts.queue_depth = max(parts.queue_depth, waiting)
        self.watcher.after(event, decisions, now)
        for decision in decisions:
            await self._perform(decision)
        for copy_failed in failed:
            self.post(copy_failed)

    def close(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._io.shutdown(wait=False, cancel_futures=True)

    # --- performing ------------------------------------------------------------------------------------------------

    async def _perform(self, decision: de.Decision) -> None:
        match decision:
            case de.StartNode():
                self._start_node(decision.node)
            case de.EndNode():
                self._end_node(decision.node, decision.reason)
            case de.StartWorker():
                await self._start_worker(decision)
            case de.ShiftDown():
                await self._to_worker(decision.worker, Sleep(worker=decision.worker))
                kill_point("shell.sleep_sent")
                for name in decision.following:
                    await self._to_worker(name, Prepare(worker=name, version=decision.version))
            case de.ShiftUp():
                of_policy = self.core.fleet.workers[decision.worker].role is Role.ROLLOUT
                probe = self._probes.get(decision.version) if of_policy else None
                wake = Wake(worker=decision.worker, version=decision.version, probe=probe)
                await self._to_worker(decision.worker, wake)
                kill_point("shell.wake_sent")
            case de.AskPlanner():
                self.watcher.ask(decision.number, decision.cause)
            case de.FenceReplica():
                await self._to_worker(decision.worker, wire.KillWorker(worker=decision.worker, reason=decision.reason))
            case de.EndStray():
                await self._to_node(decision.node, wire.KillWorker(worker=decision.worker, reason=decision.reason))
            case de.StartTask():
                await self._start_task(decision)
            case de.EndTask():
                await self._to_worker(decision.worker, wire.EndTask(worker=decision.worker, task=decision.task))
            case de.Dispatch():
                message = wire.DispatchTask(
                    worker=decision.worker, task=decision.task, ids=list(decision.ids), turns=list(decision.turns)
                )
                await self._to_worker(decision.worker, message)
            case de.Abort():
                abort = wire.AbortTask(worker=decision.worker, task=decision.task, ids=list(decision.ids))
                await self._to_worker(decision.worker, abort)
            case de.CommitBatch():
                this, before = self.core.steps[decision.step], self.core.steps.get(decision.step - 1)
                parts = self.step_parts(decision.step).kept(this, before, time.monotonic())
                await self._call(self.queue.commit_batch, decision.step, decision.ids, decision.dropped, parts)
                kill_point("shell.batch_committed")
                self.post(ev.BatchCommitted(step=decision.step))
            case de.CommitTrained():
                trained, dropped = await self._call(self.queue.commit_trained, decision.step)
                kill_point("shell.trained_committed")
                self.step_parts(decision.step).num_sequences = (trained, dropped)
                self.post(ev.BatchTrained(step=decision.step, num_trained=trained, num_dropped=dropped))
            case de.CopyVersion():
                for end, move in self._copies.begin(decision, self._lives(decision.source, decision.node)).items():
                    await self._to_node(end, move)
            case de.EndCopy():
                for end in self._copies.ends(decision.node):
                    await self._to_node(end, wire.KillWorker(worker=wire_gps.MOVER, reason=decision.reason))
            case de.SealVersion():
                seal = wire.SealVersion(version=decision.version, piles=list(decision.piles))
                await self._to_node(decision.node, seal)
            case de.LoadVersion():
                probe = self._probes.get(decision.version)
                load = wire.LoadVersion(
                    worker=decision.worker, version=decision.version, keep_kv=decision.keep_kv, probe=probe
                )
                await self._to_worker(decision.worker, load)
            case de.RecordStep():
                await self._record_step(decision.step)
            case de.SetTimer():
                self._set_timer(decision)
            case de.EndRun():
                self.ended.set_result(decision)

    async def _start_worker(self, decision: de.StartWorker) -> None:
        message = wire.StartWorker(
            worker=decision.worker,
            role=decision.role,
            index=decision.index,
            life=decision.life,
            slots=list(decision.slots),
            version=decision.version,
            main="stages.worker:main",
            options={"queue": self.queue.endpoint},
            preload=of_worker(self.config, decision.role) if self.config.by_steps else [],
            is_shared=decision.is_shared,
        )
        await self._to_node(decision.node, message)

    async def _start_task(self, decision: de.StartTask) -> None:
        spec = StageSpec(
            task=decision.task,
            stage=decision.stage,
            step=decision.step,
            version=decision.version,
            attempt=self.attempt,
            is_own=decision.stage not in _PATHS,
        )
        submitted = time.monotonic()
        job = self.executor.submit_to(
            decision.worker, decision.task, StageTask(_PATHS.get(decision.stage, OWN_PATH), spec)
        )
        self.tasks[decision.task] = RunningTask(job, decision.stage, decision.step, decision.worker, submitted)
        launches, self._launches = self._launches, []
        for worker, task, folder in launches:
            await self._to_worker(worker, wire.RunTask(worker=worker, task=task, folder=folder))

    async def _record_step(self, step: int) -> None:
        """The row is durable before anything else is told of it. The first of a step holds."""
        row = self._make_row(step, self.step_parts(step))
        if not await self._call(self.queue.record_step, step, row):
            row = dict(await self._call(self.queue.step_rows, step - 1))[step]
        kill_point("shell.step_recorded")
        self._export(step, row)
        self.parts.pop(step, None)
        self._probes = {v: p for v, p in self._probes.items() if v >= step}
        self.post(ev.StepRecorded(step=step))

    async def _call(self, call: Callable[..., Any], *args: Any) -> Any:
        """A blocking call to the queue server, off the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._io, lambda: call(*args))

    async def _to_worker(self, worker: str, message: wire.ToAgent) -> None:
        await self._to_node(self.core.fleet.workers[worker].node, message)

    async def _to_node(self, name: str, message: wire.ToAgent) -> None:
        """Nothing is said to a node that is lost; the event that says so is on its way."""
        node = self.nodes.get(name)
        if node is not None:
            await self._send(node.peer, message)

    def _lives(self, source: str, node: str) -> tuple[bytes, bytes]:
        """Of a node that is lost there is none; that it is, is about to be heard, and ends its copies."""
        one, other = (self.nodes[name].peer if name in self.nodes else b"" for name in (source, node))
        return one, other

    def _set_timer(self, decision: de.SetTimer) -> None:
        timer = self._timers.pop(decision.name, None)
        if timer is not None:
            timer.cancel()
        if decision.after_s > 0:
            fire = ev.TimerFired(name=decision.name)
            self._timers[decision.name] = asyncio.get_running_loop().call_later(decision.after_s, self.post, fire)

    def step_parts(self, step: int) -> StepParts:
        """Of a step whose row is durable nothing is kept: it is trained again, because weights were lost."""
        found = self.core.steps.get(step)
        is_recorded = found is None or found.stages["record"] is Progress.DONE
        return StepParts() if is_recorded else self.parts.setdefault(step, StepParts())

    # --- what workers report ---------------------------------------------------------------------------------------

    def on_worker(self, message: wire.FromWorker | wire.WorkerExited) -> None:
        """A worker's report becomes an event; what the core need not see stays here."""
        self.watcher.heard(message)
        match message:
            case wire.WorkerReady():
                ready = ev.WorkerReady(
                    worker=message.worker,
                    version=message.version,
                    is_asleep=message.is_asleep,
                    kv_tokens=message.kv_tokens,
                )
                self.post(ready)
            case Slept():
                self.post(ev.WorkerSlept(worker=message.worker))
            case Woken():
                self.post(ev.WorkerWoken(worker=message.worker, version=message.version))
            case WakeFailed():
                self.post(ev.WakeFailed(worker=message.worker, reason=message.reason))
            case wire.WorkerExited():
                self._fail_jobs(message.worker, message.reason)
                self.post(ev.WorkerDied(worker=message.worker, reason=message.reason))
            case wire.TaskStarted():
                self._task_started(message.task)
            case wire.TaskEnded():
                self._task_ended(message.task)
            case wire.Admitted():
                nums = tuple(message.num_prompt_tokens)
                self.post(ev.SequenceAdmitted(step=message.step, ids=tuple(message.ids), num_prompt_tokens=nums))
            case wire.SegmentsClosed():
                segments = tuple(
                    ev.SegmentInfo(
                        id=s.id, idx=s.idx, num_tokens=s.num_tokens, version=s.version, finish=ev.Finish(s.finish)
                    )
                    for s in message.segments
                )
                self.post(ev.SegmentClosed(task=message.task, segments=segments))
            case wire.VerdictsGiven():
                verdicts = tuple(
                    ev.VerdictInfo(id=v.id, score=v.score, failure=v.failure, num_tokens=v.num_tokens)
                    for v in message.verdicts
                )
                self.post(ev.VerdictGiven(task=message.task, verdicts=verdicts))
            case wire.VersionLoaded():
                speed = message.gigabytes / max(message.seconds, 1e-9)
                load = {"task_s/load": message.seconds, "gps/read_gbps": speed}
                self.step_parts(message.version).metrics.setdefault("load", []).append(load)
                self.post(ev.VersionLoaded(worker=message.worker, version=message.version))
            case wire.UpdateFailed():
                self.post(ev.UpdateFailed(worker=message.worker, version=message.version, reason=message.reason))

    def _fail_jobs(self, worker: str, reason: str) -> None:
        for task_id in [t for t, running in self.tasks.items() if running.worker == worker]:
            self.tasks.pop(task_id).job.fail(reason)

    def _task_started(self, task_id: str) -> None:
        task = self.tasks.get(task_id)
        if task is not None:
            task.started = time.monotonic()
            self.latencies.append(task.started - task.submitted)
            self.post(ev.TaskStarted(task=task_id))

    def _task_ended(self, task_id: str) -> None:
        task = self.tasks.pop(task_id, None)
        if task is None:
            return
        task.job.finish()
        ok, result, error = task.job.outcome()
        metrics = dict(result.get("metrics", {})) if ok else {}
        if task.stage != "checkpoint":  # the step's row is durable before its checkpoint is begun
            self.step_parts(task.step).metrics.setdefault(task.stage, []).append(metrics)
        if ok and (samples := result.get("samples")):
            self._keep_judged(task.step, samples)
        if ok and "probe" in result:
            self._probes[task.step] = msgspec.convert(result["probe"], Probe)
        own = result if ok else {}
        ended = ev.TaskEnded(
            task=task_id,
            ok=ok,
            result=metrics,
            error=_cause_first(error),
            drops=tuple(own.get("drop", {}).items()),
            is_stopped=bool(own.get("is_stopped")),
        )
        self.post(ended)


def _cause_first(trace: str) -> str:
    """A traceback says last what is to be read first."""
    lines = trace.strip().splitlines()
    return "\n".join([lines[-1], *lines]) if len(lines) > 1 else trace
