import threading
from pathlib import Path

import pytest

from slurm.commands import Clients
from slurm.lookout import Lookout
from tests.slurm.clients import HANG, NO_CONTROLLER, FakeSlurm, queue


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def fake(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lookout(fake: FakeSlurm, clock: Clock) -> Lookout:
    return Lookout(Clients(timeout_s=0.5, environment=fake.environment), period_s=3, settle_s=30, clock=clock)


def test_one_question_for_all_jobs_each_period(fake: FakeSlurm, clock: Clock, lookout: Lookout) -> None:
    fake.script("squeue", queue(j1="RUNNING", j2="PENDING"))
    for job in "12":
        lookout.watch(job)
    assert [lookout.look(job).state for job in "1212"] == ["RUNNING", "PENDING"] * 2
    assert len(fake.calls("squeue")) == 1
    clock.now += 2.9
    lookout.look("1")
    assert len(fake.calls("squeue")) == 1
    clock.now += 0.1
    lookout.look("2")
    assert len(fake.calls("squeue")) == 2
    lookout.look("2", at_once=True)
    assert len(fake.calls("squeue")) == 3
    with pytest.raises(KeyError):
        lookout.look("3")


def test_an_outage_ends_nothing(fake: FakeSlurm, clock: Clock, lookout: Lookout) -> None:
    fake.script("squeue", queue(j1="RUNNING"), NO_CONTROLLER, HANG, "echo busy", queue(j1="RUNNING"))
    lookout.watch("1")
    lookout.watch("2")
    assert lookout.look("1").state == "RUNNING"
    for silent_s in (60, 120, 180):
        clock.now += 60
        seen = lookout.look("1")
        assert (seen.state, seen.is_gone, seen.silent_s) == ("UNKNOWN", False, silent_s)
        assert seen.job is not None and seen.job.state == "RUNNING" and seen.error
        assert not lookout.look("2").is_gone  # never listed, but Slurm did not say so since
    clock.now += 60
    seen = lookout.look("1")
    assert (seen.state, seen.silent_s, seen.error) == ("RUNNING", None, "")
    assert lookout.look("2").is_gone


def test_silence_counts_from_the_start_where_slurm_never_answered(
    fake: FakeSlurm, clock: Clock, lookout: Lookout
) -> None:
    fake.script("squeue", NO_CONTROLLER)
    lookout.watch("1")
    clock.now += 7
    seen = lookout.look("1")
    assert (seen.job, seen.state, seen.silent_s, seen.is_gone) == (None, "UNKNOWN", 7, False)


def test_a_job_is_gone_only_when_slurm_answered_without_it(fake: FakeSlurm, clock: Clock, lookout: Lookout) -> None:
    fake.script("squeue", queue(j1="RUNNING"), NO_CONTROLLER, queue(j9="RUNNING"), queue(j1="PENDING"))
    lookout.watch("1")
    states = []
    for _ in range(4):
        states.append(lookout.look("1").state)
        clock.now += 3
    assert states == ["RUNNING", "UNKNOWN", "GONE", "PENDING"]  # a cache before squeue may have been old


def test_a_job_that_was_just_submitted_may_be_missing_for_a_while(
    fake: FakeSlurm, clock: Clock, lookout: Lookout
) -> None:
    fake.script("squeue", queue())
    lookout.watch("1")
    states = []
    for _ in range(11):
        states.append(lookout.look("1").state)
        clock.now += 3
    assert states == ["UNKNOWN"] * 10 + ["GONE"]
    lookout.watch("2")  # the answers of before say nothing of it
    assert lookout.look("2").state == "UNKNOWN"


def test_threads_share_one_question(fake: FakeSlurm, lookout: Lookout) -> None:
    fake.script("squeue", f"sleep 0.2; {queue(j1='RUNNING')}")
    lookout.watch("1")
    states: list[str] = []
    threads = [threading.Thread(target=lambda: states.append(lookout.look("1").state)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert states == ["RUNNING"] * 8
    assert len(fake.calls("squeue")) == 1
