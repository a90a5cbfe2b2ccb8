"""The examples of rewards and of judges: a file of verl's beside a judge; a judge behind a URL that dies meanwhile."""

import json
import socket
import time
from pathlib import Path

import pytest

from tests.examples.runs import STEPS, submit, train
from tests.fakes.openai_server import Server
from tests.scenarios.runs import begin, measured, pivot, rows, sequences

EMULATED = ("data.train_files=quickstart/train.jsonl", "data.shuffle=false")


def test_the_example_of_rewards_trains(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, "rewards", *EMULATED)
    for row in rows(run)[-3:]:
        assert row["reward/correct/mean"] == row["reward/correct/has_digits"] == 0.0  # an emulated policy sorts nothing
        assert 0 < row["reward/brevity/mean"] < 1 and row["genrm/num_failed"] == 0
    scores = {row.score for step in sequences(run).values() for row in step}
    assert len(scores) > 4 and all(score is not None and 0 <= score <= 1.1 for score in scores)
    judged = [json.loads(line) for line in (run / "judge_samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in judged} == {1, 2, 3} and all(row["response"] and row["critique"] for row in judged)


@pytest.mark.parametrize("mode", ["disaggregated", "colocated", "trainer_pool"])
def test_functions_alone_need_neither_a_judge_nor_slots(tmp_path: Path, mode: str) -> None:
    """Two slots are enough for rollout and training, and one where they take turns."""
    own = ("reward.genrm=null", "model.genrm=null", f"placement.mode={mode}")
    slots = 1 if mode == "colocated" else 2
    train(tmp_path / "run", "rewards", *EMULATED, *own, f"cluster.slots_per_node={slots}")
    (reward,) = [row for row in rows(tmp_path / "run") if row["step"] == 3]
    assert reward["genrm/num_verdicts"] == 16


def test_strict_runs_with_functions_repeat(tmp_path: Path) -> None:
    for name in ("one", "two"):
        train(tmp_path / name, "rewards", *EMULATED, "run.determinism=strict")
    assert sequences(tmp_path / "one") == sequences(tmp_path / "two")


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("placement.mode=shiftable", "valid are disaggregated, colocated and trainer_pool"),
        ("reward.functions.correct.pat=x", "reward.functions.correct.pat (override): no such key"),
        (
            "reward.functions.correct.path=examples/verl_reward.py:compute",
            "has no 'compute' (did you mean compute_score?)",
        ),
        ("reward.functions.correct.path=nothing_here:f", "no module 'nothing_here'"),
        ("reward.weights.brevty=1", "weights.brevty: no such reward; valid: correct, brevity"),
    ],
)
def test_r40_what_cannot_be_is_refused_at_submit(tmp_path: Path, setting: str, said: str) -> None:
    own = ("reward.genrm=null", "model.genrm=null")
    ended = submit(tmp_path / "run", "rewards", *EMULATED, *own, setting)
    assert ended.code == 2 and said in ended.out


def test_r15_another_weight_or_function_does_not_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, "rewards", *EMULATED)
    more = "trainer.total_training_steps=4"
    ended = pivot("resume", str(run), "reward.weights.correct=1", "reward.functions.brevity.options.longest=1", more)
    assert ended.code == 2 and "reward.weights.correct from 0.5 to 1.0" in ended.out
    assert "reward.functions.brevity.options.longest from 84 to 1" in ended.out


def test_the_example_of_judges_trains_while_its_server_is_killed_and_comes_again(tmp_path: Path) -> None:
    server, run = Server(), tmp_path / "run"
    told = [f"reward.genrm.endpoint.url={server.url}", "trainer.options.step_seconds=0.3"]
    config = ["configs/emulated.yaml", "configs/examples/judge.yaml"]
    process = begin("submit", *config, "--run-dir", str(run), "--wait", *STEPS, *told)
    deadline = time.monotonic() + 60
    while not (run / "metrics.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    server.kill()
    time.sleep(1.0)
    server.start()
    out, _ = process.communicate(timeout=100)
    server.kill()
    assert process.returncode == 0, out
    found = measured(run)
    assert sorted(step for step in found if step) == [1, 2, 3]
    assert all(row["genrm/num_failed"] == 0 and row["queue/num_trained"] == 16 for s, row in found.items() if s)
    assert {round(row.score or 0, 3) for step in sequences(run).values() for row in step} <= {0.2, 0.8}


def test_a_judge_whose_server_goes_for_good_fails_with_a_type_and_that_is_said(tmp_path: Path) -> None:
    run, config = tmp_path / "run", ["configs/emulated.yaml", "configs/examples/judge.yaml"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"
        told = [f"reward.genrm.endpoint.url={url}", "reward.genrm.endpoint.patience_s=0.2"]
        process = begin("submit", *config, "--run-dir", str(run), "--wait", *STEPS, *told)
        deadline = time.monotonic() + 60
        while not (run / "config.yaml").exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    out, _ = process.communicate(timeout=100)
    assert process.returncode == 0, out
    assert {row["genrm/failed_unreachable"] for row in rows(run) if row["step"]} == {16.0}
    assert "unreachable: the judge's server does not answer" in out


def test_r40_a_reward_is_needed_and_a_judge_needs_a_model(tmp_path: Path) -> None:
    ended = pivot("validate", "configs/emulated.yaml", "reward.genrm=null")
    assert ended.code == 2 and "nothing gives a score: name genrm, or functions" in ended.out
    ended = pivot("validate", "configs/emulated.yaml", "model.genrm=null")
    assert ended.code == 2 and "model.genrm is missing" in ended.out


def test_a_key_that_is_not_there_is_said_at_submit(tmp_path: Path) -> None:
    ended = submit(tmp_path / "run", "judge", "reward.genrm.endpoint.key_variable=NO_SUCH_KEY_HERE")
    assert ended.code == 2 and "there is no variable NO_SUCH_KEY_HERE" in ended.out
