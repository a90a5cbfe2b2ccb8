"""Workers that are no forks: a real agent, and processes that come to its door as a Slurm step's would."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeline import wire
from pipeline.wire_launch import LaunchAsked, LaunchEnded
from slurm import stub
from tests.slurm.rig import NODE, Rig, is_gone, shared_memory, start_order, temporary_folders, until
from tests.slurm.test_agent import family

Come = Callable[..., "subprocess.Popen[str]"]
GIVEN = {"CUDA_VISIBLE_DEVICES": "GPU-slurms-own", "SLURM_STEP_ID": "7", "PATH": os.defpath}
BY_STEPS = {"kind": "slurm", "slurm": {"launcher": "step"}}


@pytest.fixture
def come() -> Iterator[Come]:
    """Start a stub, as a step of a worker's is."""
    began: list[subprocess.Popen[str]] = []

    def begin(door: str, worker: str, life: int, **more: Any) -> "subprocess.Popen[str]":
        command = [sys.executable, "-I", "-S", stub.__file__, door, worker, str(life)]
        said = subprocess.PIPE
        began.append(subprocess.Popen(command, env=GIVEN, stdout=said, stderr=subprocess.STDOUT, text=True, **more))
        return began[-1]

    yield begin
    for process in began:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def step_rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    cluster = {
        "kind": "slurm",
        "slurm": {"launcher": "step"},
        "env": {"CUDA_VISIBLE_DEVICES": "9", "FROM_CONFIG": "yes"},
    }
    rig = Rig(tmp_path_factory.mktemp("rig") / "run", cluster=cluster)
    rig.welcome([])
    rig.expect(wire.NodeReady)
    yield rig
    rig.close()


def start(worker: str, life: int, slots: list[int], main: str = "stages.worker:main") -> wire.StartWorker:
    preload = ["stages.engines.emulated"]
    return msgspec.structs.replace(start_order(worker, main=main), life=life, slots=slots, preload=preload)


def order(rig: Rig, worker: str, life: int, slots: list[int]) -> str:
    """Returns the door."""
    rig.send(start(worker, life, slots))
    asked = rig.expect(LaunchAsked, worker=worker)
    assert (asked.life, asked.num_slots) == (life, len(slots))
    return asked.door


def look() -> tuple[int, dict[str, str], str]:
    return os.getpid(), dict(os.environ), os.readlink("/proc/self/fd/1")


def test_a_worker_comes_works_and_ends(step_rig: Rig, come: Come) -> None:
    rig = step_rig
    process = come(order(rig, "rollout-0", 5, [0, 2]), "rollout-0", 5)
    bound = rig.expect(wire.Bindings).bindings
    assert bound == [wire.Binding(worker="rollout-0", life=5, slots=[0, 2], pid=process.pid)]
    rig.ready("rollout-0")
    pid, environment, files = rig.call("rollout-0", look)
    assert pid == process.pid == rig.pids["rollout-0"]
    assert environment["CUDA_VISIBLE_DEVICES"] == "GPU-slurms-own" and environment["FROM_CONFIG"] == "yes"
    assert "SLURM_STEP_ID" not in environment and environment["OMP_NUM_THREADS"] == "1"
    log = str(rig.run.process_log(rig.attempt, NODE, "rollout-0"))
    assert log in files, "it writes to its log"
    rig.send(wire.KillWorker(worker="rollout-0", reason="enough"))
    ended = rig.expect(wire.WorkerExited, worker="rollout-0", life=5)
    assert ended.reason.startswith("its step has ended") and "--- rollout-0 on" in ended.reason
    assert is_gone(pid) and rig.expect(wire.Bindings).bindings == []


def test_slots_are_taken_from_the_order_on_until_the_process_is_dead(step_rig: Rig, come: Come) -> None:
    rig = step_rig
    door = order(rig, "rollout-0", 6, [0])
    rig.send(start("rollout-1", 6, [0]))
    assert "wants slot 0" in rig.expect(wire.WorkerExited, worker="rollout-1").reason
    come(door, "rollout-0", 6)
    rig.ready("rollout-0")
    os.kill(rig.pids["rollout-0"], signal.SIGKILL)
    rig.expect(wire.WorkerExited, worker="rollout-0")
    order(rig, "rollout-1", 7, [0])
    rig.send(wire.KillWorker(worker="rollout-1", reason="enough"))
    assert "before Slurm had begun" in rig.expect(wire.WorkerExited, worker="rollout-1", life=7).reason


