"""Real runs of emulated engines, from the command line to the exit code."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from pipeline.checkpoint import CheckpointStore
from pipeline.run_folder import read_json
from pipeline.status import start_ticks
from tests.begun import begin_command
from tests.cli.conftest import COMMAND, Pivot, environment

SLOW = ("trainer.total_training_steps=500", "trainer.options.step_seconds=0.1")


def until(condition: Callable[[], object], process: "subprocess.Popen[str] | None" = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def begin(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return begin_command([*COMMAND, *arguments], environment(), folder)


def step_of(run: Path) -> int:
    return int((read_json(run / "status.json") or {}).get("step", 0))


def metric_steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_r07_a_run_in_a_folder_with_spaces_from_submit_to_summary(pivot: Pivot, tmp_path: Path) -> None:
    run = tmp_path / "my runs" / "exp 1"
    process = begin(tmp_path, "submit", "configs/emulated.yaml", "--run-dir", str(run), "evaluate.freq=0")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert "step 3/3" in out and "exp 1: done, 3 of 3 steps" in out

    summary = read_json(run / "summary.json")
    assert (summary["status"], summary["steps"]) == ("done", 3)
    assert (summary["sequences_trained"], summary["sequences_dropped"]) == (48, 0)
    assert metric_steps(run) == [1, 2, 3]
    assert oct(run.stat().st_mode & 0o777) == "0o700"

    again = pivot("submit", "configs/emulated.yaml", "--run-dir", str(run))
    assert again.code == 2 and f"pivot-pipeline resume '{run}'" in again.err
    over = pivot("resume", str(run))
    assert over.code == 2 and "is done" in over.err
    assert json.loads(pivot("status", str(run), "--json").out)["status"] == "done"
    assert "==> " in pivot("logs", str(run), "--step", "2", "--role", "train").out


def test_ctrl_c_stops_a_run_and_resume_ends_it(pivot: Pivot, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "r"
    process = begin(tmp_path, "submit", "configs/emulated.yaml", "--name", "r", *SLOW)
    until(lambda: step_of(run) >= 2, process)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130, out
    assert "r: cancelled" in out and "pivot-pipeline resume r" in out

    resumed = begin(tmp_path, "resume", "r")
    before = metric_steps(run)
    until(lambda: step_of(run) > max(before) + 1, resumed)
    assert pivot("resume", "r").code == 2
    assert pivot("cancel", "r").code == 0
    out, _ = resumed.communicate(timeout=60)
    assert resumed.returncode == 130, out
    steps = metric_steps(run)
    assert steps == list(range(1, max(steps) + 1)) and len(steps) > len(before)


def test_a_detached_run_goes_on_alone(pivot: Pivot, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "alone"
    process = begin(tmp_path, "submit", "configs/emulated.yaml", "--name", "alone", "--detach", *SLOW)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "pivot-pipeline status alone" in out
    until(lambda: "running" in pivot("status").out)
    assert pivot("cancel", "alone").code == 0
    status = read_json(run / "status.json")
    assert status["status"] == "cancelled"
    assert start_ticks(status["pid"]) is None


def test_r06_a_failed_stage_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    process = begin(tmp_path, "submit", "configs/emulated.yaml", "--name", "bad", "trainer.options.raise_at=2")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1, out
    assert "bad: failed" in out and "cause" in out and "step 2" in out
    assert os.listdir(tmp_path / "runs") == ["bad"]


def test_the_checkpoints_of_another_run_are_nobody_elses(pivot: Pivot, tmp_path: Path) -> None:
    CheckpointStore(str(tmp_path / "kept")).save(4, [("state.json", b"{}")])
    refused = pivot(
        "submit", "configs/emulated.yaml", "--run-dir", str(tmp_path / "run"), f"checkpoint.uri={tmp_path / 'kept'}"
    )
    assert refused.code == 2 and "holds checkpoints of another run (1, up to step 4)" in refused.err
    assert not (tmp_path / "run").exists()
