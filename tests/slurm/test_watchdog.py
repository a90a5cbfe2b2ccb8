"""What agents without a controller do about their job."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import SlurmError
from pipeline.run_folder import RunFolder, read_json, write_json
from slurm.names import script_beat
from slurm.parse import JobState
from slurm.watchdog import leave_on_term, requeue


class Asked:
    """Slurm's clients, and what they were asked to do."""

    def __init__(self, error: str = "") -> None:
        self.done: list[tuple[str, ...]] = []
        self._error = error

    def jobs(self) -> dict[str, JobState]:
        return {"17": JobState(id="17", state="RUNNING", nodes=("n1", "n2"), batch_host="n1")}

    def update_job(self, job: str, **values: str) -> None:
        self.done.append((job, *(f"{name}={value}" for name, value in values.items())))

    def requeue(self, job: str) -> None:
        if self._error:
            raise SlurmError(self._error, is_outage=True)
        self.done.append(("requeue", job))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "r")
    run.create()
    write_json(run.status, {"attempt": 1})
    old = time.time() - 20
    os.utime(run.status, (old, old))
    return run


def ask(run: RunFolder, life: str = "17.0", asked: Any = None, most: int = 3) -> tuple[str, list[tuple[str, ...]]]:
    asked = asked or Asked()
    return requeue(run, life, most, asked), asked.done


def test_one_of_the_agents_has_the_job_start_elsewhere(run: RunFolder) -> None:
    said, done = ask(run)
    assert said == "job 17 is requeued; n1 is excluded from its next start"
    assert done == [("requeue", "17"), ("17", "ExcNodeList=n1")], "Slurm refuses that for a job that runs"
    assert ask(run) == ("another agent has the job requeued", [])
    assert ask(run, "17.1")[1], "the next life of the job is another matter"


def test_an_agent_that_a_living_controller_gave_up_does_nothing(run: RunFolder) -> None:
    os.utime(run.status)
    said, done = ask(run)
    assert said.startswith("the controller lives") and not done
    old = time.time() - 20
    os.utime(run.status, (old, old))
    assert ask(run)[1], "and has not taken the place of another agent"


def test_a_run_that_is_over_is_left_alone(run: RunFolder) -> None:
    write_json(run.ended, {"status": "cancelled"})
    assert ask(run) == ("the run is over", [])


def test_a_job_is_not_requeued_for_ever(run: RunFolder) -> None:
    said, done = ask(run, "17.3")
    assert "max_requeues" in said and not done
    assert (read_json(run.ended) or {})["status"] == "failed"


def test_a_slurm_that_does_not_answer_is_said(run: RunFolder) -> None:
    assert ask(run, asked=Asked("timed out"))[0] == "the job could not be requeued: timed out"


def test_on_term_the_batch_host_is_left_out_only_if_its_script_is_dead(run: RunFolder) -> None:
    beat, asked = script_beat(run, "17.0"), Asked()
    beat.touch()
    assert leave_on_term(run, "17.0", asked) == "the job's script lives" and not asked.done  # type: ignore[arg-type]
    old = time.time() - 20
    os.utime(beat, (old, old))
    leave_on_term(run, "17.0", asked)  # type: ignore[arg-type]
    assert asked.done == [("17", "ExcNodeList=n1")]
