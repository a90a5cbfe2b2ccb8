"""Workers that are Slurm steps of their own."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import wire
from pipeline.run_folder import read_json
from slurm.names import agent_step, controller_step
from tests.cluster import SlurmCluster
from tests.cluster.packages import program
from tests.cluster.steps import JobWatch, devices
from tests.cluster.test_runs import LONG, end_well
from tests.scenarios.deaths import Death, Felt, node, worked, worker
from tests.scenarios.faults import SETTINGS, Run
from tests.scenarios.jobs import JobRun, kill_controller, requeued
from tests.scenarios.runs import pids_of
from tests.slurm.rig import is_gone, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

WHO_CALLS = """#!/bin/sh
# Under which of Slurm's step daemons this client runs: JOB.batch, JOB.STEP, or none.
p=$$ found=none
while [ "$p" -gt 1 ]; do
  case $(tr '\\0' ' ' < /proc/$p/cmdline) in slurmstepd:*) found=$(tr '\\0' ' ' < /proc/$p/cmdline); break;; esac
  p=$(sed 's/.*) . //; s/ .*//' /proc/$p/stat)
done
echo "NAME $found $*" >> LOG
exec REAL "$@"
"""


@pytest.fixture
def calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where each call of a client that starts something is written down."""
    bin, log = folder / "bin", folder / "calls"
    bin.mkdir()
    for name in ("srun", "sbatch", "salloc"):
        text = WHO_CALLS.replace("NAME", name).replace("LOG", f"'{log}'").replace("REAL", str(program(name)))
        (bin / name).write_text(text)
        (bin / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{bin}:{os.environ['PATH']}")
    return log


def launcher(run: Run, moment: str, after: float) -> Felt:
    """All workers go with it."""
    run.until("it works", worked, after)
    (pid,) = [p for p in pids_of(run.path) if b"slurm.launcher" in Path(f"/proc/{p}/cmdline").read_bytes()][-1:]
    struck = time.time()
    os.kill(pid, signal.SIGKILL)
    told = run.until("a death is known", lambda e: e["event"] == "WorkerDied", struck)
    ready = run.until("it is back", lambda e: e["event"] == "WorkerReady", told["wall"])
    went_on = run.until("work goes on", worked, ready["wall"])
    return Felt("launcher", moment, told["wall"] - struck, went_on["wall"] - told["wall"])


@pytest.mark.slow
def test_a_run_whose_workers_are_steps_outlives_the_death_of_each_of_its_processes(
    cluster: SlurmCluster, folder: Path, calls: Path
) -> None:
    two = "placement.roles.rollout.slots=2"
    run = JobRun(folder / "a run", cluster, *SETTINGS, *LONG, "cluster.slurm.launcher=step", two)
    run.until("it works", worked)
    check_steps(run)
    after = 0.0
    deaths: list[tuple[Death, str]] = [
        (worker("train-1"), "train"),
        (worker("rollout-0"), "rollout"),
        (launcher, ""),
        (node("agent"), "train"),
        (requeued("controller killed", kill_controller), ""),
    ]
    for death, moment in deaths:
        felt = death(run, moment, after)
        print(f"{felt.death:20} {felt.moment:8} noticed {felt.detected_s:6.2f} s, at work again {felt.back_s:6.2f} s")
        after = time.time()
    run.until("it works", worked, after)
    check_steps(run)
    assert run.attempt == 2
    end_well(run)
    called = [line.split(maxsplit=3) for line in calls.read_text().splitlines()]
    of_script = [line for line in called if line[0] == "srun" and line[2] == f"[{run.job}.batch]"]
    others = [line for line in called if line not in of_script and line[1] != "none"]
    assert len(of_script) > 12 and others == [], "inside a step nothing runs srun"


def check_steps(run: JobRun) -> None:
    """Each worker is a step, and has devices of its own, as many as slots."""

    def bindings() -> dict[str, dict[str, dict[str, Any]]]:
        found = (read_json(run.folder.status) or {}).get("bindings", {})
        return found if sum(map(len, found.values())) == 4 else {}

    found = until(bindings, "all workers")
    for name, bound in found.items():
        given = {one: devices(its["pid"]) for one, its in bound.items()}
        assert {one: len(mine) for one, mine in given.items()} == {one: len(its["slots"]) for one, its in bound.items()}
        all_of_node = [device for mine in given.values() for device in mine]
        assert len(set(all_of_node)) == len(all_of_node), (name, given)
    steps = run.cluster.client("squeue", "-h", "-s", "-j", run.job, "-o", "%j").split()
    workers = [one for bound in found.values() for one in bound]
    others = [agent_step(run.folder), controller_step(run.folder)]
    assert sorted(set(steps) - {"batch", "extern"}) == sorted([*others, *workers]), steps


@pytest.fixture
def watch(cluster: SlurmCluster, folder: Path) -> Iterator[JobWatch]:
    watch = JobWatch(folder / "run", cluster)
    yield watch
    watch.close()


def test_a_step_begins_ends_waits_for_slots_and_is_given_up(watch: JobWatch) -> None:
    first = watch.order("rollout-0", [0, 1, 2])
    pid = watch.arrived("rollout-0")
    assert watch.expect(wire.WorkerReady, worker="rollout-0").pid == pid
    assert len(devices(pid)) == 3

    refused = watch.order("rollout-1", [2, 3])
    assert watch.ended("rollout-1", refused).startswith("refused: rollout-1 wants slot 2")

    # Another step has what Slurm counts as the last slot.
    other = ("srun", f"--jobid={watch.job}", "-N1", "-n1", "--exact", "--gres=gpu:1", "--mem=0", "sleep", "60")
    holder = os.posix_spawn(str(program("srun")), other, watch.slurm.client_env)
    watch.until(lambda: "sleep" in watch.steps())
    second = watch.order("rollout-1", [3])
    watch.until(lambda: "rollout-1" in watch.sruns())
    watch.kill("rollout-1")
    assert "before Slurm had begun its step" in watch.ended("rollout-1", second)
    watch.until(lambda: "rollout-1" not in watch.sruns())

    third = watch.order("rollout-1", [3])
    watch.until(lambda: "rollout-1" in watch.sruns())
    os.kill(holder, signal.SIGTERM)
    os.waitpid(holder, 0)
    assert not set(devices(watch.arrived("rollout-1"))) & set(devices(pid))

    watch.kill("rollout-0")
    assert watch.ended("rollout-0", first).startswith("its step has ended")
    assert is_gone(pid)
    again = watch.order("rollout-0", [0, 1, 2])
    watch.arrived("rollout-0")
    watch.kill("rollout-1")
    watch.ended("rollout-1", third)

    os.kill(watch.launcher(), signal.SIGKILL)
    assert "launcher" in watch.ended("rollout-0", again)
    last = watch.order("rollout-0", [0, 1, 2, 3])
    watch.arrived("rollout-0")
    watch.kill("rollout-0")
    watch.ended("rollout-0", last)
    watch.until(lambda: watch.steps() - {"batch", "extern"} == {agent_step(watch.run)})
