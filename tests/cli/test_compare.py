"""`compare`: real runs of emulated engines in two modes; and runs that are there."""

import json
import subprocess
from pathlib import Path

from pipeline.comparison import IDLE
from tests.cli.conftest import COMMAND, Pivot, environment

SMALL = ("evaluate.freq=0", "cluster.slots_per_node=4", "algorithm.staleness=1", "run.seed=7")


def test_modes_are_run_once_and_held_against_each_other(pivot: Pivot, tmp_path: Path) -> None:
    command = [*COMMAND, "compare", "configs/emulated.yaml", *SMALL, "--modes", "disaggregated,shiftable,colocated"]
    settings = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": 120}
    first = subprocess.run([*command, "--json"], **settings)  # type: ignore[call-overload]
    assert first.returncode == 0, first.stderr
    found = {one["name"]: one for one in json.loads(first.stdout)}
    assert list(found) == ["disaggregated", "shiftable", "colocated"], "nothing else is printed"
    for name, one in found.items():
        (run,) = one["runs"]
        folder = Path(run["run"])
        assert folder == tmp_path / f"runs/emulated-compare/{name}-seed7"
        assert run["num_steps"] == 3 and run["sequences_per_s"] > 0 and run["reward"] is not None
        assert set(run["idle"]) == set(IDLE) and 0 < sum(run["idle"].values()) <= 1.001
        assert f"mode: {name}" in (folder / "config.yaml").read_text()
    assert found["disaggregated"]["mean"]["shifts_per_step"] == 0 < found["colocated"]["mean"]["shifts_per_step"]

    again = subprocess.run(command, **settings)  # type: ignore[call-overload]
    assert again.returncode == 0 and not list(tmp_path.glob("runs/*/*/attempt_2")), "what is done is not run again"
    assert [line.split()[0] for line in again.stdout.splitlines()[1:4]] == ["disaggregated", "shiftable", "colocated"]
    assert "100%" in again.stdout

    names = [one["runs"][0]["run"] for one in found.values()]
    runs = pivot("compare", *names[:2], "--html", "both.html")
    assert runs.code == 0 and runs.out.count("seed7") >= 2 and "page: both.html" in runs.out, runs.err
    assert "http" not in (tmp_path / "both.html").read_text().replace("http-equiv", "")


def test_a_mode_without_room_is_said_and_the_others_run(tmp_path: Path) -> None:
    command = [*COMMAND, "compare", "configs/emulated.yaml", "evaluate.freq=0", "cluster.slots_per_node=2"]
    settings = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run([*command, "--modes", "disaggregated,colocated"], **settings)  # type: ignore[call-overload]
    assert done.returncode == 1
    assert "disaggregated: " in done.stderr and "want 3 slots, the cluster has 2" in done.stderr
    assert "colocated " in done.stdout and "disaggregated" not in done.stdout


def test_what_cannot_be_compared_is_refused(pivot: Pivot) -> None:
    done = pivot("compare", "nothing", "none")
    assert done.code == 2 and "no run 'nothing'" in done.err
    done = pivot("compare", "nothing")
    assert done.code == 2 and "one run is nothing to compare" in done.err
    done = pivot("compare", "nothing", "none", "--html", "page.txt")
    assert done.code == 2 and "--html page.txt: valid: a file that ends in .html" in done.err
    done = pivot("compare", "configs/emulated.yaml", "--modes", "shifty")
    assert done.code == 2 and "--modes 'shifty'; valid: all, or some of colocated" in done.err
