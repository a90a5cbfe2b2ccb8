"""A controller without decisions: a real channel, a real local cluster, and a wait for whatever is reported."""

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pipeline import wire
from pipeline.channel import ControllerEnd, make_keys
from pipeline.config import Config, save_resolved
from pipeline.core.errors import ChannelBroken
from pipeline.run_folder import RunFolder
from slurm.executor import ElasticExecutor, ElasticJob
from slurm.local import LocalCluster
from slurm.names import gps_base, user_prefix
from tests.fakes.scripted import make_config

M = TypeVar("M")
T = TypeVar("T")
NODE = "local-0"
PRELOAD = ["stages.worker", "stages.engines.emulated", "stages.rl.emulated"]
WAIT_S = 20.0


def make_run(path: Path, config: Config) -> tuple[RunFolder, int]:
    """A run folder whose first attempt has begun."""
    run = RunFolder(path)
    run.create()
    save_resolved(config, run.config)
    make_keys(run.secrets)
    return run, run.begin_attempt()


def shared_memory(run: RunFolder, attempt: int) -> list[str]:
    """What lies in /dev/shm of this run's node."""
    base = gps_base(run, attempt, NODE)
    return sorted(name for name in os.listdir("/dev/shm") if name.startswith(base))


def temporary_folders(pid: int) -> list[str]:
    """Of the agent with this pid."""
    return [str(path) for path in Path("/tmp").glob(f"{user_prefix()}*-{pid}-*")]


def until(condition: Callable[[], T], what: str) -> T:
    """Wait for the condition to become true; returns its value."""
    deadline = time.monotonic() + WAIT_S
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}"
        time.sleep(0.002)
    return value


def is_gone(pid: int) -> bool:
    """Dead; a zombie is dead too."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def start_order(
    worker: str,
    role: str = "rollout",
    main: str = "stages.worker:main",
    version: int = 0,
    shares: Sequence[int] = (),
    **options: Any,
) -> wire.StartWorker:
    """`shares`: slots on which it is not alone."""
    return wire.StartWorker(
        worker=worker,
        role=role,
        index=0,
        life=0,
        slots=list(shares),
        version=version,
        main=main,
        options=options,
        is_shared=bool(shares),
    )


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Rig:
    """One node. `heard` holds what was reported and not yet expected, in order."""

    wait_s = WAIT_S

    def __init__(self, path: Path, *, patience_s: float | None = None, **sections: Any) -> None:
        self.runner = asyncio.Runner()
        self.config = self.make_config(**sections)
        self.run, self.attempt = make_run(path, self.config)
        self.heard: list[Any] = []
        self.peer = b""
        self.pids: dict[str, int] = {}
        self.num_tasks = 0
        self.cluster = LocalCluster(self.run)
        self.do(self._open())
        self.executor = ElasticExecutor(self.run.tasks(self.attempt), self._launch)
        if patience_s is not None:
            command = self.cluster.agent_command
            self.cluster.agent_command = lambda *args: [*command(*args), "--patience", str(patience_s)]
        self.start_agent()

    def make_config(self, **sections: Any) -> Config:
        return make_config(**sections)

    async def _open(self) -> None:
        self.end = ControllerEnd(self.run.secrets, self.attempt)

    def start_agent(self) -> None:
        """Again, if there was one."""
        self.agent = self.cluster.start_agent(NODE, self.attempt, self.end.endpoint)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(work, self.wait_s))

    def expect(self, kind: type[M], **fields: Any) -> M:
        """The first report of this kind with these fields, now or to come."""
        return self.do(self._expect(kind, fields))

    async def _expect(self, kind: type[M], fields: dict[str, Any]) -> M:
        seen = 0
        while True:
            for index, message in enumerate(self.heard[seen:], seen):
                if isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items()):
                    return self.heard.pop(index)
            seen = len(self.heard)
            peer, frame = await self.end.recv()
            if isinstance(frame.body, wire.Beat):
                with contextlib.suppress(ChannelBroken):  # it has left meanwhile
                    await self.end.send(peer, wire.Beat())
                continue
            if isinstance(frame.body, wire.Join):
                self.peer = peer
            self.heard.append(frame.body)

    def send(self, body: wire.ToAgent) -> None:
        self.do(self.end.send(self.peer, body))

    def welcome(self, preload: list[str] = PRELOAD) -> None:
        """Join ▶ Welcome."""
        self.expect(wire.Join, node=NODE)
        policy, genrm = self.config.model.policy, self.config.model.genrm
        self.send(
            wire.Welcome(
                policy=policy.path,
                policy_dtype=policy.dtype,
                version=0,
                genrm=genrm.path,
                genrm_dtype=genrm.dtype,
                preload=preload,
                has_mover=False,
            )
        )

    def start_worker(
        self, worker: str, role: str = "rollout", main: str = "stages.worker:main", **options: Any
    ) -> None:
        self.send(start_order(worker, role, main, **options))

    def ready(self, worker: str) -> None:
        self.pids[worker] = self.expect(wire.WorkerReady, worker=worker).pid

    def submit(self, worker: str, call: Callable[[], Any]) -> ElasticJob:
        self.num_tasks += 1
        return self.executor.submit_to(worker, f"t-{self.num_tasks}", call)

    def _launch(self, worker: str, task: str, folder: str) -> None:
        self.send(wire.RunTask(worker=worker, task=task, folder=folder))

    def result(self, job: ElasticJob) -> Any:
        self.expect(wire.TaskEnded, task=job.job_id)
        job.finish()
        return job.result()

    def call(self, worker: str, call: Callable[[], Any]) -> Any:
        return self.result(self.submit(worker, call))

    def close(self) -> None:
        self.cluster.stop()
        self.do(self._close())
        self.runner.close()

    async def _close(self) -> None:
        self.end.close()
