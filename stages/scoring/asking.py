"""Questions that are being answered on the loop of the user's code, each by a coroutine of its own."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from stages.own.host import own_loop
from stages.scoring.base import Answer, Give, Question


class Asking:
    """Called from any thread. `answer` is what is done for a question; what it raises goes to `give` as it is."""

    def __init__(self, answer: Callable[[Question], Coroutine[Any, Any, Answer]], give: Give) -> None:
        self._answer, self._give = answer, give
        self._tasks: dict[str, asyncio.Task[Answer]] = {}

    def begin(self, questions: Sequence[Question]) -> None:
        own_loop().call_soon_threadsafe(self._begin, list(questions))

    def cancel(self, ids: Sequence[str]) -> None:
        own_loop().call_soon_threadsafe(self._cancel, list(ids))

    def _begin(self, questions: list[Question]) -> None:
        for question in questions:
            task = self._tasks[question.id] = asyncio.create_task(self._answer(question))
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
