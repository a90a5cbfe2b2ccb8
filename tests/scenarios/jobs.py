"""Runs in jobs of a real Slurm, and what befalls them."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.run_folder import read_json
from tests.cluster import SlurmCluster
from tests.scenarios.deaths import Death, Felt, worked
from tests.scenarios.faults import LIMIT_S, Event, Run

JOB = (
    *("cluster.kind=slurm", "cluster.slurm.partition=main", "cluster.slurm.mem=4000", "cluster.slurm.cpus_per_slot=1"),
    *("cluster.nodes=2", "cluster.slots_per_node=3", "cluster.slurm.grace_s=3", "trainer.ranks=2"),
)


class JobRun(Run):
    """A run that a Slurm job holds the nodes of; its attempts are the lives of the job."""

    left_s = 30.0

    def __init__(self, path: Path, cluster: SlurmCluster, *overrides: str) -> None:
        self.cluster = cluster
        self.crashed = ""
        """A node that is to be brought back."""
        super().__init__(path, *JOB, *overrides)

    def resume(self) -> None:
        self._begin("resume", str(self.path), "--wait")

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
        felt = Felt(death, moment, told - struck, back(run, told) - told)
        if run.crashed:
            run.cluster.restart(run.crashed, wait=False)
            run.crashed = ""
        return felt

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
    run.crashed = batch_host(run)
    struck = time.time()
    run.cluster.crash(run.crashed)
    return struck


def batch_host(run: JobRun) -> str:
    return run.cluster.client("squeue", "-h", "-j", run.job, "-o", "%B").strip()


def other_node(run: JobRun) -> str:
    """One of the run's that is not its batch host."""
    found = run.cluster.client("squeue", "-h", "-j", run.job, "-o", "%N").strip()
    names = run.cluster.client("scontrol", "show", "hostnames", found).split()
    return next(name for name in names if name != batch_host(run))


def unnoticed(death: str, strike: Callable[[JobRun], float], pause_s: float = 1.0) -> Death:
    """What the run is not to notice at all: the attempt stays, no node is lost, and work goes on."""

    def do(run: Run, moment: str, after: float) -> Felt:
        assert isinstance(run, JobRun)
        run.until("it works", worked, after)
        attempt, num_lost = run.attempt, len(losses(run))
        struck = strike(run)
        time.sleep(pause_s)
        went_on = back(run, time.time())
        assert (run.attempt, len(losses(run))) == (attempt, num_lost), run.events()[-3:]
        return Felt(death, moment, 0.0, went_on - struck)

    return do


def losses(run: JobRun) -> list[Event]:
    return [event for event in run.events() if event["event"] == "NodeLost"]


def restart_slurmctld(run: JobRun) -> float:
    struck = time.time()
    run.cluster.kill_controller()
    time.sleep(4)
    run.cluster.start_controller()
    return struck


def restart_slurmd(run: JobRun) -> float:
    struck = time.time()
    node = other_node(run)
    run.cluster.kill_slurmd(node)
    time.sleep(4)
    run.cluster.restart(node)
    return struck


def lost_node(death: str, strike: Callable[[JobRun, str], None], mend: Callable[[JobRun, str], None]) -> Death:
    """A node that is not the batch host: its loss is known, and work goes on when it has come back, or elsewhere in the
    next attempt."""

    def die(run: Run, moment: str, after: float) -> Felt:
        assert isinstance(run, JobRun)
        run.until("it works", worked, after)
        node = other_node(run)
        struck = time.time()
        strike(run, node)
        lost = run.until("its loss is known", lambda e: e["event"] == "NodeLost" and e["node"] == node, struck)
        mend(run, node)
        joined = run.until("there are nodes", lambda e: e["event"] == "NodeJoined", lost["wall"])
        went_on = back(run, joined["wall"])
        return Felt(death, moment, lost["wall"] - struck, went_on - lost["wall"])

    return die


def stopped_agent(run: Run, moment: str, after: float) -> Felt:
    """For 7 s; 20 s later it is still the same attempt."""
    assert isinstance(run, JobRun)
    run.until("it works", worked, after)
    attempt, node = run.attempt, run.node_of("train-1")
    pid = run.pid(f"{node}-agent")
    struck = time.time()
    os.kill(pid, signal.SIGSTOP)
    lost = run.until("its loss is known", lambda e: e["event"] == "NodeLost" and e["node"] == node, struck)
    time.sleep(max(0.0, 7 - (time.time() - struck)))
    os.kill(pid, signal.SIGCONT)
    went_on = back(run, lost["wall"])
    run.until("it is back", lambda e: e["event"] == "NodeJoined" and e["node"] == node, lost["wall"])
    time.sleep(20)
    assert run.attempt == attempt and run.process.poll() is None
    return Felt("agent stopped for 7 s", moment, lost["wall"] - struck, went_on - lost["wall"])


def half_crash(run: JobRun) -> float:
    run.crashed = batch_host(run)
    struck = time.time()
    run.cluster.half_crash(run.crashed)
    return struck


def crash_for_8_s(run: JobRun) -> float:
    host = batch_host(run)
    struck = time.time()
    run.cluster.crash(host, forgets_steps=True)
    time.sleep(8)
    run.cluster.restart(host, wait=False)
    return struck


def preempt(run: JobRun) -> float:
    """By a job of the partition that goes first, which wants all nodes for a moment."""
    struck = time.time()
    run.cluster.submit("-p", "main", f"-N{len(run.cluster.nodes)}", "--exclusive", "--gres=gpu:4", "--wrap", "sleep 2")
    return struck


def cancelled_by_slurm(run: Run, moment: str, after: float) -> Felt:
    """`scancel`, as an administrator does it: the run ends, is not started again, and can be resumed."""
    assert isinstance(run, JobRun)
    run.until("it works", worked, after)
    job, struck = run.job, time.time()
    run.cluster.client("scancel", job)
    code = run.end()
    told = time.time()
    assert code != 0 and not (left := run.left()), (code, left, run.out)
    assert run.cluster.jobs() == {job: "CANCELLED"}, "nothing takes its place"
    run.resume()
    return Felt("scancel", moment, told - struck, back(run, told) - told)


def down(run: JobRun, node: str) -> None:
    run.cluster.set_down(node)


def up(run: JobRun, node: str) -> None:
    run.cluster.set_up(node)


def crash_node(run: JobRun, node: str) -> None:
    run.cluster.crash(node)


def half_crash_node(run: JobRun, node: str) -> None:
    run.cluster.half_crash(node)


def restart_node(run: JobRun, node: str) -> None:
    run.cluster.restart(node, wait=False)
