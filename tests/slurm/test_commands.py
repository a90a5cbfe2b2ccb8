import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slurm.commands import Clients, SlurmError, outside_of_jobs
from slurm.parse import SEPARATOR
from tests.cluster.machine import is_alive
from tests.slurm.clients import HANG, NO_CONTROLLER, FakeSlurm, queue


@pytest.fixture
def fake(tmp_path: Path) -> FakeSlurm:
    return FakeSlurm(tmp_path / "bin")


def clients(fake: FakeSlurm, timeout_s: float = 20, tries: int = 3) -> Clients:
    return Clients(timeout_s=timeout_s, tries=tries, pause_s=0.02, environment=fake.environment)


def test_a_client_that_hangs_fails_then_answers(fake: FakeSlurm) -> None:
    fake.script("squeue", HANG, NO_CONTROLLER, queue(j17="RUNNING"))
    started = time.monotonic()
    jobs = clients(fake, timeout_s=0.5).jobs()
    assert time.monotonic() - started < 3
    assert jobs["17"].state == "RUNNING"
    assert len(fake.calls("squeue")) == 3


def test_what_hangs_is_ended_with_all_that_it_started(fake: FakeSlurm) -> None:
    child = fake.folder / "child"
    fake.script("squeue", f"sleep 60 & echo $! > {child}; wait")
    with pytest.raises(SlurmError, match=r"squeue.*timed out after 0.3 s") as raised:
        clients(fake, timeout_s=0.3, tries=1).jobs()
    assert raised.value.is_outage
    deadline = time.monotonic() + 5
    while is_alive(int(child.read_text())):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_outage_that_stays_is_told_with_the_command_and_what_it_said(fake: FakeSlurm) -> None:
    fake.script("squeue", NO_CONTROLLER)
    with pytest.raises(SlurmError, match=r"`squeue .*`: slurm_load_jobs error: Unable to contact") as raised:
        clients(fake).jobs()
    assert raised.value.is_outage
    assert len(fake.calls("squeue")) == 3
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.is_outage) == (str(raised.value), True)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'scontrol: error: Access/permission denied' >&2; exit 1", "permission denied"),
        ("exit 3", "exit code 3"),
        ("kill -9 $$", "killed by SIGKILL"),
    ],
)
def test_a_refusal_is_no_outage_and_is_not_repeated(fake: FakeSlurm, script: str, said: str) -> None:
    fake.script("scontrol", script)
    with pytest.raises(SlurmError, match=said) as raised:
        clients(fake).requeue("17")
    assert not raised.value.is_outage
    assert fake.calls("scontrol") == ["requeue 17"]


def test_a_client_that_is_not_there(fake: FakeSlurm) -> None:
    with pytest.raises(SlurmError, match="sinfo: not found") as raised:
        Clients(environment={"PATH": str(fake.folder)}).nodes()
    assert not raised.value.is_outage


def test_an_answer_that_is_none_is_an_outage(fake: FakeSlurm) -> None:
    fake.script("squeue", "echo the cache is being rebuilt")
    with pytest.raises(SlurmError, match=r"gave no answer.*the cache is being rebuilt") as raised:
        clients(fake).jobs()
    assert raised.value.is_outage


def test_a_requeue_is_never_done_twice(fake: FakeSlurm) -> None:
    fake.script("scontrol", NO_CONTROLLER, "exit 0")
    clients(fake).requeue("17")
    assert fake.calls("scontrol") == ["requeue 17"] * 2  # the first did not reach Slurm
    for unknown in (HANG, "echo 'Socket timed out on send/recv operation' >&2; exit 1"):
        fake.script("scontrol", unknown, "exit 0")
        with pytest.raises(SlurmError, match="timed out") as raised:
            clients(fake, timeout_s=0.3).requeue("17")
        assert raised.value.is_outage
        assert fake.calls("scontrol") == ["requeue 17"]


def test_what_can_be_repeated_is(fake: FakeSlurm) -> None:
    slow = "echo 'Socket timed out on send/recv operation' >&2; exit 1"
    fake.script("scancel", slow, "exit 0")
    clients(fake).cancel("17", "USR2")
    assert fake.calls("scancel") == ["--signal=USR2 17"] * 2


def test_to_cancel_what_is_over_is_no_error(fake: FakeSlurm) -> None:
    fake.script("scancel", "echo 'scancel: error: Kill job error on job id 17: Invalid job id specified' >&2; exit 225")
    clients(fake).cancel("17")
    fake.script("scancel", "echo 'scancel: error: Access/permission denied' >&2; exit 1")
    with pytest.raises(SlurmError):
        clients(fake).cancel("17")


def test_the_other_questions(fake: FakeSlurm) -> None:
    sample = Path(__file__).parent / "samples/squeue_22_05.json"
    fake.script("squeue", f"cat {sample}")
    fake.script("sinfo", "printf '%s\\n' 'NODELIST\x1fSTATE\x1fREASON' 'n1\x1fdown*\x1fNot responding'")
    assert clients(fake).jobs_in_full()["44033302"].restarts == 1
    assert clients(fake).nodes()["n1"].reason == "Not responding"
    assert "--json" in fake.calls("squeue")[0] and SEPARATOR in fake.calls("sinfo")[0]


def test_nothing_of_a_job_reaches_a_client(fake: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = {
        "SLURM_JOB_ID": "1",
        "SLURM_CPU_BIND": "cores",
        "SBATCH_PARTITION": "low",
        "SQUEUE_PARTITION": "low",
        "SRUN_DEBUG": "3",
        "SLURM_CONF": "/the/conf",
        "PATH": fake.environment["PATH"],
        "OWN": "kept",
    }
    asked = Clients()
    for name, value in inside.items():
        monkeypatch.setenv(name, value)
    fake.script("scontrol", f"env > {fake.folder}/told")
    asked.requeue("1")
    environment = dict(line.split("=", 1) for line in (fake.folder / "told").read_text().splitlines())
    told = {name for name in environment if name.startswith(("SLURM", "SBATCH", "SQUEUE", "SRUN", "OWN"))}
    assert told == {"SLURM_CONF", "OWN"}
    assert outside_of_jobs(inside).keys() == {"SLURM_CONF", "PATH", "OWN"}


REQUEUE = """
import sys
from slurm.commands import Clients
Clients(environment={"PATH": sys.argv[1]}).requeue("17")
"""


def test_a_signal_to_a_whole_step_ends_no_requeue_half_way(fake: FakeSlurm) -> None:
    """Slurm's signals reach every process of a step, and a requeue from inside a step brings one at once."""
    done = fake.folder / "done"
    fake.script("scontrol", f"echo ready >> {done}; read -r _ < {fake.folder}/go; echo done >> {done}")
    os.mkfifo(fake.folder / "go")
    shield = ["/bin/sh", "-c", 'trap "" TERM USR2; exec "$@"', "sh"]
    caller = subprocess.Popen([*shield, sys.executable, "-c", REQUEUE, fake.environment["PATH"]])
    deadline = time.monotonic() + 20
    while not done.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGINT):
        os.killpg(fake.pids("scontrol")[0], number)
    (fake.folder / "go").write_text("\n")
    assert caller.wait(20) == 0
    assert done.read_text().split() == ["ready", "done"]
