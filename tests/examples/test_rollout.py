"""The example of rollouts: a calculator between the turns, killed and resumed in the middle of conversations."""

import re
from pathlib import Path
from typing import Any

import pytest

from pipeline.queue.schema import GIVEN
from stages.text import ByteTokenizer
from tests.examples.runs import EXAMPLES, STEPS, submit, train
from tests.scenarios.runs import killed_run, pivot, rows, sequences

BYTES = ByteTokenizer()
CONFIGS = ("configs/emulated.yaml", "configs/examples/rollout.yaml")


def check_conversations(run: Path) -> int:
    """Each is what the calculator makes of its turns: none is lost, doubled or out of place. Returns how often it was
    called."""
    num_calls = 0
    for step in sequences(run).values():
        for row in step:
            said, given = [""], 0
            for token, logprob in zip(row.tokens, row.logprobs, strict=True):
                if (logprob == GIVEN) != bool(given % 2):
                    said.append("")
                    given += 1
                said[-1] += BYTES.decode([token])
            turns, answers = said[0::2], said[1::2]
            assert 1 <= len(turns) <= 3 and len(answers) <= 2
            for turn, answer in zip(turns, answers, strict=False):
                digits = sum(int(c) for c in turn if c.isascii() and c.isdigit())
                assert turn.endswith(";") and turn.count(";") == 1 and answer == f"{digits};", (turn, answer)
            num_calls += len(answers)
    return num_calls


def test_the_example_of_rollouts_trains(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(run, "rollout")
    assert check_conversations(run) > 20
    for row in rows(run):
        assert row["rollout/num_turns"] > 16 and row["rollout/num_given_tokens"] > 20
        of_step = sequences(run)[int(row["step"])]
        assert row["train/num_tokens"] <= sum(r.num_sampled for r in of_step) < sum(len(r.tokens) for r in of_step)


@pytest.mark.parametrize(
    "kill",
    [
        pytest.param("rollout.given@rollout:30", marks=pytest.mark.slow),
        "rollout.mid@rollout:40:run",
        pytest.param("rollout.given@rollout:21:run", marks=pytest.mark.slow),
    ],
)
def test_r14_no_turn_is_lost_or_doubled_when_conversations_are_killed(tmp_path: Path, kill: str) -> None:
    run = tmp_path / "run"
    both = tmp_path / "both.yaml"
    text = (EXAMPLES / "rollout.yaml").read_text().replace("examples/", f"{EXAMPLES}/")
    both.write_text(text)
    engine = "rollout.engine.options.step_s=0.002"
    killed_run(run, kill, str(both), *STEPS, engine, "rollout.flush_s=0.02")
    assert check_conversations(run) > 20
    assert [row["queue/num_trained"] for row in rows(run)] == [16.0] * 3


def test_r22_conversations_survive_gpus_that_take_turns(tmp_path: Path) -> None:
    train(tmp_path / "run", "rollout", "placement.mode=colocated", "cluster.slots_per_node=1")
    assert check_conversations(tmp_path / "run") > 20


def test_strict_conversations_repeat_bit_for_bit_over_a_kill(tmp_path: Path) -> None:
    train(tmp_path / "one", "rollout", "run.determinism=strict")
    both = tmp_path / "both.yaml"
    both.write_text((EXAMPLES / "rollout.yaml").read_text().replace("examples/", f"{EXAMPLES}/"))
    killed_run(tmp_path / "two", "rollout.given@rollout:25:run", str(both), *STEPS, "run.determinism=strict")
    assert sequences(tmp_path / "one") == sequences(tmp_path / "two")


def own_function(tmp_path: Path, code: str) -> str:
    file = tmp_path / "mine.py"
    file.write_text(code)
    return f"rollout.function={file}:talk"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("raise KeyError('a tool that is not there')", "KeyError: 'a tool that is not there'"),
        ("await client.generate([1, 2, 3])", "ids must begin with client.ids, and differ from them at token 1"),
    ],
)
def test_r06_what_the_function_raises_ends_the_run(tmp_path: Path, body: str, said: str) -> None:
    ended = submit(tmp_path / "run", "data", own_function(tmp_path, f"async def talk(client, **row):\n    {body}\n"))
    assert ended.code == 1 and "rollout.function failed on 000001-" in ended.out and said in ended.out


def test_a_function_that_does_not_repeat_itself_is_named(tmp_path: Path) -> None:
    code = (
        "import random\nasync def talk(client, **row):\n"
        "    call = client.tokenizer.encode(';')\n"
        "    await client.generate(client.prompt_ids, stop_ids=call)\n"
        "    await client.generate([*client.ids, *client.tokenizer.encode(str(random.random()))])\n"
    )
    told: Any = (own_function(tmp_path, code), *STEPS, "rollout.engine.options.step_s=0.01", "rollout.flush_s=0.02")
    run, marker = tmp_path / "run", tmp_path / "killed"
    ended = pivot(
        "submit", CONFIGS[0], "--run-dir", str(run), "--wait", *told, kill="rollout.mid@rollout:20", marker=marker
    )  # most of the 16 are in their second turn then, and what began it is in the queue
    assert marker.exists() and ended.code == 1, ended.out
    assert re.search(
        r"was broken off and began again, and from token \d+ on the function does something else", ended.out
    )


def test_r40_a_function_that_is_not_there_is_refused() -> None:
    ended = pivot("validate", CONFIGS[0], "rollout.function=examples/calculator.py:calc")
    assert ended.code == 2 and "has no 'calc'; it defines calculator, add_digits" in ended.out
