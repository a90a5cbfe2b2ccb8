"""The controller of a run: one process, one attempt.

    hold nodes ▶ queue server, agents ▶ restore from checkpoint and index ▶ (events ▶ core ▶ decisions) ▶ close

It is the root of the run's process tree and the only one that reacts to signals. Data never passes through it.
"""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipeline import wire
from pipeline.channel import ControllerEnd, make_keys
from pipeline.checkpoint import CheckpointStore, Newest, local_model
from pipeline.config import Config
from pipeline.core import events as ev
from pipeline.core.core import Core, RunPlan
from pipeline.core.dag import STAGES
from pipeline.core.errors import ChannelBroken, RunError
from pipeline.core.events import Role
from pipeline.core.fleet import Replicas
from pipeline.journal import Journal
from pipeline.kill_points import be_controller
from pipeline.metrics import Row, step_row
from pipeline.processes import describe_exit, log_tail, when_ended
from pipeline.queue.process import QueueProcess
from pipeline.run_folder import RunFolder, write_json
from pipeline.shell import Executor, Node, Shell
from pipeline.status import EXIT_CODES, StatusFile
from pipeline.step_parts import StepParts
from pipeline.summary import summarise
from pipeline.tracking import MetricsLog, Tracking

_BEAT_S = 1.0
_POLL_S = 0.005
_LEAVE_S = 5.0
"""How long the agents get to leave by themselves."""

Launch = Callable[[str, str, str], None]


class Cluster(Protocol):
    """The two functions in which `local` and `slurm` differ: hold nodes, start agents."""

    def start_agents(self, attempt: int, endpoint: str) -> list[subprocess.Popen[bytes]]: ...
    def stop(self) -> None:
        """End at once what is left of the agents."""


def make_plan(config: Config) -> RunPlan:
    roles = config.placement.roles
    placed = ((Role.ROLLOUT, roles.rollout), (Role.REWARD, roles.reward), (Role.TRAIN, roles.train))
    return RunPlan(
        total_steps=config.trainer.total_training_steps,
        sequences_per_step=config.sequences_per_step,
        replicas=tuple(Replicas(role=r, replicas=p.replicas, slots=p.slots) for r, p in placed),
        num_nodes=config.cluster.nodes,
        save_freq=config.checkpoint.save_freq,
        evaluate_freq=config.evaluate.freq,
        restarts=config.limits.restarts,
        stage_s=config.limits.stage_s,
        engine_start_s=config.limits.engine_start_s,
    )


