"""The controller's side of real agents and a real launcher in a real job, without a core: the test decides."""

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipeline import wire
from pipeline.channel import ControllerEnd
from pipeline.checkpoint import Newest
from pipeline.core import events as ev
from pipeline.core.events import Role
from pipeline.nodes import Nodes
from pipeline.preload import of_worker
from slurm.allocation import Predecessor, background
from slurm.job import JobCluster
from tests.cluster import SlurmCluster
from tests.fakes.scripted import make_config
from tests.scenarios.runs import ROOT
from tests.slurm.rig import children as children_of
from tests.slurm.rig import make_run, until
from tests.slurm.watch import Inbox, Watch

SLOTS = 4


class JobWatch(Watch):
    """A job of one node. This process is its controller, and in none of its steps."""

    def __init__(self, path: Path, slurm: SlurmCluster, launcher: str = "step") -> None:
        self.slurm = slurm
        self.runner = asyncio.Runner()
        asked = {"launcher": launcher, "mem": "4000", "cpus_per_slot": 1}
        self.config = make_config(cluster={"kind": "slurm", "slots_per_node": SLOTS, "slurm": asked})
        self.run, self.attempt = make_run(path, self.config)
        self.shell = Inbox()
        self.newest = Newest(0, "", [])
        script = path / "script"
        lines = background(self.run, self.config, Predecessor())
        script.write_text(
            "\n".join(["#!/bin/bash", f"export PYTHONPATH={shlex.quote(str(ROOT))}", *lines, "sleep 600"])
        )
        self.job = slurm.submit("-N1", f"--gres=gpu:{SLOTS}", f"-c{SLOTS}", "--mem=4000", "--no-kill", str(script))
        self.cluster = JobCluster(self.run, f"{self.job}.0", "127.0.0.1", 0)  # type: ignore[assignment]
        self.num_lives = 0
        self.do(self._open())
        joined = self.next()
        assert isinstance(joined, ev.NodeJoined), joined
        self.node = joined.node

    async def _open(self) -> None:
        channel = ControllerEnd(self.run.secrets, self.attempt)
        self.nodes = Nodes(self.run, self.config, self.attempt, self.cluster, channel, lambda: self.newest)
        self.nodes.shell = self.shell  # type: ignore[assignment]
        self.nodes.restored = self.newest
        self.cluster.start_agents(self.attempt, channel.endpoint)
        self.tasks = [asyncio.create_task(work) for work in (self.nodes.listen(), self.nodes.beat())]

    def order(self, worker: str, slots: list[int], main: str = "stages.worker:main", **options: Any) -> int:
        """Its life."""
        self.num_lives += 1
        start = wire.StartWorker(
            worker=worker,
            role=Role.ROLLOUT,
            index=0,
            life=self.num_lives,
            slots=slots,
            version=0,
            main=main,
            options=options,
            preload=of_worker(self.config, Role.ROLLOUT) if self.config.by_steps else [],
        )
        self.send(self.node, start)
        return self.num_lives

    def kill(self, worker: str) -> None:
        self.send(self.node, wire.KillWorker(worker=worker, reason="the test says so"))

    def arrived(self, worker: str) -> int:
        """Its pid, as soon as its agent has that."""
        observed = self.shell.nodes[self.node].bindings
        self.until(lambda: worker in observed.observed)
        return observed.observed[worker].pid

    def ended(self, worker: str, life: int) -> str:
        return self.expect(wire.WorkerExited, worker=worker, life=life).reason

    def steps(self) -> set[str]:
        """Names of the job's steps that Slurm knows."""
        return set(self.slurm.client("squeue", "-h", "-s", "-j", self.job, "-o", "%j").split())

    def launcher(self) -> int:
        """Its pid; 0 while there is none."""
        path = os.fsencode(self.run.path)
        found = (pid for pid, words in commands() if words[0] != b"/bin/sh" and {b"slurm.launcher", path} < set(words))
        return next(found, 0)

    def sruns(self) -> set[str]:
        """The workers that there is an srun for."""
        launcher = self.launcher()
        mine = set(children_of(launcher)) if launcher else set()
        found = (words for pid, words in commands() if pid in mine and words[0] == b"srun")
        return {words[1].decode().rpartition("=")[2] for words in found}

    def close(self) -> None:
        self.run.ended.touch()
        super().close()
        deadline = time.monotonic() + 10
        while self.launcher() and time.monotonic() < deadline:
            time.sleep(0.05)
        self.slurm.client("scancel", self.job)


def commands() -> Iterator[tuple[int, list[bytes]]]:
    """All processes, and what they were called with."""
    for entry in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if entry.isdigit():
                yield int(entry), Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")


def devices(pid: int) -> list[str]:
    """Those that a worker's process was given, as it was started; it may still be on its way from srun's program."""

    def given() -> str:
        entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
        return dict(entry.partition("=")[::2] for entry in entries).get("CUDA_VISIBLE_DEVICES", "")

    return until(given, f"the devices of process {pid}").split(",")
