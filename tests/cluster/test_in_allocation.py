"""A run in an allocation that its user holds."""

from pathlib import Path

import pytest

from tests.cluster import SlurmCluster
from tests.scenarios.deaths import worked
from tests.scenarios.faults import SETTINGS, account
from tests.scenarios.jobs import JobRun
from tests.scenarios.runs import pivot, rows

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]
LONG = ("trainer.total_training_steps=5000", "limits.heartbeat_s=2", "limits.engine_s=3")


@pytest.fixture
def allocation(cluster: SlurmCluster, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The id of two nodes with four GPUs each; this process is the shell that holds them."""
    cluster.client("salloc", "--no-shell", "--no-kill", "-N2", "--gres=gpu:4", "--mem=4000")
    (job,) = cluster.jobs_in("RUNNING")
    monkeypatch.setenv("SLURM_JOB_ID", job)
    return job


def test_a_run_in_an_allocation_starts_again_and_leaves_the_allocation(
    cluster: SlurmCluster, folder: Path, allocation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = JobRun(folder / "r", cluster, "--in-allocation", *SETTINGS, *LONG)
    run.until("it works", worked)
    second = pivot("submit", "configs/emulated.yaml", "--run-dir", str(folder / "runs/two"), "--in-allocation")
    assert second.code != 0 and "has a run already" in second.out
    killed = run.kill("controller")
    run.until("it works again", worked, killed)
    assert (run.attempt, run.job) == (2, allocation)
    run.until("a step is complete", lambda e: e["event"] == "StepRecorded", killed)
    ended = pivot("cancel", str(run.path))
    assert ended.code == 0, ended.out
    assert run.end() == 130, run.out
    steps = int(rows(run.path)[-1]["step"])
    found = account(run.path, steps, 16, staleness=1)
    assert found.is_right, found
    assert not (left := run.left()), left
    assert cluster.jobs()[allocation] == "RUNNING", "the user still has it"
    assert cluster.client("squeue", "-h", "-s", "-j", allocation, "-o", "%j").split() in ([], ["extern"])

    more = (f"trainer.total_training_steps={steps + 3}", "--in-allocation", "--wait")
    again = pivot("resume", str(run.path), *more)
    assert again.code == 0, again.out
    assert cluster.jobs()[allocation] == "RUNNING"
    monkeypatch.delenv("SLURM_JOB_ID")
    refused = pivot("resume", str(run.path), f"trainer.total_training_steps={steps + 6}", "--in-allocation")
    assert refused.code != 0 and "salloc" in refused.out


@pytest.mark.parametrize(
    ("setting", "said"),
    [("cluster.nodes=3", "has 2 nodes, the run wants 3..3"), ("cluster.slots_per_node=9", "cannot give --gres=gpu:9")],
)
def test_an_allocation_that_does_not_fit_is_refused(folder: Path, allocation: str, setting: str, said: str) -> None:
    fits = ("cluster.nodes=2", "cluster.slots_per_node=4", setting)
    answer = pivot("submit", "configs/emulated.yaml", "--run-dir", str(folder / "runs/r"), "--in-allocation", *fits)
    assert answer.code != 0 and said in answer.out
    assert not (folder / "runs/r").exists()
