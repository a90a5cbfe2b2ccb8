"""The controller of a run: one process, one attempt.

    hold nodes ▶ queue server, agents ▶ restore from checkpoint and index ▶ (events ▶ core ▶ decisions) ▶ close

It is the root of the run's process tree and the only one that reacts to signals. Data never passes through it.
"""

import asyncio
import contextlib
import importlib
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.begin import Begun, Cluster, begin
from pipeline.checkpoint import Newest, store_of
from pipeline.config import Config
from pipeline.config_engine import EngineOptions
from pipeline.config_room import block_slots, replicas_of
from pipeline.core import events as ev
from pipeline.core.core import Core, RunPlan
from pipeline.core.errors import ConfigError, PivotError, RunError
from pipeline.core.events import Role
from pipeline.core.fleet import Capacity
from pipeline.core.modes import ModeName
from pipeline.core.worker import WorkerState
from pipeline.disk import Reserve, explain_full, is_full_error
from pipeline.environment import write_environment
from pipeline.gps.room import store_bytes
from pipeline.journal import Journal
from pipeline.metrics import Row, step_row
from pipeline.nodes import Nodes
from pipeline.processes import STOPPING, say
from pipeline.run_folder import RunFolder, write_json
from pipeline.shell import Executor, Shell
from pipeline.sinks.feed import Sinks
from pipeline.status import EXIT_CODES, StatusFile
from pipeline.step_parts import StepParts
from pipeline.summary import summarise
from pipeline.tracking import MetricsLog, Tracking
from pipeline.watcher import Watcher
from pipeline.watching.judge import Failing, told
from pipeline.weights_view import describe_weights

if TYPE_CHECKING:
    from pipeline.queue.client import QueueClient

_SEND_S, _SEND_FULL_S = 30.0, 5.0
"""How long MLflow may take for what waits at the end of a run; its database may lie on the disk that is full."""

_CLOSE_S = 5.0
"""Of the time that Slurm gives a job, what is kept for its end, once everything is saved."""
_COMES_AGAIN = 75
"""Exit code of a controller whose job is to be requeued; nobody reads it but people."""

Launch = Callable[[str, str, str], None]


def make_plan(config: Config) -> RunPlan:
    capacities = {Role.ROLLOUT: _capacity(config.rollout.engine, config.rollout.max_response_length)}
    if config.judge_engine is not None and config.reward.genrm is not None:
        capacities[Role.REWARD] = _capacity(config.judge_engine, config.reward.genrm.max_tokens)
    return RunPlan(
        total_steps=config.trainer.total_training_steps,
        sequences_per_step=config.sequences_per_step,
        replicas=replicas_of(config),
        num_nodes=config.cluster.nodes,
        min_nodes=config.cluster.min_nodes or config.cluster.nodes,
        save_freq=config.checkpoint.save_freq,
        evaluate_freq=config.evaluate.freq,
        restarts=config.limits.restarts,
        stage_s=config.limits.stage_s,
        save_s=config.limits.save_s,
        publish_s=config.limits.publish_s,
        engine_start_s=config.limits.engine_start_s,
        shift_s=config.limits.shift_s,
        staleness=config.algorithm.staleness,
        is_streaming=config.placement.admission == "stream",
        keep_kv=config.rollout.on_update == "keep_kv",
        writes_shares=config.trainer.strategy in ("ddp", "fsdp2"),
        mode=ModeName(config.placement.mode),
        block_slots=block_slots(config),
        has_planner=config.placement.mode == "shiftable",
        is_strict=config.is_strict,
        capacities=capacities,
        own=config.own_stages,
        num_piles=config.num_piles,
    )


def _capacity(engine: EngineOptions, longest: int) -> Capacity:
    return Capacity(max_num_seqs=engine.max_num_seqs, longest=longest)


