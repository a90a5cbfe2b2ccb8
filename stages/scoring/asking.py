"""What the sources have in common whose questions are answered on the loop of the user's code."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

from stages.own.host import own_loop
from stages.scoring.base import Answer, Give, Question


class Asking(ABC):
    """The part of a Source that takes questions and gives answers, from any thread; each question has a coroutine of
    its own. What that raises goes to `give` as it is."""

    def __init__(self, give: Give) -> None:
        self._tasks: dict[str, asyncio.Task[Answer]] = {}
        self._give = give

    @abstractmethod
    async def answer(self, question: Question) -> Answer:
        """May be cancelled: then the question is taken back."""

    def ask(self, questions: Sequence[Question]) -> None:
        own_loop().call_soon_threadsafe(self._begin, list(questions))

    def abort(self, ids: Sequence[str]) -> None:
        own_loop().call_soon_threadsafe(self._cancel, list(ids))

    def settle(self, now: float) -> float | None:
        """Never needed: each coroutine keeps its own limits."""
        return None

    def _begin(self, questions: list[Question]) -> None:
        for question in questions:
            task = self._tasks[question.id] = asyncio.create_task(self.answer(question))
            task.add_done_callback(partial(self._end, question.id))

    def _cancel(self, ids: list[str]) -> None:
        for id in ids:
            if id in self._tasks:
                self._tasks[id].cancel()

    def _end(self, id: str, task: "asyncio.Task[Answer]") -> None:
        del self._tasks[id]
        if task.cancelled():
            self._give(Answer(id=id, outcome=None))
        else:
            self._give(task.exception() or task.result())
