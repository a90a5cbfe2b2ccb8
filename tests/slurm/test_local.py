"""How a controller lives beside the process that started it. (test_agent.py shows the agents below it.)"""

import os
import signal
import subprocess
from pathlib import Path

import pytest

from pipeline.config import save_resolved
from pipeline.processes import python_command, python_environment
from pipeline.run_folder import RunFolder, read_json
from tests.fakes.scripted import make_config
from tests.slurm.rig import is_gone, shared_memory, until


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    run = RunFolder(tmp_path / "run")
    run.create()
    save_resolved(make_config(limits={"stage_s": 60}), run.config)
    return run


def start_and_kill_the_caller(run: RunFolder, how: str) -> int:
    """Returns the pid of the controller that it had started."""
    command = python_command("tests.slurm.caller", str(run.path), how)
    with subprocess.Popen(command, env=python_environment(), stdout=subprocess.PIPE) as caller:
        assert caller.stdout is not None
        controller = int(caller.stdout.readline())
        assert os.getpgid(controller) == controller  # a Ctrl-C at the terminal does not reach it
        assert (os.getsid(controller) == controller) == (how == "detached")
        caller.kill()
    return controller


def test_an_attached_controller_dies_with_its_caller(run: RunFolder) -> None:
    controller = start_and_kill_the_caller(run, "attached")
    until(lambda: is_gone(controller), "the end of the controller")
    assert not run.ended.exists()


def test_a_detached_controller_outlives_its_caller(run: RunFolder) -> None:
    controller = start_and_kill_the_caller(run, "detached")
    status = until(lambda: read_json(run.status), "the controller to say that it lives")
    assert status["status"] not in ("done", "failed")
    os.kill(controller, signal.SIGKILL)
    until(lambda: is_gone(controller) and not shared_memory(run, 1), "the end of all that it started")
