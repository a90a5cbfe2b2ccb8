"""Who has a job start again whose controller is gone, and how."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import SlurmError
from pipeline.run_folder import RunFolder, read_json, write_json
from slurm import again
from slurm.allocation import submit_job
from slurm.names import RESTARTS, script_beat, taken_marker
from slurm.parse import JobState, NodeState
from tests.fakes.sbatch import make, options, write_client, write_clients


class Asked:
    """Slurm's clients, and what they were asked to do."""

    def __init__(self, state: str = "RUNNING", silent: str = "", outages: int = 0) -> None:
        self.done: list[tuple[str, str]] = []
        self._state, self._silent, self._outages = state, silent, outages

    def jobs(self) -> dict[str, JobState]:
        return {"12": JobState(id="12", state=self._state, nodes=("n1", "n2"), batch_host="n1")}

    def jobs_in_full(self) -> dict[str, JobState]:
        return self.jobs()

    def nodes(self) -> dict[str, NodeState]:
        names = ("n1", "n2", "n3")
        return {name: NodeState(name=name, state="mixed", is_answering=name != self._silent) for name in names}

    def requeue(self, job: str) -> None:
        if self._outages:
            self._outages -= 1
            raise SlurmError("timed out", is_outage=True)
        self.done.append(("requeue", job))

    def cancel(self, job: str) -> None:
        self.done.append(("cancel", job))


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_clients(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv(RESTARTS, "2")
    return tmp_path / "bin"


@pytest.fixture
def run(tmp_path: Path, slurm: Path) -> RunFolder:
    """Submitted as job 12, whose controller is silent for 20 s; its script lives."""
    run, config = make(tmp_path, "cluster.slurm.max_requeues=3", "cluster.nodes=2")
    kept = (slurm / "sbatch").read_text()
    write_client(slurm, "sbatch", "echo Submitted job 12")
    submit_job(run, config, len)
    (slurm / "sbatch").write_text(kept)
    write_json(run.status, {"attempt": 1, "nodes": {"n1": "ready", "n2": "ready"}})
    silence(run.status)
    script_beat(run, "12.0").touch()
    return run


def silence(path: Path) -> None:
    path.touch()
    old = time.time() - 20
    os.utime(path, (old, old))


def ask(run: RunFolder, asked: Any, who: str = "script", life: str = "12.0", is_ending: bool = False) -> str:
    return again.start_again(run, life, who, is_ending, asked)


def test_a_job_whose_nodes_live_is_requeued_by_one_process(run: RunFolder) -> None:
    asked = Asked()
    assert ask(run, asked) == "job 12 is requeued" and asked.done == [("requeue", "12")]
    assert ask(run, asked, "agent-1") == "" and len(asked.done) == 1
    silence(script_beat(run, "12.0"))
    assert ask(run, asked, "agent-1") != "", "the script died over it"
    assert ask(run, asked, "agent-2") == "job 17 has the run now"


@pytest.mark.parametrize("how", ["slurm", "controller", "script"])
def test_where_a_node_is_lost_a_new_job_takes_its_place(run: RunFolder, slurm: Path, how: str) -> None:
    if how == "controller":
        write_json(run.status, {"nodes": {"n1": "given up", "n2": "ready"}})
        silence(run.status)
    if how == "script":
        silence(script_beat(run, "12.0"))
    asked = Asked(silent="n1" if how == "slurm" else "")
    assert ask(run, asked) == "job 17 takes the place of job 12, which had lost n1"
    assert asked.done == [("cancel", "12")] and read_json(run.job) == {"id": "17"}
    text = (slurm / "script").read_text()
    assert options(text)["exclude"] == "n1" and "+ 3)) PIVOT_REPLACES=12\n" in text
    assert (run.jobs / "17_submitted.pkl").exists()


def test_if_slurm_takes_none_without_the_lost_nodes_it_may_have_them(run: RunFolder, slurm: Path) -> None:
    write_client(slurm, "sbatch", f'grep -q exclude "$1" && exit 1; cp "$1" {slurm}/script; echo Submitted job 17')
    assert ask(run, Asked(silent="n2")).startswith("job 17 takes the place")
    assert "exclude" not in options((slurm / "script").read_text())


def test_if_slurm_takes_none_at_all_the_job_is_requeued(run: RunFolder, slurm: Path) -> None:
    write_client(slurm, "sbatch", "echo 'not from here' >&2; exit 1")
    asked = Asked(silent="n2")
    assert "not from here" in ask(run, asked) and asked.done == [("requeue", "12")]


def test_a_run_that_is_cancelled_meanwhile_gets_no_new_job(run: RunFolder, slurm: Path) -> None:
    write_client(slurm, "sbatch", f"touch '{run.ended}'; echo Submitted job 17")
    asked = Asked(silent="n2")
    assert ask(run, asked) == "the run is over" and asked.done == [("cancel", "17")]


@pytest.mark.parametrize(("state", "is_replaced"), [("PENDING", True), ("CANCELLED", False), ("RUNNING", False)])
def test_a_life_that_slurm_ends_by_itself_is_replaced_if_it_would_start_again(
    run: RunFolder, state: str, is_replaced: bool
) -> None:
    """A batch host that crashed has come back: its job would be held."""
    silence(script_beat(run, "12.0"))
    asked = Asked(state)
    ask(run, asked, "agent-1", is_ending=True)
    assert asked.done == ([("cancel", "12")] if is_replaced else [])


def test_a_job_that_slurm_ends_is_left_alone(run: RunFolder) -> None:
    asked = Asked("COMPLETING")
    assert ask(run, asked) == "Slurm ends job 12: COMPLETING" and not asked.done


def test_a_job_does_not_start_again_for_ever(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RESTARTS, "3")
    asked = Asked()
    taken = taken_marker(run, "12.1")
    taken.touch()
    assert ask(run, asked) == "job 12 is requeued", "once it was taken for another job"
    taken.unlink()
    asked.done.clear()
    assert "max_requeues" in ask(run, asked, life="12.1") and not asked.done
    assert (read_json(run.ended) or {})["status"] == "failed"


def test_the_script_asks_until_slurm_answers(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = Asked(outages=2)
    monkeypatch.setattr(again, "Clients", lambda: asked)
    monkeypatch.setattr(again, "_OUTAGE_S", 0.01)
    with pytest.raises(SystemExit) as ended:
        again.main([str(run.path), "--job", "12.0"])
    assert ended.value.code, "the script need not wait"
    assert asked.done == [("requeue", "12")]
    assert capsys.readouterr().out.splitlines() == ["timed out", "timed out", "job 12 is requeued"]


def stand_by(run: RunFolder, asked: Any, *, is_alone: bool = False, is_termed: bool = False) -> str:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        return again.stand_by(run, "12.0", is_alone=is_alone, is_termed=is_termed, clients=asked)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_an_agent_that_a_living_controller_gave_up_does_nothing(run: RunFolder) -> None:
    os.utime(run.status)
    asked = Asked()
    assert stand_by(run, asked, is_alone=True).startswith("the controller lives") and not asked.done
    silence(run.status)
    assert stand_by(run, asked, is_alone=True) == "job 12 is requeued", "and has taken nobody's place"


def test_an_agent_whose_controller_left_in_order_waits_for_the_script_or_does_its_part(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(again, "_PERIOD_S", 0.01)
    asked = Asked()
    over = threading.Timer(0.2, run.ended.touch)
    over.start()
    assert stand_by(run, asked) == "the run is over" and not asked.done
    over.join()
    run.ended.unlink()
    dead = threading.Timer(0.2, silence, [script_beat(run, "12.0")])
    dead.start()
    assert stand_by(run, asked) == "job 17 takes the place of job 12, which had lost n1"
    dead.join()


def test_an_agent_asks_until_slurm_answers(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(again, "_PERIOD_S", 0.01)
    asked = Asked(outages=2)
    assert stand_by(run, asked, is_alone=True) == "job 12 is requeued" and asked.done == [("requeue", "12")]


def test_on_term_an_agent_leaves_it_to_slurm_if_the_script_lives(run: RunFolder) -> None:
    asked = Asked("PENDING")
    assert "whose script lives" in stand_by(run, asked, is_alone=True, is_termed=True) and not asked.done
    silence(script_beat(run, "12.0"))
    assert "takes the place" in stand_by(run, asked, is_alone=True, is_termed=True)


def test_a_slurm_that_does_not_answer_is_said(run: RunFolder) -> None:
    silence(script_beat(run, "12.0"))

    class Mute(Asked):
        def jobs_in_full(self) -> dict[str, JobState]:
            raise SlurmError("timed out", is_outage=True)

    assert stand_by(run, Mute(), is_termed=True) == "the job could not be started again: timed out"