class Controller:
    """`make_executor(folder, launch)` and `cluster` come from the resource edge; the rest is the same everywhere."""

    def __init__(
        self, run: RunFolder, config: Config, cluster: Cluster, make_executor: Callable[[Path, Launch], Executor]
    ) -> None:
        self.run, self.config, self.cluster, self.make_executor = run, config, cluster, make_executor
        self.attempt = run.begin_attempt()
        self.started = time.monotonic()
        run.ended.unlink(missing_ok=True)
        self.status = StatusFile(run, config, self.attempt, os.getpid())
        self.status.write()
        self._interrupts = 0
        self._closing = False

    async def main(self) -> int:
        """Run to the end; return the exit code. Whatever happens, the run's folder says how it ended."""
        be_controller()
        loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = loop.create_future()
        for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(sig, self._interrupt, sig)
        make_keys(self.run.secrets)
        self.queue = QueueProcess(self.run, self.attempt, self._fail)
        self.queue.make_key()
        self.channel = ControllerEnd(self.run.secrets, self.attempt)
        self.tracking = Tracking(self.run, self.config, self.attempt)
        self.metrics_log = MetricsLog(self.run.metrics)
        self.core = Core(make_plan(self.config))
        self.shell = Shell(
            core=self.core,
            config=self.config,
            attempt=self.attempt,
            journal=Journal(self.run.journal(self.attempt)),
            send=self._send,
            make_row=self._make_row,
            export=self._export,
            newest_checkpoint=lambda: self._newest_checkpoint().path,
        )
        self.shell.executor = self.make_executor(self.run.tasks(self.attempt), self.shell.launch)
        self.queue.start()
        agents = self.cluster.start_agents(self.attempt, self.channel.endpoint)
        for agent in agents:
            when_ended(agent, self._agent_ended)
        status, reason = "failed", ""
        try:
            self.restored = self._newest_checkpoint()
            status, reason = await self._until_the_end()
        except Exception as error:  # the border of the process: the cause goes into the run's folder
            traceback.print_exc()
            reason = str(error) if isinstance(error, RunError) else f"controller: {error!r}"
        await self._close(agents, status, reason)
        return EXIT_CODES[status]

    # --- starting --------------------------------------------------------------------------------------------------

    def _newest_checkpoint(self) -> Newest:
        """The newest complete one; those that had to be skipped are named."""
        found = CheckpointStore(self.config.checkpoint.uri or str(self.run.checkpoints)).newest_complete()
        for name, why in found.skipped:
            print(f"checkpoint {name} is skipped: {why}", file=sys.stderr, flush=True)
        return found

    async def _work(self) -> None:
        """Connects to the queue, restores, then runs the shell to the end."""
        # Arrow takes as long to import as its server to start, and the agents are not to wait for either.
        client = await asyncio.to_thread(importlib.import_module, "pipeline.queue.client")
        limit_s = self.config.limits.request_s
        endpoint = await self.queue.endpoint(limit_s)
        self.shell.queue = client.QueueClient(endpoint, self.queue.make_key(), self.attempt, limit_s)
        await self.shell.run(await asyncio.to_thread(self._restore))

    def _restore(self) -> ev.RunRestored:
        """What the queue's index holds above the checkpoint; metric rows are exported from there again."""
        steps = self.shell.queue.restore(self.restored.step, self.config.is_strict)
        kept = self.shell.queue.batch_parts(self.restored.step)
        self.shell.parts = {step: StepParts.restored(parts) for step, parts in kept.items() if parts}
        rows = self.shell.queue.step_rows(-1)
        self.metrics_log.rewrite(rows)
        self.tracking.resume(rows)
        recorded = tuple(step for step, _ in rows)
        return ev.RunRestored(version=self.restored.step, steps=tuple(steps), recorded=recorded)

    # --- the run ---------------------------------------------------------------------------------------------------

    async def _until_the_end(self) -> tuple[str, str]:
        """The first of these that ends decides: the core ended the run, or something broke."""
        tasks = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("events", self._work()),
                ("channel", self._listen()),
                ("heartbeat", self._beat()),
                ("status", self._show()),
            )
        ]
        try:
            done, _ = await asyncio.wait([*tasks, self._broken], return_when=asyncio.FIRST_COMPLETED)
            for ended in done:
                ended.result()
            end = self.shell.ended.result()
            return end.status, end.reason
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _listen(self) -> None:
        """Consumes frames of agents, produces events; endless. Waits for the channel."""
        while True:
            try:
                peer, frame = await self.channel.recv()
            except ChannelBroken as error:
                self._node_lost(error.peer, str(error))
                continue
            node = next((n for n in self.shell.nodes.values() if n.peer == peer), None)
            if node is not None:
                node.seen = time.monotonic()
            await self._take(peer, node, frame.body)

    async def _take(self, peer: bytes, node: Node | None, body: wire.FromAgent) -> None:
        match body:
            case wire.Join():
                known = Node(body.node, peer, body.num_slots, body.pid, time.monotonic())
                self.shell.nodes[body.node] = known
                await self._send(peer, self._welcome())
            case _ if node is None:
                await self._send(peer, wire.Quit(reason="unknown agent"))
            case wire.NodeReady():
                node.gps = body.gps
                self.shell.post(ev.NodeJoined(node=node.name, num_slots=node.num_slots))
            case wire.NodeFailed():
                self._node_lost(peer, body.reason)
            case wire.VersionSealed():
                node.sealed = body.version
                if all(n.sealed >= body.version for n in self.shell.nodes.values()):
                    self.shell.post(ev.VersionSealed(version=body.version))
            case wire.Beat():
                pass
            case _:
                self.shell.on_worker(body)

    def _welcome(self) -> wire.Welcome:
        policy, genrm = self.config.model.policy, self.config.model.genrm
        return wire.Welcome(
            policy=local_model(self.restored.path, str(self.run.cache)) if self.restored.step else policy.path,
            policy_dtype=policy.dtype,
            version=self.restored.step,
            genrm=genrm.path,
            genrm_dtype=genrm.dtype,
            preload=preload(self.config),
        )

    def _node_lost(self, peer: bytes, reason: str) -> None:
        node = next((n for n in self.shell.nodes.values() if n.peer == peer), None)
        if node is not None:
            del self.shell.nodes[node.name]
            self.shell.post(ev.NodeLost(node=node.name, reason=reason))

    def _agent_ended(self, returncode: int) -> None:
        """A local agent's process ended. Its node's name is in its log and in its last message."""
        if not self._closing:
            logs = sorted(self.run.logs(self.attempt).glob("*agent*.log"))
            tail = "\n".join(log_tail(path) for path in logs)
            self._fail(f"an agent ended ({describe_exit(returncode)})\n{tail}")

    async def _beat(self) -> None:
        """Tells each agent that the controller lives; declares silent nodes lost; endless."""
        while True:
            for node in list(self.shell.nodes.values()):
                silence = time.monotonic() - node.seen
                if silence > self.config.limits.heartbeat_s:
                    self._node_lost(node.peer, f"silent for {silence:.1f} s (limits.heartbeat_s)")
                else:
                    await self._send(node.peer, wire.Beat())
            await asyncio.sleep(_BEAT_S)

    async def _show(self) -> None:
        """Writes status.json while the run goes on; endless."""
        while True:
            workers = self.core.fleet.workers
            if workers and all(w.state == "ready" for w in workers.values()):
                self.tracking.open()
                self.status.value["status"] = "running"
                self.status.value["mlflow"] = self.tracking.location
            self.status.show(self.core)
            await asyncio.sleep(0.1)

    async def _send(self, peer: bytes, body: wire.ToAgent) -> None:
        try:
            await self.channel.send(peer, body)
        except ChannelBroken as error:
            self._node_lost(peer, str(error))

    def _make_row(self, step: int, parts: StepParts) -> Row:
        spans, began, ended = self.core.window(step)
        return step_row(step, parts, *parts.whole(spans, began), ended)

    def _export(self, step: int, row: Row) -> None:
        """A row that is durable goes to metrics.jsonl and MLflow."""
        self.metrics_log.append(step, row)
        self.tracking.log(step, row)

    # --- ending ----------------------------------------------------------------------------------------------------

    def _interrupt(self, sig: signal.Signals) -> None:
        """Once: an orderly stop. Twice: at once; the kernel ends the children with this process."""
        self._interrupts += 1
        if self._interrupts > 1:
            self.status.write(status="cancelled", stage="")
            self.cluster.stop()
            os._exit(EXIT_CODES["cancelled"])
        self.shell.post(ev.CancelAsked(reason=f"stopped by {sig.name}"))

    def _fail(self, reason: str) -> None:
        """Something below the core broke: end the run."""
        if not self._broken.done():
            self._broken.set_exception(RunError(reason))

    async def _close(self, agents: list[subprocess.Popen[bytes]], status: str, reason: str) -> None:
        self._closing = True
        for node in list(self.shell.nodes.values()):
            await self._send(node.peer, wire.Quit(reason=status))
        deadline = time.monotonic() + _LEAVE_S
        while any(a.poll() is None for a in agents) and time.monotonic() < deadline:
            await asyncio.sleep(_POLL_S)
        self.cluster.stop()
        self.channel.close()
        self.queue.stop()
        await asyncio.to_thread(self.tracking.close, status)
        self._write_summary(status)
        error = None if status == "done" else {"reason": reason}
        self.status.show(self.core, at_once=True)
        self.status.write(status=status, stage="", error=error, mlflow=self.tracking.location)
        write_json(self.run.ended, {"status": status, "attempt": self.attempt})

    def _write_summary(self, status: str) -> None:
        rows = self.metrics_log.rows()
        write_json(self.run.summary, summarise(status, rows, time.monotonic() - self.started))


def preload(config: Config) -> list[str]:
    """What the zygote imports before it forks: all that this run's workers need, and nothing else."""
    engines = {config.rollout.engine.name, config.reward.genrm.engine.name}
    starts = ["stages.engines.vllm_start"] if "vllm" in engines else []
    starts += ["stages.engines.torch_start"] if config.trainer.strategy != "emulated" else []
    makers = [f"stages.engines.{name}" for name in sorted(engines)]
    makers += ["stages.rl.emulated" if config.trainer.strategy == "emulated" else "stages.rl.trainer"]
    paths = sorted({stage.path.partition(":")[0] for stage in STAGES if stage.path})
    return [*starts, *makers, *paths, "stages.worker", "pipeline.queue.client"]
