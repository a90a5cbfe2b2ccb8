"""Runs in jobs of a real Slurm, and what befalls them."""

import json
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.run_folder import read_json
from tests.cluster import SlurmCluster
from tests.scenarios.deaths import Death, Felt, worked
from tests.scenarios.faults import LIMIT_S, Event, Run
from tests.scenarios.runs import pid_by_log

LEFT_IN_JOB_S = 30.0
JOB = (
    *("cluster.kind=slurm", "cluster.slurm.partition=main", "cluster.slurm.mem=4000", "cluster.slurm.cpus_per_slot=1"),
    *("cluster.nodes=2", "cluster.slots_per_node=3", "cluster.slurm.grace_s=3", "trainer.ranks=2"),
)


class JobRun(Run):
    """A run that a Slurm job holds the nodes of; its attempts are the lives of the job."""

    def __init__(self, path: Path, cluster: SlurmCluster, *overrides: str) -> None:
        self.cluster = cluster
        super().__init__(path, *JOB, *overrides)

    @property
    def attempt(self) -> int:
        return max(self.folder.attempts(), default=1)

    @property
    def job(self) -> str:
        return str((read_json(self.folder.job) or {})["id"])

    def events(self) -> list[Event]:
        """Of all attempts, in order, as far as they are written."""
        found = []
        for attempt in self.folder.attempts():
            path = self.folder.journal(attempt)
            if path.exists():
                *lines, _torn = path.read_bytes().split(b"\n")
                found += [json.loads(line) for line in lines]
        return found

    def pid(self, name: str) -> int:
        if name == "controller":
            return int(read_json(self.folder.status)["pid"])
        log = self.folder.logs(self.attempt) / f"{name}.log"
        deadline = time.monotonic() + LIMIT_S
        while time.monotonic() < deadline:
            if pid := pid_by_log(self.path, log):
                return pid
            time.sleep(0.005)
        raise AssertionError(f"no process writes to {log}")

    def left(self) -> list[str]:
        deadline = time.monotonic() + LEFT_IN_JOB_S
        while found := self._left():
            if time.monotonic() > deadline:
                return found
            time.sleep(0.05)
        return []


def back(run: JobRun, told: float) -> float:
    """When work went on after `told` (wall clock)."""
    return float(run.until("work goes on", worked, told)["wall"])


def requeued(death: str, strike: Callable[[JobRun], float]) -> Death:
    """What ends the attempt; Slurm has the job start again, and the run goes on by itself."""

    def die(run: Run, moment: str, after: float) -> Felt:
        assert isinstance(run, JobRun)
        run.until("it works", worked, after)
        before = run.attempt
        struck = strike(run)
        deadline = time.monotonic() + 2 * LIMIT_S
        while run.attempt == before:
            assert time.monotonic() < deadline and run.process.poll() is None, "no attempt follows"
            time.sleep(0.02)
        told = time.time()
        return Felt(death, moment, told - struck, back(run, told) - told)

    return die


def kill_controller(run: JobRun) -> float:
    return run.kill("controller")


def requeue(run: JobRun) -> float:
    struck = time.time()
    run.cluster.client("scontrol", "requeue", run.job)
    return struck


def warn(run: JobRun) -> float:
    struck = time.time()
    run.cluster.client("scancel", "--signal=USR2", run.job)
    return struck


def crash(run: JobRun) -> float:
    """All of the batch host at once. Its Slurm comes back after a while."""
    host = run.cluster.client("squeue", "-h", "-j", run.job, "-o", "%B").strip()
    struck = time.time()
    run.cluster.crash(host)
    return struck
