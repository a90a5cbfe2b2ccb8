"""What a controller in a job makes of what Slurm says of its nodes, by clients that do what the test wants."""

import asyncio
import contextlib
import os
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.run_folder import RunFolder, read_json
from slurm import job
from slurm.job import JobCluster
from slurm.names import REPLACES, RESTARTS, agent_step, forget_restarts
from slurm.parse import SEPARATOR
from tests.slurm.clients import HEADER, NO_CONTROLLER, FakeSlurm

STEPS = SEPARATOR.join(("STEPID", "NODELIST", "TIME", "NAME"))


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{fake.folder}:{os.defpath}")
    fake.script("scancel", "exit 0")
    yield fake


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    return run


def here(run: RunFolder, monkeypatch: pytest.MonkeyPatch, restarts: int = 0, max_requeues: int = 3) -> JobCluster:
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    monkeypatch.setenv(RESTARTS, str(restarts))
    return JobCluster.here(run, max_requeues, 1)


def listed(nodes: str, left: str = "UNLIMITED", state: str = "RUNNING") -> str:
    return said(HEADER, SEPARATOR.join(("17", state, "None", nodes, "n1", left, "x")))


def said(*lines: str) -> str:
    return f"printf '%s\\n' {shlex.join(lines)}"


def watch(cluster: JobCluster, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch, polls: int) -> list[tuple[str, str]]:
    """Which nodes are told to be gone, after so many answers (or none) of squeue."""
    monkeypatch.setattr(job, "_WATCH_S", 0.0)
    told: list[tuple[str, str]] = []

    async def until_polled() -> None:
        watching = asyncio.create_task(cluster.watch(lambda node, why: told.append((node, why))))
        while len(fake.calls("squeue")) < polls + 1:
            assert not watching.done(), watching.result()
            await asyncio.sleep(0.01)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching

    asyncio.run(until_polled())
    return told


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm is asked each time."""
    monkeypatch.setattr(job, "Lookout", lambda clients: make(clients, period_s=0.0))


make = job.Lookout


def test_a_node_that_slurm_takes_is_gone_once_and_silence_takes_none(
    run: RunFolder, fake: FakeSlurm, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = (listed("n[1-3]"), NO_CONTROLLER, listed(""), listed("n[1,3]"), NO_CONTROLLER, listed("n[1,3]"))
    fake.script("squeue", *answers)
    told = watch(here(run, monkeypatch), fake, monkeypatch, polls=len(answers))
    assert told == [("n2", "Slurm has taken it from job 17")]


def test_a_job_that_slurm_does_not_list_has_its_nodes_still(
    run: RunFolder, fake: FakeSlurm, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.script("squeue", listed("n[1-2]"), said(HEADER), listed("n[1-2]"))
    assert watch(here(run, monkeypatch), fake, monkeypatch, polls=3) == []


def test_of_a_lost_node_the_step_of_then_is_ended_and_not_the_one_that_is_new(
    run: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step stays in the list though all of its node has died: it says nothing of who lives."""
    cluster = here(run, monkeypatch)
    ours = agent_step(run)
    steps = [("17.0", "n1", "1:00", ours), ("17.1", "n2", "1:00", ours), ("17.2", "n2", "0:05", ours)]
    others = [("17.3", "n2", "1:00", "agent"), ("17.batch", "n1", "1:00", "batch")]
    fake.script("squeue", said(STEPS, *(SEPARATOR.join(step) for step in (*steps, *others))))
    cluster.start_agent("n2", 1, "tcp://x:1")
    cluster._end_dead_steps("17")
    assert fake.calls("scancel") == [], "it may yet leave by itself"
    cluster.lost["n2"] = time.monotonic() - 20
    cluster._end_dead_steps("17")
    cluster._end_dead_steps("17")
    assert fake.calls("scancel") == ["17.1"]


def test_one_in_the_place_of_another_ends_it(run: RunFolder, fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REPLACES, "12")
    here(run, monkeypatch)._take_over("17")
    assert read_json(run.job) == {"id": "17"} and fake.calls("scancel") == ["12"]


@pytest.mark.parametrize(("left", "charged"), [("UNLIMITED", 0), ("1:00:00", 0), ("3:20", 1), ("0:10", 1)])
def test_r01_a_run_is_charged_with_time_limits_and_not_with_preemptions(
    run: RunFolder, fake: FakeSlurm, quick: None, monkeypatch: pytest.MonkeyPatch, left: str, charged: int
) -> None:
    fake.script("squeue", listed("n1", left))
    cluster = here(run, monkeypatch, restarts=3)
    assert cluster.returns_times == 0
    watch(cluster, fake, monkeypatch, polls=1)
    cluster.taken(120)
    assert cluster.returns_times == 1 - charged
    forget_restarts(run)
    assert cluster.returns_times == 0


def test_where_slurm_never_said_how_long_a_job_has_it_is_charged(
    run: RunFolder, fake: FakeSlurm, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.script("squeue", NO_CONTROLLER)
    cluster = here(run, monkeypatch, restarts=3)
    watch(cluster, fake, monkeypatch, polls=1)
    cluster.taken(120)
    assert cluster.returns_times == 0
