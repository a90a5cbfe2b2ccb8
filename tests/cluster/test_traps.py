"""What Slurm does that one would not expect, done to runs (docs/guides/slurm-traps.md)."""

import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pipeline.run_folder import RunFolder, read_json
from tests.cluster import SlurmCluster, require
from tests.cluster.test_runs import LONG, end_well
from tests.scenarios import jobs
from tests.scenarios.deaths import Death, worked
from tests.scenarios.faults import SETTINGS
from tests.scenarios.jobs import JOB, JobRun, back, batch_host, losses, lost_node, preempt, requeued
from tests.scenarios.runs import ROOT, pivot

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


def test_r01_r02_r05_r07_an_outage_ends_nothing_and_a_preempted_run_goes_on(
    cluster: SlurmCluster, folder: Path
) -> None:
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
    print(requeued("preempted", preempt)(run, "", 0.0))
    events = run.events()
    first, second = (i for i, event in enumerate(events) if event["event"] == "RunRestored")
    ended = [event["task"] for event in events[first:second] if event["event"] == "TaskEnded"]
    saved = [int(task.split("-")[1]) for task in ended if task.startswith("checkpoint-")]
    assert events[second]["version"] == saved[-1] > 0, "it goes on from the newest of all, saved as it left"
    end_well(run)


@contextmanager
def site(**settings: Any) -> Iterator[SlurmCluster]:
    """Another Slurm than the session's, which commands given meanwhile find."""
    require()
    place = Path(tempfile.mkdtemp(prefix="pivot-site-"))
    try:
        with (
            SlurmCluster(place / "c", gpus=4, grace_s=3, kill_wait_s=2, **settings) as cluster,
            pytest.MonkeyPatch.context() as patch,
        ):
            for name, value in cluster.env.items():
                patch.setenv(name, value)
            yield cluster
    finally:
        shutil.rmtree(place)


def suffer(path: Path, cluster: SlurmCluster, deaths: Sequence[Death], *overrides: str) -> JobRun:
    run, after = JobRun(path, cluster, *SETTINGS, *LONG, *overrides), 0.0
    for death in deaths:
        print(death(run, "", after))
        after = time.time()
    end_well(run)
    return run


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_run_outlives_what_befalls_its_nodes(tmp_path: Path) -> None:
    """Whatever srun's exit code, squeue and the node itself say when it is back."""
    with site(nodes=4) as cluster:
        deaths = [
            jobs.stopped_agent,
            lost_node("node set DOWN", jobs.down, jobs.up),
            lost_node("node crashes", jobs.crash_node, jobs.restart_node),
            requeued("batch host dies bit by bit", jobs.half_crash),
            requeued("batch host crashes, back after 8 s", jobs.crash_for_8_s),
        ]
        suffer(tmp_path / "a run", cluster, deaths)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_r01_where_a_preempted_job_is_told_by_term_alone_the_run_saves_too(tmp_path: Path) -> None:
    with site(nodes=2, user_signal=False) as cluster:
        low = ("cluster.slurm.partition=low", "cluster.slurm.max_requeues=0")
        run = suffer(tmp_path / "a run", cluster, [requeued("preempted", preempt)] * 2, *low)
        said = run.folder.path.joinpath("logs", "controller.log").read_text()
        assert run.attempt == 3, said


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_r05_a_job_that_slurm_forgot_to_have_started_is_named_and_resumed(tmp_path: Path) -> None:
    """slurmctld dies and knows nothing of the job's start. It then has a second copy start, which the node refuses, and
    holds the job."""
    with site(nodes=4) as cluster:
        run = JobRun(tmp_path / "a run", cluster, *SETTINGS, *LONG, "cluster.slurm.extra={begin: now+6}")
        cluster.wait_until(lambda: "PENDING" in cluster.jobs().values(), "the job waits")
        cluster.save_state(tmp_path / "state")
        run.until("it works", worked)
        cluster.kill_controller()
        cluster.restore_state(tmp_path / "state")
        cluster.start_controller()
        held = f"`scontrol release {run.job}` lets it go on, or cancel and resume the run"
        cluster.wait_until(lambda: held in pivot("status", str(run.path)).out, "it is held", 60)
        assert list(cluster.jobs()) == [run.job] and run.attempt == 1 and run.process.poll() is None
        assert pivot("cancel", str(run.path)).code == 0 and run.end() == 130
        resumed = time.time()
        run.resume()
        back(run, resumed)
        end_well(run)
