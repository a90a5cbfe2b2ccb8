"""`resume`: what goes on from where, and what a resume refuses."""

import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.cli.main import run as pivot_here
from pipeline.run_folder import RunFolder, read_json, write_json
from pipeline.sampler import Sampler
from tests.scenarios.conftest import SETTINGS
from tests.scenarios.runs import (
    check_same,
    checkpoints,
    hashes,
    killed_run,
    measured,
    pivot,
    sequences,
    submit,
    succeed,
)

EMULATED = ("submit", "configs/emulated.yaml", "--wait")


def test_r11_r12_r16_three_steps_and_three_more_are_six(reference: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    succeed(submit(run, *SETTINGS, "trainer.total_training_steps=3"))
    shutil.copytree(run / "checkpoints" / "step_3", run / "checkpoints" / "step_9")
    (run / "checkpoints" / "step_9" / "model" / "model.safetensors").unlink()

    out = succeed(pivot("resume", str(run), "trainer.total_training_steps=6"))
    assert "checkpoint step_9 is skipped" in out and "step 4/6" in out and "step 3/" not in out
    shutil.rmtree(run / "checkpoints" / "step_9")
    check_same(run, reference)
    assert "total_training_steps: 6" in (run / "config.yaml").read_text()


def test_r14_every_prompt_is_trained_once_with_the_tokens_it_had(tmp_path: Path) -> None:
    """Default mode: what was flushed before the kill is continued, not made again."""
    run = tmp_path / "run"
    slowly = ("rollout.flush_s=0.05", "rollout.engine.options.step_s=0.02", "trainer.total_training_steps=3")
    assert killed_run(run, "rollout.mid:24:run", *slowly) == 2
    rows = [row for step in sequences(run).values() for row in step]
    assert len({row.id for row in rows}) == len(rows) == 48
    assert {row.state for row in rows} == {"trained"}
    assert all(len(row.tokens) == len(row.logprobs) == len(row.versions) > 0 for row in rows)
    sampler = Sampler(num_rows=8, batch_size=4, shuffle=True, seed=1)
    lines = Path("configs/emulated/train.jsonl").read_text().splitlines()
    texts = [json.loads(line)["prompt"][0]["content"] for line in lines]
    for step, found in sequences(run).items():
        assert [texts[row] for row in sampler.rows(step)] == list(dict.fromkeys(row.text for row in found))
    assert sorted(measured(run)) == [1, 2, 3]
    with closing(sqlite3.connect(run / "queue" / "index.db")) as db:
        both = db.execute("SELECT seq_id FROM seg GROUP BY seq_id HAVING count(DISTINCT attempt) = 2").fetchall()
    assert both, "no sequence was continued after the kill: the test shows nothing"


def refused(*arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert pivot_here(["resume", *arguments]) == 2
    return capsys.readouterr().err


def test_r15_what_alters_data_shapes_or_loss_is_refused_with_all_keys(
    reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = hashes(reference)
    changed = {
        "data.train_batch_size": "2",
        "data.train_files": "configs/quickstart/train.jsonl",
        "data.shuffle": "false",
        "rollout.n": "8",
        "rollout.temperature": "0.5",
        "rollout.max_response_length": "32",
        "rollout.engine.max_num_seqs": "4",
        "reward.genrm.template": "'{{ response }}'",
        "reward.genrm.verdict.marker": "Judgement",
        "trainer.lr": "1e-4",
        "trainer.betas": "[0.9, 0.99]",
        "trainer.micro_batch_tokens": "100",
        "algorithm.kl.coef": "0.1",
        "run.seed": "2",
        "run.determinism": "default",
    }
    free = ("trainer.total_training_steps=9", "checkpoint.keep=5", "limits.restarts=1", "evaluate.freq=0")
    told = refused(str(reference), *(f"{k}={v}" for k, v in changed.items()), *free, capsys=capsys)
    assert [key for key in changed if f"  {key} from " not in told] == []
    assert not any(key.partition("=")[0] + " from" in told for key in free)
    assert "trainer.lr from 0.001 to 0.0001" in told
    assert "is no setting" in refused(str(reference), "trainer.lr", capsys=capsys)
    assert "must be float32" in refused(str(reference), "model.policy.dtype=bfloat16", capsys=capsys)
    assert "nothing is left" in refused(str(reference), capsys=capsys)
    assert "lacks step_6" in refused(
        str(reference), "checkpoint.uri=/nowhere", "trainer.total_training_steps=8", capsys=capsys
    )
    assert hashes(reference) == before


def test_r15_another_content_under_the_same_name_is_refused(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "train.jsonl"
    shutil.copy("configs/emulated/train.jsonl", data)
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace(str(Path("configs/emulated/train.jsonl").absolute()), str(data)))
    inputs = (run / "inputs.json").read_text()
    (run / "inputs.json").write_text(inputs.replace(str(Path("configs/emulated/train.jsonl").absolute()), str(data)))
    write_json(run / "status.json", read_json(run / "status.json") | {"status": "failed"})
    assert "at least 6" in refused(str(run), "trainer.total_training_steps=5", capsys=capsys)
    data.write_text(data.read_text().replace("Say two.", "Say 2."))
    assert f"data.train_files: {data} has another content" in refused(str(run), capsys=capsys)
    data.unlink()
    assert f"data.train_files: {data} is gone" in refused(str(run), capsys=capsys)


def test_step_n_makes_a_fork_and_changes_nothing(
    reference: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """N between two checkpoints, then of the fork at a checkpoint; out of reach; and the base model."""
    run = tmp_path / "run"
    shutil.copytree(reference, run)
    before = hashes(run)
    for step in ("1", "7"):
        told = refused(str(run), "--step", step, capsys=capsys)
        assert f"cannot go back to step {step}: valid are 0 (the base model) and 3 to 6" in told
    assert "nothing is left" in refused(str(run), "--step", "6", capsys=capsys)
    assert "trainer.lr" in refused(str(run), "--step", "4", "trainer.lr=1", capsys=capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]

    (tmp_path / "run-from4").mkdir()
    succeed(pivot("resume", str(run), "--step", "4", "checkpoint.save_freq=1"))
    fork = tmp_path / "run-from4-2"
    check_same(fork, run)
    assert sorted(checkpoints(fork)) == ["step_3", "step_4", "step_5", "step_6"]
    tasks = {path.name.partition("_")[0] for path in (fork / "tasks" / "attempt_1").iterdir()}
    assert {task.rsplit("-", 1)[0] for task in tasks if task.startswith(("rollout", "train"))} == {
        *("train-4", "train-5", "train-6", "rollout-5", "rollout-6")
    }
    assert read_json(fork / "origin.json") == {"run": str(run), "name": "run", "step": 4, "mlflow_run_id": None}

    succeed(pivot("resume", str(fork), "--step", "5", "trainer.total_training_steps=7"))
    again = tmp_path / "run-from4-2-from5"
    assert {k: v for k, v in measured(again).items() if k < 7} == measured(run)
    assert checkpoints(again)["step_6"] == checkpoints(run)["step_6"]
    assert len(RunFolder(again).attempts()) == 1 and sorted(measured(again)) == [1, 2, 3, 4, 5, 6, 7]

    succeed(pivot("resume", str(run), "--step", "0"))
    check_same(tmp_path / "run-from0", run)
    assert hashes(run) == before
