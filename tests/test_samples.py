"""Which responses are kept for people to read."""

import math
from itertools import pairwise
from typing import Any

from pipeline.queue.schema import sequence_id
from pipeline.samples import MOST_FAILURES, NUM_MEMBERS, Choice, clipped, is_chosen, is_kept

PROMPTS = 16


def sample(step: int, prompt_no: int, member: int, failure: str = "") -> dict[str, Any]:
    return {"id": sequence_id(step, prompt_no, member), "failure": failure}


def chosen(step: int) -> list[tuple[int, int]]:
    return [(p, m) for p in range(PROMPTS) for m in range(8) if is_chosen(step, p, m, PROMPTS)]


def test_of_a_step_the_first_responses_to_one_prompt_are_kept() -> None:
    for step in range(1, 64):
        found = chosen(step)
        assert len({prompt for prompt, _ in found}) == 1 and [m for _, m in found] == list(range(NUM_MEMBERS))
    assert len({chosen(step)[0][0] for step in range(1, 64)}) > PROMPTS / 2, "not always the same"


def test_of_a_long_run_few_steps_are_kept() -> None:
    for num_steps in (50, 200, 1000, 20_000):
        kept = [step for step in range(1, num_steps + 1) if is_kept(step)]
        assert len(kept) <= 64 + 32 * max(0.0, math.log2(num_steps / 63)) + 1
        assert max(b - a for a, b in pairwise(kept)) <= max(1, num_steps / 31)


def test_each_is_written_once_and_not_too_many_failures() -> None:
    choice, (prompt, _) = Choice(), chosen(1)[0]
    group = [sample(1, prompt, member) for member in range(NUM_MEMBERS)]
    assert choice.take(1, group[:2], PROMPTS) == group[:2]
    assert choice.take(1, group, PROMPTS) == group[2:], "a task that is begun again keeps the same"
    failed = [sample(1, (prompt + 1) % PROMPTS, member, "empty") for member in range(9)]
    assert choice.take(1, failed, PROMPTS) == failed[:MOST_FAILURES]
    assert choice.take(1, [sample(1, (prompt + 1) % PROMPTS, 0)], PROMPTS) == []


def test_a_rare_failure_is_kept_of_any_step_and_a_common_one_of_those_that_are() -> None:
    choice, step = Choice(), 1001
    assert not is_kept(step)
    taken = [choice.take(step + 2 * i, [sample(step + 2 * i, 0, 0, "empty")], PROMPTS) for i in range(20)]
    assert sum(map(len, taken)) == 8
    assert choice.take(1051, [sample(1051, 0, 0, "refused")], PROMPTS)
    (prompt, _), member = chosen(1053)[0], 0
    assert not choice.take(1053, [sample(1053, prompt, member)], PROMPTS), "of this step nothing but rare failures"
    for late in range(2000, 2100):
        choice.take(late, [sample(late, 0, 1, "empty")], PROMPTS)
    assert len(choice._ids) <= 4 and len(choice._failures) <= 4


def test_long_texts_keep_how_they_begin_and_how_they_end() -> None:
    text = "a" * 5000 + "b" * 5000
    found = clipped(text)
    assert len(found) < 1700 and found.startswith("a" * 1000) and found.endswith("b" * 600)
    assert f"[... {10_000 - 1600} characters ...]" in found
    assert clipped("a" * 1600) == "a" * 1600
