"""What the command line says of a run's job, by clients that do what the test wants."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli import job
from pipeline.cli.runs import how_it_stands, read_status
from pipeline.run_folder import RunFolder, write_json
from tests.slurm.clients import FakeSlurm, queue


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    """On the PATH, with nothing remembered of what another Slurm said."""
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.defpath}")
    job._lately.cache_clear()
    yield fake
    job._lately.cache_clear()


def test_who_stays_with_a_run_does_not_ask_slurm_each_time_it_looks(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.script("squeue", queue(j17="PENDING", j18="RUNNING"))
    runs = [RunFolder(tmp_path / name) for name in ("a", "b")]
    for run, id in zip(runs, ("17", "18"), strict=True):
        run.create()
        write_json(run.job, {"id": id})
    for _ in range(50):
        assert [how_it_stands(read_status(run)) for run in runs] == ["queued", "new"]
    assert len(fake.calls("squeue")) < 10


def test_r05_a_run_whose_slurm_does_not_answer_may_be_live_and_is_not_over(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.script("squeue", "echo 'slurm_load_jobs error: authentication error' >&2; exit 1")
    run = RunFolder(tmp_path / "r")
    run.create()
    write_json(run.job, {"id": "17"})
    status = read_status(run)
    assert status["live"] and (status["job"]["id"], status["job"]["state"]) == ("17", "UNKNOWN")
    follower = job.JobProcess(run, "17")
    assert follower.poll() is None, "who waits for it goes on waiting"
    write_json(run.ended, {"status": "done", "attempt": 1})
    assert not read_status(run)["live"] and follower.poll() == 0, "its marker says it, whatever Slurm does"


@pytest.mark.parametrize(
    ("state", "silent_s", "said"),
    [
        ("RUNNING", 300, "nothing of the run was heard of for 300 s"),
        ("RUNNING", 5, ""),
        ("PENDING", 300, ""),
    ],
)
def test_a_job_whose_run_is_silent_is_named(
    fake: FakeSlurm, tmp_path: Path, state: str, silent_s: int, said: str
) -> None:
    fake.script("squeue", queue(j17=state))
    run = RunFolder(tmp_path / "r")
    run.create()
    write_json(run.job, {"id": "17"})
    write_json(run.status, {"status": "running", "attempt": 1, "updated": time.time() - silent_s})
    shown = job.describe_job(read_status(run)["job"])
    assert (said in shown) if said else "heard" not in shown


def test_who_follows_a_job_follows_the_one_in_its_place(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_POLL_S", 0.01)
    run = RunFolder(tmp_path / "r")
    run.create()
    write_json(run.job, {"id": "17"})
    fake.script("squeue", queue(j17="CANCELLED", j18="RUNNING"))
    followed = job.JobProcess(run, "17")
    write_json(run.job, {"id": "18"})
    assert followed.poll() is None
    write_json(run.ended, {"status": "cancelled", "attempt": 2})
    assert followed.poll() is None, "the controller still saves"
    write_json(run.status, {"status": "cancelled", "attempt": 2})
    assert followed.poll() == 130


def test_who_waits_is_told_why_the_job_waits(
    fake: FakeSlurm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunFolder(tmp_path / "r")
    run.create()
    write_json(run.job, {"id": "17"})
    fake.script("squeue", queue(j17="PENDING"))
    followed = job.JobProcess(run, "17")
    for _ in range(3):
        assert followed.poll() is None
    assert capsys.readouterr().out.count("job 17 is queued (") == 1


def test_the_end_that_its_controller_could_not_tell_is_told(fake: FakeSlurm, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "r")
    run.create()
    write_json(run.job, {"id": "17"})
    write_json(run.ended, {"status": "failed", "attempt": 2, "reason": "started again 1 times"})
    for status in ({"status": "running", "attempt": 2}, None):
        if status:
            write_json(run.status, status)
        seen = read_status(run)
        assert (how_it_stands(seen), seen["error"]["reason"]) == ("failed", "started again 1 times")
        run.status.unlink(missing_ok=True)


def test_one_whose_job_is_over_without_a_word_is_over(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "_POLL_S", 0.01)
    run = RunFolder(tmp_path / "r")
    run.create()
    write_json(run.job, {"id": "17"})
    fake.script("squeue", queue(j17="CANCELLED"))
    assert job.JobProcess(run, "17").poll() == 1
