"""What the commands say and how they exit, without a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.run_folder import RunFolder, write_json
from pipeline.status import start_ticks
from tests.cli.conftest import CHECKOUT, COMMAND, Pivot, environment
from tests.cli.private import small_disk

HEAVY = ("torch", "pyarrow", "mlflow", "vllm", "transformers", "numpy", "pydantic", "rich", "zmq", "submitit")


@pytest.mark.parametrize("arguments", [["--help"], ["submit", "--help"], ["logs", "-h"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = f"""
import sys
from pipeline.cli.main import run
code = run({arguments!r})
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(code)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr.strip()) == (0, "[]")
    assert "Usage: pivot-pipeline" in done.stdout


def test_the_commands_are_these(pivot: Pivot) -> None:
    text = pivot("--help").out
    listed = [line.split()[0] for line in text.split("Commands:")[1].splitlines() if line.strip()]
    assert listed == [
        "cancel",
        "compare",
        "completion",
        "dag",
        "doctor",
        "eval",
        "export",
        "export-config",
        "gps",
        "list",
        "logs",
        "new",
        "plan",
        "report",
        "resume",
        "simulate",
        "status",
        "submit",
        "validate",
        "watch",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submot"], "No such command 'submot'"),
        (["submit"], "Missing argument"),
        (["submit", "--clutser", "local", "x.yaml"], "No such option"),
        (["submit", "--cluster", "k8s", "x.yaml"], "is not one of"),
        (["submit", "gone.yaml"], "no such configuration file: gone.yaml"),
        (["submit", "trainer.lr=1"], "no configuration file was named"),
        (["submit", "configs/emulated.yaml", "=1"], "no override"),
        (["submit", "configs/emulated.yaml", "--name", "a/b"], "run.name"),
        (["submit", "configs/emulated.yaml", "--cluster", "slurm"], "Slurm"),
        (["validate", "configs/emulated.yaml", "trainer.learning_rat=1e-5"], "did you mean trainer.lr?"),
        (["validate", "configs/emulated.yaml", "model.policy.path=gone"], "model.policy.path: no such folder"),
        (["dag", "gone.yaml"], "no such configuration file"),
        (["resume", "nothing"], "no run 'nothing'"),
        (["cancel", "nothing"], "no run 'nothing'"),
        (["logs", "nothing"], "no run 'nothing'"),
        (["status", "nothing"], "no run 'nothing'"),
        (["gps", "nothing"], "no run 'nothing'"),
        (["plan", "nothing"], "no run 'nothing'"),
        (["plan", "nothing", "--gpus", "8"], "a run has its own"),
        (["plan", "gone.yaml"], "no such configuration file"),
        (["plan", "configs/emulated.yaml", "--at", "1", "--version", "2"], "valid: one of them"),
        (["plan", "configs/emulated.yaml"], "model.policy.path: emulated holds no config.json"),
    ],
)
def test_the_users_fault_exits_with_2_and_leaves_nothing(
    pivot: Pivot, tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = pivot(*arguments)
    assert done.code == 2, done
    assert message in done.err and done.out == ""
    assert list(tmp_path.iterdir()) == []


def test_validate_says_what_the_run_will_be(pivot: Pivot) -> None:
    done = pivot("validate", "configs/emulated.yaml", "rollout.n=8")
    assert (done.code, done.err) == (0, "")
    assert done.out == "valid: 3 steps of 4 prompts x 8 responses, 1 updates each\n"


def test_dag_prints_each_stage_after_those_it_waits_for(pivot: Pivot) -> None:
    done = pivot("dag", "configs/emulated.yaml")
    assert done.code == 0, done.err
    stages = [line.split()[0] for line in done.out.split("\n\n")[0].splitlines()[1:]]
    order = ["prompts", "rollout", "reward", "train", "publish", "evaluate", "checkpoint"]
    assert [stage for stage in stages if stage in order] == order
    assert "train ▶" in done.out


def test_a_dry_run_prints_the_whole_configuration_and_starts_nothing(pivot: Pivot, tmp_path: Path) -> None:
    done = pivot("submit", "configs/emulated.yaml", "--name", "1e5", "--dry-run", "cluster.env={API_KEY: hunter2}")
    assert done.code == 0, done.err
    assert done.out.startswith(f"# would run in {tmp_path}/runs/1e5\n")
    shown = yaml.safe_load(done.out)
    assert shown["run"]["name"] == "1e5" and shown["limits"]["restarts"] == 3 and "hunter2" not in done.out
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_something_else_is_not_made_a_run(pivot: Pivot, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    done = pivot("submit", "configs/emulated.yaml", "--run-dir", "mine")
    assert done.code == 2 and "is not an empty folder" in done.err
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_wheel_brings_the_configs_and_takes_a_users_own_over_them(pivot: Pivot, tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "emulated.yaml").write_text("trainer: {lr: x}")
    done = pivot("validate", "configs/emulated.yaml")
    assert done.code == 2 and "'x'" in done.err


# --- runs that were -------------------------------------------------------------------------------------------------


def make_run(root: Path, name: str, **status: object) -> RunFolder:
    run = RunFolder(root / "runs" / name)
    run.create()
    (run.path / "config.yaml").touch()
    run.begin_attempt()
    values = {"run": name, "status": "running", "attempt": 1, "step": 2, "total_steps": 9, "updated": 0.0}
    write_json(run.status, {**values, "pid": 1 << 22, "pid_start": 5, **status})
    return run


def test_status_lists_runs_and_sees_that_a_controller_was_killed(pivot: Pivot, tmp_path: Path) -> None:
    assert pivot("status").out.startswith("no runs in ")
    make_run(tmp_path, "killed")
    make_run(tmp_path, "lives", pid=os.getpid(), pid_start=start_ticks(os.getpid()))
    make_run(tmp_path, "reused", pid=os.getpid(), pid_start=1)
    lines = [line.split()[:5] for line in pivot("status").out.splitlines()[1:]]
    assert lines == [
        ["killed", "died", "2", "of", "9"],
        ["lives", "running", "2", "of", "9"],
        ["reused", "died", "2", "of", "9"],
    ]
    states = json.loads(pivot("status", "--json").out)
    assert [(s["run"], s["live"]) for s in states] == [("killed", False), ("lives", True), ("reused", False)]
    assert json.loads(pivot("status", "lives", "--json").out)["live"] is True
    assert "pivot-pipeline resume killed" in pivot("status", "killed").out


def test_r06_the_first_cause_is_shown_with_role_node_and_log_and_obeys_no_control_character(
    pivot: Pivot, tmp_path: Path
) -> None:
    error = {"reason": "boom \x1b[2J", "role": "reward", "node": "local-0", "log_tail": "line\n\x1b]0;x\x07\u202eend"}
    make_run(tmp_path, "r", status="failed", error=error)
    text = pivot("status", "r").out
    assert "cause (reward on local-0): boom \\x1b[2J" in text
    assert "line\n\\x1b]0;x\\x07\\u202eend" in text and "\x1b" not in text


def test_a_live_run_is_not_resumed_and_a_dead_one_not_cancelled(pivot: Pivot, tmp_path: Path) -> None:
    make_run(tmp_path, "lives", pid=os.getpid(), pid_start=start_ticks(os.getpid()))
    make_run(tmp_path, "killed")
    done = pivot("resume", "lives")
    assert done.code == 2 and "goes on already" in done.err
    done = pivot("cancel", "killed")
    assert done.code == 2 and "is not running: died" in done.err


def test_logs_are_chosen_by_role_and_step_and_obey_no_control_character(pivot: Pivot, tmp_path: Path) -> None:
    run = make_run(tmp_path, "r")
    run.begin_attempt()
    (run.path / "logs" / "controller.log").write_text("from the controller\n")
    run.process_log(1, "local-0", "rollout-0").write_text("old\n")
    run.process_log(2, "local-0", "rollout-0").write_text("engine \x1b[31mred\x1b[0m\nno newline at the end")
    run.process_log(2, "local-0", "train-0").write_text("trainer\n")
    (run.tasks(2) / "rollout-12-3_0_log.out").write_text("task of step 12\n")
    (run.tasks(2) / "publish-12-5_0_log.out").write_text("published\n")
    (run.tasks(2) / "rollout-1-2_0_log.out").write_text("task of step 1\n")

    everything = pivot("logs", "r").out
    assert "from the controller" in everything and "trainer" in everything and "old" not in everything
    assert "engine \\x1b[31mred\\x1b[0m\nno newline at the end\n" in everything and "\x1b" not in everything
    assert pivot("logs", "r", "--role", "train").out == "==> attempt_2/local-0-train-0.log <==\ntrainer\n"
    step = pivot("logs", "r", "--step", "12").out
    assert "task of step 12" in step and "published" in step and "task of step 1\n" not in step
    assert "published" not in pivot("logs", "r", "--step", "12", "--role", "rollout").out
    done = pivot("logs", "r", "--step", "99")
    assert done.code == 2 and "no such logs" in done.err


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    run = make_run(tmp_path, "r")
    run.process_log(1, "local-0", "rollout-0").write_text("line\n" * 200_000)
    done = subprocess.run(
        ["bash", "-c", f"{' '.join(COMMAND)} logs r | head -1; echo ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == "" and done.stdout == "==> attempt_1/local-0-rollout-0.log <==\n1\n"


def test_a_run_whose_name_looks_like_an_option_is_found(pivot: Pivot, tmp_path: Path) -> None:
    for name in ("-x", "-y"):
        make_run(tmp_path, name, status="failed", error={"reason": "boom"})
    (tmp_path / "runs" / "-y").rename(tmp_path / "-y")
    for arguments in (["--", "-x"], ["./-x"], ["runs/-x"], ["--", "-y"], ["./-y"]):
        done = pivot("status", *arguments)
        assert done.code == 0 and "cause: boom" in done.out, (arguments, done)
    go_on = pivot("status", "--", "-x").out.rpartition("pivot-pipeline ")[2].split()  # as it is, for a shell
    assert go_on == ["resume", str(tmp_path / "runs" / "-x")]
    assert pivot("status", "-x").code == 2


def test_a_full_disk_at_submit_is_one_line(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4k") as disk:
        disk.fill()
        elsewhere = f"checkpoint.uri={tmp_path}/checkpoints"
        process = disk.begin(tmp_path, "submit", "configs/emulated.yaml", elsewhere, "--run-dir", str(disk.path / "r"))
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 1 and len(out.splitlines()) == 1, out
        assert out.startswith(f"Error: [Errno 28] No space left on device: '{disk.path}/r/"), out
        assert not (disk.outside / "r").exists()
