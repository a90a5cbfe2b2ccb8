"""A real agent: how a node begins, and that nothing of it is left however it ends."""

import json
import os
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import wire
from pipeline.core.errors import RunError
from pipeline.processes import python_command, python_environment
from pipeline.run_folder import RunFolder
from tests.slurm.rig import NODE, Rig, children, is_gone, shared_memory, temporary_folders, until

MakeRig = Callable[..., Rig]


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    made: list[Rig] = []

    def make(**sections: Any) -> Rig:
        made.append(Rig(tmp_path / f"run-{len(made)}", **sections))
        return made[-1]

    yield make
    for rig in made:
        rig.close()


def family(rig: Rig) -> list[int]:
    """The pids of agent, guardian, zygote and all workers."""
    pids = [rig.agent.pid]
    for pid in pids:
        pids += children(pid)
    return pids


def assert_nothing_left(rig: Rig, pids: list[int]) -> None:
    until(lambda: all(map(is_gone, pids)), f"the end of {pids}")
    assert shared_memory(rig.run, rig.attempt) == []
    assert temporary_folders(pids[0]) == []


def serve(rig: Rig) -> list[int]:
    """Join ▶ NodeReady ▶ a worker; returns the pids of agent, guardian, zygote and worker."""
    rig.welcome()
    rig.expect(wire.NodeReady)
    rig.start_worker("rollout-0")
    rig.ready("rollout-0")
    pids = family(rig)
    assert len(pids) == 4 and rig.pids["rollout-0"] == pids[3]
    return pids


def test_a_node_begins_and_is_told_to_quit(make_rig: MakeRig) -> None:
    start = time.monotonic()
    rig = make_rig()
    rig.welcome()
    ready = rig.expect(wire.NodeReady)
    joined = time.monotonic() - start
    files = shared_memory(rig.run, rig.attempt)
    assert files == sorted(
        f"{ready.gps}-{part}" for part in ("policy.meta", "policy.0", "policy.1", "genrm.meta", "genrm.0")
    )
    assert {stat.S_IMODE(os.stat(f"/dev/shm/{name}").st_mode) for name in files} == {0o600}
    rig.start_worker("rollout-0")
    rig.ready("rollout-0")
    job = rig.submit("rollout-0", os.getppid)
    rig.expect(wire.TaskStarted, task=job.job_id)
    running = time.monotonic() - start
    print(f"agent's start to node ready {joined:.2f} s, to a task running {running:.2f} s; {ready.seconds}")
    zygote = rig.result(job)
    assert os.listdir(f"/proc/{zygote}/task") == [str(zygote)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in rig.run.logs(rig.attempt).iterdir()} == {0o600}
    pids = family(rig)
    rig.send(wire.Quit(reason="the test is over"))
    assert rig.agent.wait(10) == 0
    assert_nothing_left(rig, pids)
    assert "the test is over" in rig.run.process_log(rig.attempt, NODE, "agent").read_text()


def test_term_ends_a_node(make_rig: MakeRig) -> None:
    rig = make_rig()
    pids = serve(rig)
    rig.agent.terminate()
    assert rig.agent.wait(10) == 0
    assert_nothing_left(rig, pids)


def test_a_newer_attempt_ends_a_node(make_rig: MakeRig) -> None:
    rig = make_rig()
    pids = serve(rig)
    rig.end._attempt += 1
    rig.send(wire.Beat())
    rig.end._attempt -= 1
    assert rig.agent.wait(10) == 0
    assert_nothing_left(rig, pids)


def test_the_death_of_its_zygote_is_the_death_of_a_node_which_starts_again(make_rig: MakeRig) -> None:
    rig = make_rig()
    serve(rig)
    rig.start_worker("deaf-0", main="tests.slurm.tasks:deaf")
    rig.ready("deaf-0")
    pids = family(rig)
    os.kill(pids[2], signal.SIGKILL)
    assert rig.expect(wire.NodeFailed).reason.startswith("the zygote ended: killed by SIGKILL")
    assert rig.agent.wait(10) == 1
    assert_nothing_left(rig, pids)
    rig.start_agent()
    serve(rig)


def leave_temporary_file() -> str:
    """What a library in a worker does."""
    fd, path = tempfile.mkstemp(prefix="vllm_")
    os.close(fd)
    return path


