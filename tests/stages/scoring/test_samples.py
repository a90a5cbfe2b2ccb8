"""What a reward task keeps of its sequences for people to read."""

from dataclasses import replace

from pipeline.queue.schema import SequenceRow, VerdictRow, sequence_id
from pipeline.samples import MOST_FAILURES, NUM_MEMBERS, chosen_prompt
from stages.scoring.samples import Samples

STEP, PROMPTS = 3, 16


def row(prompt_no: int, member: int) -> SequenceRow:
    return SequenceRow(
        id=sequence_id(STEP, prompt_no, member),
        step=STEP,
        prompt_no=prompt_no,
        member=member,
        text="why?",
        data_source="d",
        ground_truth="42",
        prompt_ids=[1],
        state="generated",
        reason="",
        tokens=[5, 6, 7],
        versions=[2, 2, 3],
        finish="stop",
    )


VERDICT = VerdictRow(id="", turn=1, score=0.5, failure="", critique="well", tokens=[9], version=0, replica="r")


def test_of_all_that_is_judged_one_group_and_the_first_failures_are_kept() -> None:
    samples = Samples(PROMPTS)
    for prompt_no in range(PROMPTS):
        for member in range(NUM_MEMBERS + 2):
            samples.add(row(prompt_no, member), "because", VERDICT)
    chosen = chosen_prompt(STEP, PROMPTS)
    assert [sample["id"] for sample in samples.kept] == [sequence_id(STEP, chosen, m) for m in range(NUM_MEMBERS)]
    failed = replace(VERDICT, score=None, failure="empty")
    for member in range(9):
        samples.add(row((chosen + 1) % PROMPTS, member), "because", failed)
    assert len(samples.kept) == NUM_MEMBERS + MOST_FAILURES


def test_a_sample_says_what_was_answered_and_what_was_thought_of_it() -> None:
    samples = Samples(PROMPTS)
    prompt_no = chosen_prompt(STEP, PROMPTS)
    samples.add(row(prompt_no, 0), "x" * 9000, VERDICT)
    (sample,) = samples.kept
    assert len(sample["response"]) < 2000 and sample["response"].startswith("xxx")
    assert {**sample, "response": ""} == {
        "id": sequence_id(STEP, prompt_no, 0),
        "prompt": "why?",
        "ground_truth": "42",
        "response": "",
        "num_tokens": 3,
        "finish": "stop",
        "versions": [2, 3],
        "critique": "well",
        "num_critique_tokens": 1,
        "score": 0.5,
        "failure": "",
    }
