import os
import signal
import subprocess
import sys
from pathlib import Path

PASSES = "from pipeline.kill_points import kill_point\nfor _ in range(3): print('p', flush=True); kill_point('a.b')"
CONTROLLER = f"""
import subprocess, sys
from pipeline.kill_points import be_controller
be_controller()
subprocess.run([sys.executable, "-c", {PASSES!r}])
"""


def run(code: str, **told: str) -> "subprocess.CompletedProcess[str]":
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIVOT_")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**kept, **told}, stdout=subprocess.PIPE, text=True, timeout=20, check=False)


def test_the_process_is_killed_when_it_comes_there_for_the_nth_time() -> None:
    killed = run(PASSES, PIVOT_KILL_POINT="a.b:2")
    assert (killed.returncode, killed.stdout.count("p")) == (-signal.SIGKILL, 2)
    assert run(PASSES, PIVOT_KILL_POINT="a.b:4").returncode == run(PASSES, PIVOT_KILL_POINT="a").returncode == 0


def test_a_marker_lets_it_happen_once(tmp_path: Path) -> None:
    told = {"PIVOT_KILL_POINT": "a.b", "PIVOT_KILL_MARKER": str(tmp_path / "killed")}
    assert [run(PASSES, **told).returncode for _ in range(2)] == [-signal.SIGKILL, 0]


def test_the_whole_run_dies_by_its_controller() -> None:
    assert run(CONTROLLER, PIVOT_KILL_POINT="a.b:2:run").returncode == -signal.SIGKILL
    assert run(CONTROLLER, PIVOT_KILL_POINT="a.b:2").returncode == 0
