"""What Slurm does that one would not expect, done to runs (docs/guides/slurm-traps.md)."""

import shlex
import sys
import time
from pathlib import Path

import pytest

from pipeline.run_folder import RunFolder, read_json
from tests.cluster import SlurmCluster
from tests.cluster.test_runs import LONG, end_well
from tests.scenarios.deaths import worked
from tests.scenarios.faults import SETTINGS
from tests.scenarios.jobs import JOB, JobRun, back, batch_host, losses, preempt, requeued
from tests.scenarios.runs import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

NO_HOME = "/dev/null/home"
"""Nobody, not even root, writes there."""


def test_r04_r08_a_run_submitted_from_inside_a_job_is_like_any_other(cluster: SlurmCluster, folder: Path) -> None:
    """Its job has nothing of the options of the job around it, and nobody needs a home."""
    run = RunFolder(folder / "a run")
    command = [
        *(sys.executable, "-P", "-m", "pipeline.cli.main", "submit", "configs/emulated.yaml"),
        *("--run-dir", str(run.path)),
        *(*JOB, "cluster.slurm.partition=", "trainer.total_training_steps=1", "evaluate.freq=0", "tracking.uri=none"),
    ]
    exported = {"SBATCH_PARTITION": "low", "SLURM_CPU_BIND": "cores", "SBATCH_EXCLUSIVE": "user", "HOME": NO_HOME}
    lines = [
        *(f"export {name}={value}" for name, value in exported.items()),
        f"cd {shlex.quote(str(ROOT))}; export PYTHONPATH={shlex.quote(str(ROOT))}",
        f"srun {shlex.join(command)}",
    ]
    outer = cluster.submit(
        *("-n1", "-c2", "--mem-per-cpu=50", "--output", str(folder / "outer"), "--wrap", "\n".join(lines))
    )
    cluster.wait_until(lambda: cluster.jobs()[outer] == "COMPLETED", "the job around it ends", 60)
    inner = str((read_json(run.job) or {})["id"])
    found = cluster.client("scontrol", "show", "job", inner)
    assert inner != outer and "Partition=main" in found and "MinMemoryNode=4000M" in found, found
    cluster.wait_until(lambda: cluster.jobs()[inner] == "COMPLETED", "the run ends", 60)
    assert (read_json(run.ended) or {})["status"] == "done"


def test_r01_r05_an_outage_ends_nothing_and_a_preempted_run_goes_on(cluster: SlurmCluster, folder: Path) -> None:
    low = ("cluster.slurm.partition=low", "cluster.slurm.max_requeues=0")
    run = JobRun(folder / "my runs" / "exp 1", cluster, *SETTINGS, *LONG, *low)
    run.until("it works", worked)
    job, host = run.job, batch_host(run)
    assert run.pid("controller") in cluster.processes(host), "it is where the batch script is"
    lost = next(node for node in cluster.nodes if node != host)
    cluster.kill_controller()
    cluster.kill_slurmd(lost)
    back(run, time.time() + 4)
    cluster.start_controller()
    cluster.restart(lost)
    back(run, time.time())
    assert (run.attempt, run.job, losses(run)) == (1, job, [])
    assert run.process.poll() is None, "who follows the run still does"
    felt = requeued("preempted", preempt)(run, "", 0.0)
    print(felt)
    end_well(run)
