"""Runs in jobs of a real Slurm: what befalls them, several things per job, for each start of a node costs seconds."""

import json
import time
from pathlib import Path

import pytest

from pipeline.run_folder import read_json
from tests.cluster import SlurmCluster
from tests.scenarios.deaths import node, queue, worker
from tests.scenarios.faults import SETTINGS, account
from tests.scenarios.jobs import JOB, JobRun, batch_host, crash, kill_controller, requeue, requeued, warn
from tests.scenarios.runs import begin, pivot, rows

pytestmark = pytest.mark.slurm
LONG = ("trainer.total_training_steps=5000", "limits.heartbeat_s=2", "limits.engine_s=3")


def end_well(run: JobRun) -> None:
    """Cancelled, it saves and leaves; of all that the queue acknowledged nothing is lost or twice, nothing is left."""
    run.until("a step is complete", lambda e: e["event"] == "StepRecorded", time.time())
    ended = pivot("cancel", str(run.path))
    assert ended.code == 0, ended.out
    assert run.end() == 130, run.out
    assert (read_json(run.folder.ended) or {})["status"] == "cancelled"
    steps = int(rows(run.path)[-1]["step"])
    found = account(run.path, steps, 16, staleness=1)
    assert found.is_right, found
    assert not (left := run.left()), left
    assert run.cluster.jobs()[run.job] in ("COMPLETED", "CANCELLED")


@pytest.mark.timeout(300)
def test_a_run_in_a_job_outlives_the_death_of_each_of_its_processes(
    cluster: SlurmCluster, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home := folder / "home").mkdir()
    monkeypatch.setenv("HOME", str(home))
    run = JobRun(folder / "a run", cluster, *SETTINGS, *LONG)
    after = 0.0
    for death, moment in (
        (worker("train-1"), "train"),
        (worker("rollout-0"), "rollout"),
        (node("zygote"), "reward"),
        (node("agent"), "train"),
        (queue(), "rollout"),
        (requeued("controller killed", kill_controller), ""),
        (requeued("scontrol requeue", requeue), ""),
        (requeued("USR2", warn), ""),
    ):
        felt = death(run, moment, after)
        print(f"{felt.death:20} {felt.moment:8} noticed {felt.detected_s:6.2f} s, at work again {felt.back_s:6.2f} s")
        after = time.time()
    assert run.attempt == 4
    end_well(run)
    assert not list(home.iterdir()), "nothing is written to HOME"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_job_whose_only_node_crashes_starts_again(cluster: SlurmCluster, folder: Path) -> None:
    """There is nobody left to see to it: Slurm does, when it has noticed."""
    run = JobRun(folder / "r", cluster, *SETTINGS, *LONG, "cluster.nodes=1", "cluster.slots_per_node=4")
    felt = requeued("batch host crashes", crash)(run, "", 0.0)
    print(felt)
    end_well(run)


@pytest.mark.slow  # Slurm counts in minutes
@pytest.mark.timeout(400)
def test_r01_r03_a_run_goes_on_over_its_jobs_time_limit_and_says_when_that_was_too_often(
    cluster: SlurmCluster, folder: Path
) -> None:
    limited = ("cluster.slurm.time=1", "cluster.slurm.signal_s=20", "cluster.slurm.max_requeues=1")
    limited += ("cluster.slurm.setup=[sleep 10]",)  # of its time
    run = JobRun(folder / "r", cluster, *SETTINGS, *LONG, *limited, "trainer.total_training_steps=100000")
    deadline = time.monotonic() + 300
    while run.process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert run.end() == 1 and "timed out" in run.out.lower() and "pivot-pipeline resume" in run.out, run.out
    assert run.attempt == 2
    steps = int(rows(run.path)[-1]["step"])
    found = account(run.path, steps, 16, staleness=1)
    assert found.is_right, found
    assert not (left := run.left()), left


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_cancelled_run_stops_where_the_signal_does_not_reach_it(cluster: SlurmCluster, folder: Path) -> None:
    run = JobRun(folder / "r", cluster, *SETTINGS, *LONG)
    run.until("a step is complete", lambda e: e["event"] == "StepRecorded")
    cluster.kill_slurmd(batch_host(run))
    process = begin("cancel", str(run.path))
    deadline = time.monotonic() + 14  # then Slurm gives the node up
    while json.loads(run.folder.status.read_text())["status"] != "cancelled":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    steps = int(rows(run.path)[-1]["step"])
    assert account(run.path, steps, 16, staleness=1).is_right
    process.communicate(timeout=150)
    assert run.end() == 130


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_script_that_fails_is_shown(cluster: SlurmCluster, folder: Path) -> None:
    run = folder / "r"
    lines = "cluster.slurm.setup=['echo no such module cuda/99', 'exit 3']"
    ended = pivot("submit", "configs/emulated.yaml", "--run-dir", str(run), "--wait", *JOB, lines)
    assert ended.code == 1 and "no such module cuda/99" in ended.out
    for command in ("status", "logs"):
        assert "no such module cuda/99" in pivot(command, str(run)).out, command