def test_a_stopped_agent_is_replaced_once_nothing_of_it_is_left(make_rig: MakeRig) -> None:
    rig = make_rig()
    pids = serve(rig)
    path = rig.call("rollout-0", leave_temporary_file)
    assert [os.path.dirname(path)] == temporary_folders(rig.agent.pid)
    os.kill(rig.agent.pid, signal.SIGSTOP)
    before = shared_memory(rig.run, rig.attempt)
    rig.start_agent()  # kills the old one first
    until(lambda: all(map(is_gone, pids)), "the old ones")  # a process lets go of what it has before it is dead
    assert before and not any(os.path.exists(f"/dev/shm/{name}") for name in before)
    assert not os.path.exists(os.path.dirname(path))
    rig.heard.clear()
    serve(rig)
    assert not set(before) & set(shared_memory(rig.run, rig.attempt))


def test_what_is_left_of_an_old_agent_keeps_the_new_one_away(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig()
    pids = serve(rig)
    monkeypatch.setattr("slurm.local._GONE_S", 0.2)
    os.kill(pids[1], signal.SIGSTOP)
    with pytest.raises(RunError, match=f"processes of its old agent {pids[0]} are still there"):
        rig.start_agent()
    os.kill(pids[1], signal.SIGCONT)
    rig.start_agent()
    rig.heard.clear()
    serve(rig)


def test_after_a_kill_of_everything_the_guardian_cleans_up(make_rig: MakeRig) -> None:
    rig = make_rig()
    agent, guardian, *others = serve(rig)
    path = rig.call("rollout-0", leave_temporary_file)
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(guardian, signum)
    assert os.getsid(guardian) == guardian
    for pid in (agent, *others):
        os.kill(pid, signal.SIGKILL)
    rig.agent.wait()
    start = time.monotonic()
    assert_nothing_left(rig, [agent, guardian, *others])
    assert not os.path.exists(path)
    print(f"clean after {time.monotonic() - start:.3f} s")


def test_r09_what_a_run_without_guardian_left_the_next_one_removes(make_rig: MakeRig) -> None:
    dead, live = make_rig(), make_rig()
    theirs = serve(live)
    agent, guardian, *others = serve(dead)
    for pid in (guardian, agent, *others):
        os.kill(pid, signal.SIGKILL)
    dead.agent.wait()
    until(lambda: all(map(is_gone, others)), f"the end of {others}")
    assert shared_memory(dead.run, 1) and temporary_folders(agent)
    before = shared_memory(live.run, 1), temporary_folders(theirs[0])
    serve(make_rig())
    assert shared_memory(dead.run, 1) == [] and temporary_folders(agent) == []
    assert (shared_memory(live.run, 1), temporary_folders(theirs[0])) == before and len(before[1]) == 1
    live.call("rollout-0", os.getpid)


def test_a_killed_controller_leaves_nothing_behind(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    command = python_command("tests.slurm.controller", str(run.path))
    with subprocess.Popen(command, env=python_environment(), stdout=subprocess.PIPE) as controller:
        assert controller.stdout is not None
        pids = json.loads(controller.stdout.readline())
        assert shared_memory(run, 1)
        controller.kill()
    start = time.monotonic()
    until(lambda: all(map(is_gone, pids.values())), f"the end of {pids}")
    until(lambda: not shared_memory(run, 1), "an empty /dev/shm")
    seconds = time.monotonic() - start
    print(f"gone after {seconds:.2f} s")
    assert seconds < 5  # at once, not when the agent's patience ends


def test_a_silent_controller_is_left(make_rig: MakeRig) -> None:
    rig = make_rig(patience_s=1.5)
    pids = serve(rig)
    assert rig.agent.wait(10) == 1  # the test says nothing meanwhile
    assert rig.expect(wire.NodeFailed).reason.startswith("the controller was silent for ")
    assert_nothing_left(rig, pids)


@pytest.mark.parametrize(
    ("preload", "said"),
    [(["no_such_module"], "No module named 'no_such_module'"), (["tests.slurm.threaded"], "left 2 threads")],
)
def test_a_zygote_that_cannot_fork_fails_the_node(make_rig: MakeRig, preload: list[str], said: str) -> None:
    rig = make_rig()
    rig.welcome(preload)
    assert said in rig.expect(wire.NodeFailed).reason
    assert rig.agent.wait(10) == 1
    assert shared_memory(rig.run, rig.attempt) == []


def test_a_bad_model_fails_the_node(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig()
    rig.expect(wire.Join)
    policy = {"policy": str(tmp_path), "policy_dtype": "float32", "version": 0}
    rig.send(wire.Welcome(genrm="emulated", genrm_dtype="float32", preload=[], has_mover=False, **policy))
    assert "has no *.safetensors" in rig.expect(wire.NodeFailed).reason
    assert rig.agent.wait(10) == 1
    assert shared_memory(rig.run, rig.attempt) == []
