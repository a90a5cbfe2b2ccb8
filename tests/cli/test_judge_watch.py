"""A judge that fails on most of the first step: when it is noticed, what is told of it."""

import json
import subprocess
from pathlib import Path

import pytest

from pipeline.config_reward import GenRM
from pipeline.core.events import VerdictInfo
from pipeline.report.judge import describe
from pipeline.watching.judge import Failing, JudgeWatch, told, why
from tests.cli.conftest import COMMAND, Pivot, environment


def verdicts(*failures: str, step: int = 1, first: int = 0) -> list[VerdictInfo]:
    return [
        VerdictInfo(id=f"{step:06}-{i:05}-0000", score=None if failure else 1.0, failure=failure)
        for i, failure in enumerate(failures, first)
    ]


def test_more_than_half_of_the_first_verdicts_are_told_once() -> None:
    watch = JudgeWatch(64)
    assert watch.take(verdicts(*["unparsed"] * 4)) is None, "too few to say"
    assert watch.take(verdicts("", "", "", "", first=4)) is None, "half is not more than half"
    failing = watch.take(verdicts("truncated", first=8))
    assert failing == Failing(
        step=1,
        num_judged=9,
        types={"unparsed": 4, "truncated": 1},
        ids=("000001-00008-0000", "000001-00000-0000"),
    )
    assert watch.take(verdicts(*["unparsed"] * 20, first=9)) is None


@pytest.mark.parametrize(("num", "is_told"), [(3, False), (4, True)])
def test_a_small_step_is_told_when_all_of_it_is_judged(num: int, is_told: bool) -> None:
    assert (JudgeWatch(4).take(verdicts(*["empty"] * num)) is not None) is is_told


def test_only_the_first_step_counts_and_a_verdict_that_is_told_again_counts_once() -> None:
    watch = JudgeWatch(64)
    for _ in range(5):
        assert watch.take(verdicts("", "", "", "empty", "empty")) is None
    assert watch.take(verdicts(*["empty"] * 20, step=2)) is None
    assert watch.take(verdicts("empty", "empty", "empty", first=5)) is not None


GENRM = GenRM(template="{{ response }}", max_tokens=40)


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        ("unparsed", "one of yes, no must follow 'Verdict:'"),
        ("truncated", "reward.genrm.max_tokens 40"),
        ("out_of_range", "not within 0 to 1"),
        ("timeout", "reward.genrm.timeout_s 60"),
        ("correct:error", "the function correct: it raised an error"),
    ],
)
def test_why_an_answer_is_no_verdict(failure: str, says: str) -> None:
    assert says in why(failure, GENRM)


def test_an_answer_is_shown_by_its_end_in_one_line() -> None:
    failing = Failing(step=1, num_judged=8, types={"unparsed": 8}, ids=("a",))
    lines = list(describe(told(failing, {"a": ("unparsed", "x" * 500 + "\nThe answer\nis fine.")}, GENRM)))
    assert lines[0].startswith("warning: 8 of the first 8 verdicts of step 1 failed (unparsed 8)")
    assert (
        lines[2].startswith("    it said: xxx") and lines[2].endswith("x The answer is fine.") and len(lines[2]) < 300
    )
    assert lines[-1].endswith("or set `reward.genrm.verdict.structured`")


def test_a_run_whose_judge_says_no_verdicts_says_so_while_it_goes_on(pivot: Pivot, tmp_path: Path) -> None:
    """The judge of these emulated engines speaks at random."""
    silly = ("reward.genrm.engine.options.script=", "reward.genrm.retries=0", "trainer.total_training_steps=20")
    done = subprocess.run(
        [*COMMAND, "submit", "emulated.yaml", *silly, "--name", "a"],
        cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    (at,) = (i for i, line in enumerate(lines) if line.startswith("warning: "))
    assert (
        "verdicts of step 1 failed (unparsed" in lines[at] and "unparsed: one of yes, no must follow" in lines[at + 1]
    )
    assert lines[at + 2].startswith("    it said: ")
    assert any(line.startswith("step 20/20") for line in lines[at:]), "it was said while the run went on"
    judge = json.loads(pivot("status", "a", "--json").out)["judge"]
    assert [sample["failure"] for sample in judge["samples"]] == ["unparsed", "unparsed"]
    assert "warning: " in pivot("status", "a").out and "of step 1 failed" in pivot("watch", "a").out
    assert pivot("report", "a").code == 0 and "of step 1 failed (unparsed" in (tmp_path / "a.html").read_text()