def test_a_step_that_ended_before_it_came_is_told_with_the_reason(step_rig: Rig, come: Come) -> None:
    rig = step_rig
    door = order(rig, "rollout-0", 8, [0])
    for life, reason in ((7, "an older one"), (8, "srun: error: Invalid node")):
        rig.send(LaunchEnded(node=NODE, worker="rollout-0", life=life, reason=reason))
    assert rig.expect(wire.WorkerExited, worker="rollout-0").reason == "srun: error: Invalid node"
    late = come(door, "rollout-0", 8)
    assert "does not want this worker" in late.communicate()[0] and late.returncode == 1


def test_a_worker_whose_srun_has_ended_is_ended(step_rig: Rig, come: Come) -> None:
    rig = step_rig
    come(order(rig, "rollout-0", 9, [0]), "rollout-0", 9)
    rig.ready("rollout-0")
    rig.send(LaunchEnded(node=NODE, worker="rollout-0", life=8, reason="an older one"))
    rig.send(LaunchEnded(node=NODE, worker="rollout-0", life=9, reason="its step ended: srun, killed by SIGKILL"))
    assert rig.expect(wire.WorkerExited, worker="rollout-0").reason.startswith("its step ended: srun, killed")
    assert is_gone(rig.pids["rollout-0"])


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\xff\xff\xff\xff",
        b"\x03\x00\x00\x00abc",
        b"\x02\x00\x00\x00[]",
        b"\x02\x00\x00\x00{}",
        *(
            len(who).to_bytes(4, "little") + who
            for who in (
                json.dumps({"worker": worker, "life": life}).encode()
                for worker, life in (("rollout-1", 10), ("rollout-0", 9), ("rollout-0", None), ([], 10))
            )
        ),
    ],
)
def test_who_is_not_expected_is_turned_away(step_rig: Rig, said: bytes) -> None:
    rig = step_rig
    door = order(rig, "rollout-0", 10, [0])
    with socket.socket(socket.AF_UNIX) as knocking:
        knocking.connect(f"\0{door}")
        knocking.sendall(said)
        knocking.shutdown(socket.SHUT_WR)
        assert knocking.recv(1) == b""
    rig.send(wire.KillWorker(worker="rollout-0", reason="enough"))
    rig.expect(wire.WorkerExited, worker="rollout-0", life=10)


def test_without_an_agent_it_says_so(come: Come) -> None:
    process = come("pivot-nobody", "rollout-0", 1)
    assert "there is no agent at pivot-nobody" in process.communicate()[0] and process.returncode == 1


@pytest.mark.parametrize("end", ["killed", "quit", "killed, and it is deaf"])
def test_its_agents_end_is_its_own(tmp_path: Path, come: Come, end: str) -> None:
    """And nothing of the node is left, the worker's temporary files included."""
    rig = Rig(tmp_path / "run", cluster=BY_STEPS)
    try:
        rig.welcome([])
        rig.expect(wire.NodeReady)
        main = "tests.slurm.tasks:deaf" if end == "killed, and it is deaf" else "stages.worker:main"
        rig.send(start("rollout-0", 0, [0], main))
        process = come(rig.expect(LaunchAsked).door, "rollout-0", 0)
        rig.ready("rollout-0")
        agent, pids = rig.agent, [*family(rig), process.pid]
        if end == "quit":
            rig.send(wire.Quit(reason="the test is over"))
        else:
            agent.kill()
        agent.wait(10)
        process.wait(10)
        until(lambda: all(map(is_gone, pids)), f"the end of {pids}")
        assert shared_memory(rig.run, rig.attempt) == [] and temporary_folders(agent.pid) == []
    finally:
        rig.close()
