"""From a trainer's weights to an engine that answers with them, in real processes, and what they open meanwhile."""

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline import wire
from pipeline.preload import of_zygote
from tests.slurm.rig import NODE, Rig, children, until
from tests.slurm.tasks import here

ENGINE, TRAINER = "rollout-0", "train-0"
_OPENED = re.compile(r'(?:open|openat|openat2|creat)\((?:[^,"]*, )?"([^"]*)"')


def serve_publications() -> int:
    """A task of the trainer: each order publishes one version, and nothing else happens in between."""
    task, published = here(), 0
    while (order := task.next_order(60)).kind == "dispatch":
        version = int(order.ids[0])
        task.worker.trainer.version = version
        task.worker.trainer.publish(task.worker.policy, 10.0)
        task.report_admitted(version, [])
        published += 1
    return published


@dataclass
class Cycle:
    """A rig with a trainer that waits for the order to publish, and an engine that serves."""

    rig: Rig
    task: str
    version: int = 0

    def run(self) -> float:
        """Publish ▶ seal ▶ load; returns its seconds."""
        self.version += 1
        rig, version, started = self.rig, self.version, time.monotonic()
        rig.send(wire.DispatchTask(worker=TRAINER, task=self.task, ids=[str(version)], turns=[1]))
        rig.expect(wire.Admitted, worker=TRAINER, step=version)
        rig.send(wire.SealVersion(version=version))
        rig.expect(wire.VersionSealed, version=version)
        rig.send(wire.LoadVersion(keep_kv=False, worker=ENGINE, version=version, probe=None))
        rig.expect(wire.VersionLoaded, worker=ENGINE, version=version)
        return time.monotonic() - started

    @property
    def pids(self) -> list[int]:
        """The agent, its zygote and the workers."""
        (zygote,) = (
            pid for pid in children(self.rig.agent.pid) if b"slurm.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        return [self.rig.agent.pid, zygote, *self.rig.pids.values()]


@contextlib.contextmanager
def publishing(path: Path, **sections: Any) -> Iterator[Cycle]:
    """`sections` as those of tests.fakes.scripted.make_config: which models, engine and trainer."""
    rig = Rig(path, **sections)
    try:
        start_workers(rig)
        job = rig.submit(TRAINER, serve_publications)
        rig.expect(wire.TaskStarted, task=job.job_id)
        cycle = Cycle(rig, job.job_id)
        yield cycle
        rig.send(wire.EndTask(worker=TRAINER, task=job.job_id))
        assert rig.result(job) == cycle.version
    finally:
        rig.close()


def start_workers(rig: Rig) -> None:
    """The node with an engine and a trainer, as the rig's config says."""
    policy, genrm = rig.config.model.policy, rig.config.model.genrm
    welcome = wire.Welcome(
        policy=policy.path,
        policy_dtype=policy.dtype,
        version=0,
        genrm=genrm.path,
        genrm_dtype=genrm.dtype,
        preload=of_zygote(rig.config),
        has_mover=False,
    )
    rig.expect(wire.Join, node=NODE)
    rig.send(welcome)
    rig.expect(wire.NodeReady)
    for worker, role in ((ENGINE, "rollout"), (TRAINER, "train")):
        rig.start_worker(worker, role)
        rig.ready(worker)


def opened_by(cycle: Cycle, log: Path) -> list[str]:
    """Every path that any thread of these processes asks the kernel to open in one cycle, by strace.

    Raises PermissionError where this process may not trace them.
    """
    attach = [word for pid in cycle.pids for word in ("-p", str(pid))]
    command = ["strace", "-f", "-qq", "-e", "trace=open,openat,openat2,creat", "-o", str(log), *attach]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: tracer.poll() is not None or all(map(_is_traced, cycle.pids)), "strace to attach")
        if tracer.poll() is not None:
            assert tracer.stderr is not None
            raise PermissionError(tracer.stderr.read())
        cycle.run()
    finally:
        tracer.send_signal(signal.SIGINT)  # it lets them go
        tracer.communicate()
    return _OPENED.findall(log.read_text())


def _is_traced(pid: int) -> bool:
    """All threads of the process are."""
    threads = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return not any("TracerPid:\t0\n" in status for status in threads)
