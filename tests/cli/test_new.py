"""`new`: what it writes is valid, says what each key is, and lacks nothing that was not said."""

import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

from pipeline.compose import parse
from pipeline.config import Config, load_files
from pipeline.core.errors import ConfigError
from pipeline.new_config import Answers, Found, answers_of, draft, explained
from tests.cli.conftest import CHECKOUT, COMMAND, Pivot, environment

QUICKSTART = CHECKOUT / "configs/quickstart"
MODELS = ("--policy", "quickstart/policy", "--genrm", "quickstart/genrm", "--data", "quickstart/train.jsonl")
JUDGE = ("--template", str(QUICKSTART / "judge.jinja"), "--choices", "right,wrong")


def test_what_it_writes_for_the_quickstarts_models_is_valid(pivot: Pivot, tmp_path: Path) -> None:
    made = pivot("new", "mine", *MODELS, *JUDGE, "--val", "quickstart/val.jsonl", "--steps", "7")
    assert (made.code, made.err) == (0, ""), made
    assert "written: mine/run.yaml\n" in made.out and "start it: pivot-pipeline submit mine/run.yaml" in made.out
    assert pivot("validate", "mine/run.yaml").out.startswith("valid: 7 steps of 16 prompts x 8 responses")
    config = load_files(["mine/run.yaml"])
    assert config.data.max_prompt_length + config.rollout.max_response_length <= 256, "the context of the policy"
    again = pivot("new", "mine", *MODELS)
    assert again.code == 2 and "mine/run.yaml is there already" in again.err


def test_each_key_is_explained_and_each_guide_is_there(pivot: Pivot, tmp_path: Path) -> None:
    assert (
        pivot("new", "mine", "--policy", "emulated", "--genrm", "emulated", "--data", "emulated/train.jsonl").code == 0
    )
    text = (tmp_path / "mine/run.yaml").read_text()
    lines = text.splitlines()
    guides = set(re.findall(r"docs/guides/[\w-]+\.md", text))
    assert len(guides) > 8 and all((CHECKOUT / guide).is_file() for guide in guides)
    leaves = [(at, line) for at, line in enumerate(lines) if re.match(r" +\w+: \S", line) and not line.endswith(":")]
    for at, line in leaves:
        assert "  # " in line or lines[at - 1].strip().startswith("# "), line
    assert len(leaves) > 20 and max(map(len, lines)) <= 120
    template = (tmp_path / "mine/judge.jinja").read_text()
    assert "{{ response }}" in template and '"Verdict: yes" or "Verdict: no"' in template
    assert pivot("submit", "mine/run.yaml", "--dry-run").code == 0


@pytest.mark.parametrize("slots", [1, 2, 3, 8])
@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("cluster", ["local", "slurm"])
@pytest.mark.parametrize(
    "judge",
    [
        {"genrm": "quickstart/genrm"},
        {"judge_url": "http://h/v1", "judge_model": "m"},
        {"functions": ("examples/verl_reward.py:compute_score", "examples/verl_reward.py:brevity")},
        {"genrm": "quickstart/genrm", "functions": ("examples/verl_reward.py:compute_score",), "val": ("v.jsonl",)},
    ],
)
@pytest.mark.parametrize("has_gpus", [False, True])
def test_a_draft_is_a_configuration(
    slots: int, nodes: int, cluster: str, judge: dict[str, object], has_gpus: bool
) -> None:
    answers = Answers(policy="quickstart/policy", data=("t.jsonl",), slots=slots, nodes=nodes, cluster=cluster, **judge)  # type: ignore[arg-type]
    tree = draft(answers, Found(has_gpus=has_gpus, policy_positions=256, num_rows=5))
    assert parse(explained(tree, "x.yaml"), "x.yaml") == tree
    config = Config.model_validate(tree)
    assert config.data.train_batch_size == 5 and config.evaluate.freq == (10 if answers.val else 0)
    assert config.model.policy.dtype == ("bfloat16" if has_gpus else "float32")


def test_a_function_that_only_scores_is_no_checker(pivot: Pivot, tmp_path: Path) -> None:
    """A checker is called with arguments by position, a reward function with arguments by name."""
    (tmp_path / "mine.py").write_text("def shorter(solution_str, **row):\n    return 1 / (1 + len(solution_str))\n")
    models = ("--policy", "quickstart/policy", "--data", "quickstart/train.jsonl", "--function", "mine.py:shorter")
    assert pivot("new", "mine", *models, "--gpus", "2").code == 0
    checked = pivot("new", "checked", *models, "--val", "quickstart/val.jsonl")
    assert checked.code == 2 and "evaluate.function" in checked.err and "valid: def compute_score(" in checked.err


def test_what_is_missing_is_said_and_nothing_is_written(pivot: Pivot, tmp_path: Path) -> None:
    done = pivot("new", "mine", "--policy", "emulated")
    assert done.code == 2 and done.out == "" and list(tmp_path.iterdir()) == []
    assert "say also --data FILE, --genrm FOLDER (or --judge-url URL, or --function FILE:NAME)" in done.err
    with pytest.raises(ConfigError, match="two words"):
        answers_of(choices="yes", partition="", account="", time="", policy="p", data=())


def test_what_does_not_fit_is_said_of_what_was_written(pivot: Pivot, tmp_path: Path) -> None:
    done = pivot("new", "mine", "--policy", "my/model", "--function", "my.py:f", "--data", "gone.jsonl")
    assert done.code == 2 and (tmp_path / "mine/run.yaml").is_file()
    for words in (
        "it is not valid yet:",
        "model.policy.path: no such folder",
        "gone.jsonl: no such file",
        "my.py cannot",
    ):
        assert words in done.err, done.err
    assert "once that is mended: pivot-pipeline validate mine/run.yaml" in done.err


def test_on_a_terminal_it_asks(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "new", "mine"], cwd=tmp_path, env=environment(), stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.write(ours, b"emulated\nemulated/train.jsonl\nemulated\nlocal\n")
    said = b""
    while True:
        try:
            said += os.read(ours, 4096)
        except OSError:  # it has ended
            break
    os.close(ours)
    assert process.wait(60) == 0, said
    for question in (b"Folder of the policy's model: ", b"File of prompts", b"The judge: ", b"Where (local, slurm)"):
        assert question in said, said
    assert load_files([tmp_path / "mine/run.yaml"]).is_emulated
