"""Evaluation: the same prompts and seeds at every step, counted by an exact checker."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import StageFailed
from stages.engines.base import Request
from stages.evaluate import evaluate
from stages.text import ByteTokenizer
from tests.fakes.scripted import FakeTask, FakeWorker, Script, ScriptedEngine, hosted, make_config

BYTES = ByteTokenizer()


def write(file: Path, num_rows: int = 4) -> str:
    rows = [
        {"prompt": f"{i}2", "reward_model": {"ground_truth": "".join(sorted(f"{i}2"))}, "extra_info": {"i": i}}
        for i in range(num_rows)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def answer(request: Request) -> Script:
    """Right for the problems 02 and 12, though the answer to 02 is cut off after a right beginning."""
    problem = BYTES.decode(request.prompt_ids).split("user: ")[1].split("\n")[0]
    if problem == "02":
        return Script(tokens=BYTES.encode("02"), finish="length")
    return Script(tokens=[*BYTES.encode("9;12" if problem == "12" else "x"), BYTES.eos_id])


def run(
    tmp_path: Path, script: Any = answer, step: int = 1, version: int = 0, **changes: Any
) -> tuple[dict[str, Any], list[Request]]:
    evaluation = {"function": "stages.checkers:digit_sort", "num_prompts": 3, "samples": 2, "freq": 1} | changes
    config = make_config(
        data={"val_files": [write(tmp_path / "val.jsonl")]},
        evaluate=evaluation,
        rollout={"temperature": 0.7},
        limits={"stage_s": 0.3},
        run={"seed": step},  # another seed of the run changes nothing
    )
    engine = ScriptedEngine(script, version=version or step)
    with hosted(engine) as host:
        task = FakeTask(FakeWorker(config=config, engine=host), step=step, version=step)
        return evaluate(task, task.spec), engine.requests


def test_accuracy_is_the_share_of_right_answers(tmp_path: Path) -> None:
    result, requests = run(tmp_path)
    assert result == {"metrics": {"val/acc": pytest.approx(2 / 6)}, "num": 6}
    assert [BYTES.decode(r.prompt_ids) for r in requests[::2]] == [f"user: {i}2\nassistant: " for i in range(3)]
    assert {(r.temperature, r.max_tokens, r.stop_ids, r.logprobs) for r in requests} == {(0.7, 16, (2,), False)}


def test_prompts_and_seeds_do_not_depend_on_the_step(tmp_path: Path) -> None:
    (_, first), (_, later), (_, other) = run(tmp_path), run(tmp_path, step=7), run(tmp_path, seed=2)
    assert [r.seed for r in first] == [r.seed for r in later]
    assert [r.prompt_ids for r in first] == [r.prompt_ids for r in later]
    assert len({r.seed for r in first}) == 6
    assert not {r.seed for r in first} & {r.seed for r in other}


def test_answers_of_another_version_do_not_count(tmp_path: Path) -> None:
    with pytest.raises(StageFailed, match="task-5 is for version 5, the engine has 6"):
        run(tmp_path, step=5, version=6)


def test_fewer_rows_than_asked_for(tmp_path: Path) -> None:
    result, _ = run(tmp_path, num_prompts=256, samples=1)
    assert result["num"] == 4


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script(tokens=[5], is_refused=True), r"val\.jsonl, line 1 ended with 'error'"),
        (Script(tokens=[5], hold_after=0), r"silent for 0\.3 s, 6 evaluations open"),
    ],
)
def test_evaluation_that_cannot_be_done_fails(tmp_path: Path, script: Script, message: str) -> None:
    with pytest.raises(StageFailed, match=message):
        run(tmp_path, lambda request: script)


def test_users_checker_gets_extra_info_and_its_failure_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "checker_of_user.py").write_text(
        "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(extra_info['i'] == 1)\n"
        "def broken(*args):\n    raise KeyError('oh')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    result, _ = run(tmp_path, function="checker_of_user:score", samples=1)
    assert result["metrics"]["val/acc"] == pytest.approx(1 / 3)
    for function, message in [
        ("checker_of_user:broken", r"checker_of_user:broken failed on .*KeyError\('oh'\)"),
        ("checker_of_user:absent", "'checker_of_user:absent' cannot be imported"),
        ("no_such_module:score", "'no_such_module:score' cannot be imported"),
    ]:
        with pytest.raises(StageFailed, match=message):
            run(tmp_path, function=function)
    del sys.modules["checker_of_user"]
