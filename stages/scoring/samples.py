"""Some verdicts of a step, whole, for people to read: the first ones, and the first that failed."""

from typing import TypedDict

from pipeline.queue.schema import SequenceRow, VerdictRow

_MOST = 4
_MOST_CHARACTERS = 4000


class Sample(TypedDict):
    id: str
    prompt: str
    response: str
    critique: str
    score: float | None
    failure: str


class Samples:
    def __init__(self) -> None:
        self.kept: list[Sample] = []
        self._num = {False: 0, True: 0}

    def add(self, row: SequenceRow, response: str, verdict: VerdictRow) -> None:
        has_failed = bool(verdict.failure)
        if self._num[has_failed] >= _MOST:
            return
        self._num[has_failed] += 1
        texts = (text[:_MOST_CHARACTERS] for text in (row.text, response, verdict.critique))
        prompt, response, critique = texts
        self.kept.append(
            Sample(
                id=row.id,
                prompt=prompt,
                response=response,
                critique=critique,
                score=verdict.score,
                failure=verdict.failure,
            )
        )