class Controller:
    """`make_executor(folder, launch)` and `cluster` come from the resource edge; the rest is the same everywhere."""

    def __init__(
        self,
        run: RunFolder,
        config: Config,
        cluster: Cluster,
        make_executor: Callable[[Path, Launch], Executor],
        begun: Begun | None = None,
    ) -> None:
        """`begun`: the attempt's processes, if they have been started."""
        self.run, self.config, self.cluster, self.make_executor = run, config, cluster, make_executor
        self.attempt = begun.attempt if begun else run.begin_attempt()
        self._begun = begun
        self.started = time.monotonic()
        if not cluster.agents_come:  # of a job it is the submission that does it: a marker here is a cancel's
            run.ended.unlink(missing_ok=True)
        self.status = StatusFile(run, config, self.attempt, os.getpid())
        self.status.write()
        self.core = Core(make_plan(config))
        self.reserve = Reserve(run.reserve)
        self._restored = asyncio.Event()
        self._interrupts = 0
        self._comes_again = False
        self._is_full = False

    async def main(self, signals: Sequence[int] = ()) -> int:
        """Run to the end; return the exit code. Whatever happens, the run's folder says how it ended. `signals` are
        those that came before."""
        self._end = ("failed", "")
        async with contextlib.AsyncExitStack() as self._opened:
            self._end = await self._run(signals)
            if self._is_full:
                self._write_end()  # at once: what closes after this may still want to write
        self._write_end()
        return EXIT_CODES.get(self._end[0], _COMES_AGAIN)

    async def _run(self, signals: Sequence[int]) -> tuple[str, str]:
        """The border of the process: how the run ended, and the first cause if it failed."""
        status, reason, trace = "failed", "", ""
        try:
            self._opened.callback(self.reserve.give_back)
            self._opened.callback(self.cluster.stop)
            begun = self._begun or begin(self.run, self.attempt, self.cluster, self.config.limits.restarts)
            self.channel, self.queue = begun.channel, begun.queue
            self._opened.callback(self.queue.stop)
            self._opened.callback(self.channel.close)
            self.reserve.take()
            self._open(begun, signals)
            status, reason = await self._until_the_end()
        except Exception as error:
            trace = traceback.format_exc()
            reason = str(error) if isinstance(error, PivotError) else f"controller: {type(error).__name__}: {error}"
            self._is_full = is_full_error(error)
        if status == "failed" and (full := explain_full(self.run.path, reason, self.config.checkpoint.uri)):
            self._is_full, reason = True, full
        if self._is_full:
            self.reserve.give_back()
        if self._comes_again and status == "cancelled":
            status = "requeued"
        if status == "requeued" and self.cluster.returns_times < 1:
            most = self.config.cluster.slurm.max_requeues
            status = "failed"
            reason = f"timed out: {reason}, and its job was requeued {most} times (cluster.slurm.max_requeues)"
        if trace:
            say(f"{trace}{reason}")
        return status, reason

    # --- starting --------------------------------------------------------------------------------------------------

    def _open(self, begun: Begun, signals: Sequence[int]) -> None:
        """Make the parts that live in this process; they are closed in the opposite order."""
        self.metrics_log = MetricsLog(self.run.metrics)
        self.tracking = Tracking(self.run, self.config, self.attempt)
        self.sinks = Sinks(self.run, self.config, self.attempt)
        self._opened.push_async_callback(self._close_tracking)
        self.nodes = Nodes(self.run, self.config, self.attempt, self.cluster, self.channel, self._newest_checkpoint)
        self.shell = self.nodes.shell = Shell(
            core=self.core,
            config=self.config,
            attempt=self.attempt,
            journal=Journal(self.run.journal(self.attempt)),
            send=self.nodes.send,
            make_row=self._make_row,
            export=self._export,
            start_node=self.nodes.start,
            end_node=self.nodes.end,
            copies=self.nodes.copies,
            keep_judged=self.tracking.log_judged,
        )
        self.watcher = self.shell.watcher = Watcher(
            self.core, self.config, self.shell.post, self.run, judge_fails=self._judge_fails
        )
        self._opened.callback(self.watcher.close)
        self.shell.executor = self.make_executor(self.run.tasks(self.attempt), self.shell.launch)
        for sig in STOPPING:
            asyncio.get_running_loop().add_signal_handler(sig, self._interrupt, sig)
        for number in signals:
            self._interrupt(signal.Signals(number))
        self._opened.push_async_callback(self._close_nodes)
        self.nodes.adopt(begun.agents)
        self.restored = self.nodes.restored = self._newest_checkpoint()

    def _newest_checkpoint(self) -> Newest:
        """The newest complete one; those that had to be skipped are named."""
        found = store_of(self.run, self.config).newest_complete()
        for name, why in found.skipped:
            say(f"checkpoint {name} is skipped: {why}")
        return found

    async def _work(self) -> None:
        """Connects to the queue, restores, then runs the shell to the end."""
        endpoint = await self.queue.endpoint(self.config.limits.request_s)
        self.shell.queue = await self._queue_client(endpoint)
        restored = await asyncio.to_thread(self._restore)  # it may keep the server busy for longer than a heartbeat
        self._restored.set()
        asyncio.get_running_loop().run_in_executor(None, write_environment, self.run, self.attempt)
        await self.shell.run(restored)

    async def _watch_queue(self) -> None:
        await self._restored.wait()
        limits = self.config.limits
        pinger = await self._queue_client(self.shell.queue.endpoint)
        await self.queue.watch(pinger.ping, limits.heartbeat_s, limits.request_s)

    async def _hear_of_queue(self) -> None:
        raise RunError(await self.queue.failure)

    async def _queue_client(self, endpoint: str) -> "QueueClient":
        # Arrow takes as long to import as its server to start, and the agents are not to wait for either.
        client = await asyncio.to_thread(importlib.import_module, "pipeline.queue.client")
        found: QueueClient = client.QueueClient(
            endpoint, self.queue.make_key(), self.attempt, self.config.limits.request_s
        )
        self._opened.callback(found.give_up)
        return found

    def _restore(self) -> ev.RunRestored:
        """What the queue's index holds above the checkpoint; metric rows are exported from there again."""
        steps = self.shell.queue.restore(self.restored.step, self.config.is_strict)
        kept = self.shell.queue.batch_parts(self.restored.step)
        self.shell.parts = {step: StepParts.restored(parts) for step, parts in kept.items() if parts}
        rows = self.shell.queue.step_rows(-1)
        self.metrics_log.rewrite(rows)
        self.tracking.resume(rows)
        self.sinks.resume(rows)
        recorded = tuple(step for step, _ in rows)
        return ev.RunRestored(version=self.restored.step, steps=tuple(steps), recorded=recorded)

    # --- the run ---------------------------------------------------------------------------------------------------

    async def _until_the_end(self) -> tuple[str, str]:
        """The first of these that ends decides: the core ended the run, or something broke."""
        tasks = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("events", self._work()),
                ("agents", self.nodes.listen()),
                ("heartbeat", self.nodes.beat()),
                ("status", self._show()),
                ("nodes", self.cluster.watch(self.nodes.gone)),
                ("queue server", self._watch_queue()),
                ("queue server's end", self._hear_of_queue()),
            )
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self.queue.failure.done():  # it explains what else has ended
                raise RunError(self.queue.failure.result())
            for ended in done:
                ended.result()
            end = self.shell.ended.result()
            return end.status, end.reason
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _show(self) -> None:
        """Writes status.json while the run goes on; endless."""
        while True:
            workers = self.core.fleet.workers
            if workers and all(w.state not in (WorkerState.PLANNED, WorkerState.STARTING) for w in workers.values()):
                self.tracking.open()
                self.sinks.open()
                self.status.value["status"] = "running"
                self.status.value |= {"mlflow": self.tracking.location, "sinks": self.sinks.state}
            self.watcher.look()
            if self.status.is_due:
                bindings = {name: node.bindings.describe() for name, node in self.shell.nodes.items()}
                self.status.show(self.core, bindings, self.watcher.picture() | {"weights": self._weights()})
            await asyncio.sleep(0.1)

    @cached_property
    def _store_bytes(self) -> dict[str, int]:
        try:
            return store_bytes(self.config)
        except ConfigError:  # a model that is gone; its agents say so
            return {}

    def _weights(self) -> dict[str, Any]:
        nodes = self.nodes
        return describe_weights(self.core, nodes.copies.made, nodes.fetches.made, self._store_bytes)

    def _make_row(self, step: int, parts: StepParts) -> Row:
        spans, began, ended = self.core.window(step)
        watched = self.watcher.metrics(step) | {"gps/host_bytes": float(sum(self._store_bytes.values()))}
        if (asked := self.nodes.fetches.num_asked) > 0:
            watched["gps/plan_cache_hit"] = self.nodes.fetches.num_known / asked
        return step_row(step, parts, *parts.whole(spans, began), ended, watched)

    def _export(self, step: int, row: Row) -> None:
        """A row that is durable goes to metrics.jsonl and MLflow: the run got further."""
        self.queue.progress()
        self.metrics_log.append(step, row)
        self.tracking.log(step, row)
        self.sinks.log(step, row)

    def _judge_fails(self, failing: Failing) -> None:
        """The answers are in the queue: they are read beside the loop, and told by status.json."""

        def read() -> None:
            answers = {}
            with contextlib.suppress(PivotError):  # the counts are told without them
                answers = {row.id: (row.failure, row.critique) for row in self.shell.queue.get(failing.ids)}
            self.status.value["judge"] = told(failing, answers, self.config.reward.genrm)

        asyncio.get_running_loop().run_in_executor(None, read)

    # --- ending ----------------------------------------------------------------------------------------------------

    def _interrupt(self, sig: signal.Signals) -> None:
        """Once: an orderly stop. Twice: at once; the kernel ends the children with this process.

        Slurm's signals do not say why. Unless the run was cancelled, which the marker of its end then says already, the
        job comes again, and the run with it.
        """
        if self.cluster.agents_come and sig is not signal.SIGINT:
            self._comes_again = not self.run.ended.exists()
            slurm = self.config.cluster.slurm
            given_s = slurm.signal_s if sig is signal.SIGUSR2 else slurm.grace_s
            self.shell.post(ev.CancelAsked(reason=f"stopped by {sig.name}", within_s=max(1.0, given_s - _CLOSE_S)))
            with contextlib.suppress(OSError):
                self.cluster.taken(slurm.signal_s)
            return
        self._interrupts += 1
        if self._interrupts > 1:
            with contextlib.suppress(OSError):
                self.status.write(status="cancelled", stage="")
                self.reserve.give_back()
                self.queue.stop()
                write_json(self.run.ended, {"status": "cancelled", "attempt": self.attempt})
            self.cluster.stop()
            os._exit(EXIT_CODES["cancelled"])
        self.shell.post(ev.CancelAsked(reason=f"stopped by {sig.name}"))

    async def _close_nodes(self) -> None:
        self.shell.close()
        await self.nodes.close(self._end[0])

    async def _close_tracking(self) -> None:
        limit_s = _SEND_FULL_S if self._is_full else _SEND_S
        closing = (asyncio.to_thread(place.close, self._end[0], limit_s) for place in (self.tracking, self.sinks))
        await asyncio.gather(*closing)
        self.status.value |= {"mlflow": self.tracking.location, "sinks": self.sinks.state}

    def _write_end(self) -> None:
        """summary.json, status.json, and the marker, last."""
        status, reason = self._end
        cause = {"reason": reason} if reason else {}
        rows: list[tuple[int, Row]] = []
        with contextlib.suppress(OSError, RunError):  # what is wrong with it is the cause by now
            rows = MetricsLog(self.run.metrics).rows()
        write_json(self.run.summary, summarise(status, rows, time.monotonic() - self.started) | cause)
        self.status.show(self.core, {}, {})
        self.status.write(status=status, stage="", error=None if status == "done" else {"reason": reason})
        if status != "requeued":
            write_json(self.run.ended, {"status": status, "attempt": self.attempt} | cause)
