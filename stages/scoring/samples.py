"""What a task keeps of its sequences for people to read: those of one prompt, and the first that failed."""

from typing import TypedDict

from pipeline.queue.schema import SequenceRow, VerdictRow
from pipeline.samples import MOST_FAILURES, clipped, is_chosen


class Sample(TypedDict):
    """`versions`: the oldest and newest that made one of its tokens. Long texts are without their middle."""

    id: str
    prompt: str
    ground_truth: str
    response: str
    num_tokens: int
    finish: str
    versions: list[int]
    critique: str
    num_critique_tokens: int
    score: float | None
    failure: str


class Samples:
    """`num_prompts`: of a step. pipeline.samples.Choice takes some of them in the end."""

    def __init__(self, num_prompts: int) -> None:
        self.kept: list[Sample] = []
        self._num_prompts = num_prompts
        self._num_failures = 0

    def add(self, row: SequenceRow, response: str, verdict: VerdictRow) -> None:
        self._num_failures += bool(verdict.failure)
        is_early_failure = bool(verdict.failure) and self._num_failures <= MOST_FAILURES
        if not is_early_failure and not is_chosen(row.step, row.prompt_no, row.member, self._num_prompts):
            return
        self.kept.append(
            Sample(
                id=row.id,
                prompt=clipped(row.text),
                ground_truth=clipped(row.ground_truth),
                response=clipped(response),
                num_tokens=len(row.tokens),
                finish=row.finish,
                versions=[min(row.versions, default=0), max(row.versions, default=0)],
                critique=clipped(verdict.critique),
                num_critique_tokens=len(verdict.tokens),
                score=verdict.score,
                failure=verdict.failure,
            )
        )
