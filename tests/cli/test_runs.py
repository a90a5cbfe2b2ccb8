"""`list`, `export-config` and `completion`."""

import json
import os
import shlex
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from pipeline.config import load_files, save_resolved
from pipeline.run_folder import RunFolder, write_json
from pipeline.status import start_ticks
from pipeline.tracking import MetricsLog
from tests.cli.conftest import COMMAND, Pivot, environment


def make_run(folder: Path, age_s: float, rows: list[dict[str, object]], **status: object) -> RunFolder:
    run = RunFolder(folder)
    run.create()
    save_resolved(load_files(["emulated.yaml"]), run.config)
    os.utime(run.config, (time.time() - age_s,) * 2)
    values = {"run": run.name, "status": "running", "attempt": 1, "step": 2, "total_steps": 9, "updated": 0.0}
    write_json(run.status, {**values, "pid": 1 << 22, "pid_start": 5, **status})
    run.metrics.write_text("".join(json.dumps({"step": i, "time": 0.0, **row}) + "\n" for i, row in enumerate(rows)))
    return run


def test_runs_are_listed_oldest_first_wherever_they_lie_below_the_folder(pivot: Pivot, tmp_path: Path) -> None:
    assert pivot("list").out.startswith("no runs in ")
    lives = {"pid": os.getpid(), "pid_start": start_ticks(os.getpid())}
    rows = [{"val/acc": 0.25}, {"critic/score/mean": 0.5}, {"critic/score/mean": 0.75}]
    make_run(tmp_path / "runs" / "young", 30, rows, **lives)
    make_run(tmp_path / "runs" / "x-compare" / "colocated-seed0", 90, [])
    old = make_run(tmp_path / "runs" / "old", 7300, [], status="done")
    write_json(old.summary, {"eval_last": 0.5})
    lines = pivot("list").out.splitlines()
    assert lines[0].split() == ["RUN", "STATUS", "STEP", "AGE", "REWARD", "ACCURACY", "FOLDER"]
    assert [line.split()[:5] for line in lines[1:]] == [
        ["old", "done", "2", "of", "9"],
        ["colocated-seed0", "died", "2", "of", "9"],
        ["young", "running", "2", "of", "9"],
    ]
    assert lines[1].split()[5:] == ["2", "h", "01", "min", "-", "0.500", str(old.path)]
    assert lines[3].split()[7:9] == ["0.750", "0.250"] and lines[2].endswith("x-compare/colocated-seed0")
    found = json.loads(pivot("list", "runs", "--json").out)
    assert [(one["run"], one["live"], one["reward"]) for one in found] == [
        ("old", False, None),
        ("colocated-seed0", False, None),
        ("young", True, 0.75),
    ]
    assert len(json.loads(pivot("list", "runs/x-compare", "--json").out)) == 1
    done = pivot("list", "gone")
    assert done.code == 2 and "no such folder: " in done.err


def test_of_a_long_run_only_the_end_is_read(pivot: Pivot, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [{"critic/score/mean": i / 1000, "filler": "x" * 400} for i in range(1000)]
    make_run(tmp_path / "runs" / "long", 1, rows)
    assert json.loads(pivot("list", "--json").out)[0]["reward"] == 0.999


# --- export-config --------------------------------------------------------------------------------------------------


def test_the_same_run_again(pivot: Pivot, tmp_path: Path) -> None:
    """In a strict run of the emulated engines: each figure that does not depend on time is the same."""
    settings = {"cwd": tmp_path, "env": environment(), "capture_output": True, "text": True, "timeout": 120}
    strict = ("run.determinism=strict", "run.seed=7", "trainer.total_training_steps=2", "data.train_batch_size=2")
    for arguments in (["emulated.yaml", *strict, "--name", "one"], ["again.yaml", "--name", "two"]):
        done = subprocess.run([*COMMAND, "submit", *arguments], **settings)  # type: ignore[call-overload]
        assert done.returncode == 0, done.stderr
        if arguments[-1] == "one":
            assert pivot("export-config", "one", "-o", "again.yaml").code == 0
    one, two = (
        [row for _, row in MetricsLog(tmp_path / f"runs/{name}/metrics.jsonl").rows()] for name in ("one", "two")
    )
    assert len(one) == len(two) == 2
    same = ("critic/score/mean", "response_length/mean", "queue/num_trained")
    for before, after in zip(one, two, strict=True):
        assert {key: before[key] for key in same} == {key: after[key] for key in same}
        assert before["critic/score/mean"] is not None
    done = pivot("export-config", "one", "-o", "again.yaml")
    assert done.code == 2 and "again.yaml is there already" in done.err


def test_what_is_exported_has_no_secrets_and_names_what_it_left_out(pivot: Pivot, tmp_path: Path) -> None:
    config = load_files(
        ["emulated.yaml"],
        [
            "run.name=mine",
            "cluster.env={API_TOKEN: hunter1, PLAIN: seen}",
            "cluster.slurm.setup=['module load x', 'export WANDB_API_KEY=hunter2']",
            "rollout.engine.options.max_tokens=5",
            "tracking.uri='https://me:hunter3@host/mlflow'",
            "checkpoint.uri='s3://me:hunter4@bucket/x'",
            "reward.functions={f: {path: 'stages.checkers:digit_sort', options: {secret: hunter5, longest: 3}}}",
        ],
    )
    run = RunFolder(tmp_path / "runs" / "mine")
    run.create()
    save_resolved(config, run.config)
    text = pivot("export-config", "mine").out
    assert "hunter" not in text
    for key in (
        "cluster.env.API_TOKEN",
        "cluster.slurm.setup.1: it sets WANDB_API_KEY",
        "tracking.uri",
        "checkpoint.uri: s3://bucket/x",
        "reward.functions.f.options.secret",
        "run.name: mine",
    ):
        assert f"# left out: {key}" in text, text
    tree = yaml.safe_load(text)
    assert tree["cluster"]["env"] == {"PLAIN": "seen"} and tree["tracking"]["uri"] == "https://host/mlflow"
    assert tree["reward"]["functions"]["f"]["options"] == {"longest": 3}
    (tmp_path / "again.yaml").write_text(text)
    assert load_files([tmp_path / "again.yaml"]).data == config.data


# --- completion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(pivot: Pivot, shell: str) -> None:
    done = pivot("completion", shell)
    assert done.code == 0 and f"_PIVOT_PIPELINE_COMPLETE={shell}_complete" in done.out
    assert pivot("completion", "tcsh").code == 2


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        (["re"], ["report", "resume"]),
        (["submit", "--in"], ["--in-allocation"]),
        (["status", "se"], ["second"]),
        (["validate", "quick"], ["quickstart.yaml"]),
        (["validate", "quickstart.yaml", "trainer.lr"], ["trainer.lr="]),
    ],
)
def test_bash_proposes(pivot: Pivot, tmp_path: Path, words: list[str], proposed: list[str]) -> None:
    make_run(tmp_path / "runs" / "first", 1, [])
    make_run(tmp_path / "runs" / "second", 1, [])
    program = tmp_path / "pivot-pipeline"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    program.chmod(0o755)
    text = pivot("completion", "bash").out
    line = ["pivot-pipeline", *words]
    asks = f"COMP_WORDS=({shlex.join(line)}); COMP_CWORD={len(words)}; _pivot_pipeline_completion {program}"
    done = subprocess.run(
        ["bash", "-c", f"{text}\n{asks}\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.split() == proposed, done
