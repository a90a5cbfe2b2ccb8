"""A run goes on in another place than it began: from this machine into a job, and back."""

import json
import time
from pathlib import Path

import pytest

from tests.cluster import SlurmCluster
from tests.scenarios.jobs import JOB
from tests.scenarios.runs import STRICT, begin, check_same, pivot, rows, submit, succeed

pytestmark = pytest.mark.slurm

SETTINGS = (*STRICT, "checkpoint.save_freq=2", "tracking.uri=none")
PLACE = (*JOB[1:], "trainer.ranks=1")


@pytest.mark.timeout(180)
def test_a_run_goes_on_in_a_job_and_then_here_again(cluster: SlurmCluster, folder: Path) -> None:
    run, undisturbed = folder / "run", folder / "undisturbed"
    succeed(submit(undisturbed, *SETTINGS, "trainer.total_training_steps=6"))
    succeed(submit(run, *SETTINGS, "trainer.total_training_steps=2"))
    told = succeed(pivot("resume", str(run), "--cluster", "slurm", "--wait", *PLACE, "trainer.total_training_steps=4"))
    assert "step 3/4" in told and "step 2/" not in told

    left = folder / "left"
    slow = cluster.submit("-p", "main", "--wrap", f"sleep 3; touch '{left}'")
    (run / "job.json").write_text(json.dumps({"id": slow}))
    told = succeed(pivot("resume", str(run), "--cluster", "local", "trainer.total_training_steps=6"))
    assert "step 5/6" in told and "step 4/" not in told
    assert (run / "attempt_3").stat().st_mtime > left.stat().st_mtime, "its job was not over yet"
    check_same(run, undisturbed)

    process = begin("resume", str(run), "trainer.total_training_steps=500")
    while rows(run)[-1]["step"] <= 6:
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    status = json.loads(succeed(pivot("status", str(run), "--json")))
    assert status["live"] and "job" not in status
    succeed(pivot("cancel", str(run)))
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
