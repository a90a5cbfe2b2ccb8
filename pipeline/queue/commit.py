"""Group commit: many calls, one fdatasync and one COMMIT."""

import os
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from pipeline.disk import EXIT_FULL, is_full_error
from pipeline.kill_points import kill_point
from pipeline.processes import say
from pipeline.queue.index import Index
from pipeline.queue.segments import SegmentFiles

T = TypeVar("T")
MAX_GROUP = 64  # calls that share one COMMIT: bounds how long the first of them waits for the others


@dataclass(frozen=True, slots=True)
class _Call:
    work: Callable[[], Any]
    synced: bool
    answer: Future[Any]


class GroupCommit:
    """Runs calls on one thread, in the order of their arrival, and answers them only when they are committed.

    Invariant, for each group: batches written ▶ fdatasync of the segment file ▶ COMMIT of the index ▶ answers.
    A call that raises leaves nothing in the index and does not harm its group.
    """

    def __init__(self, index: Index, files: SegmentFiles) -> None:
        self._index = index
        self._files = files
        self._inbox: SimpleQueue[_Call] = SimpleQueue()
        self.num_commits = 0
        threading.Thread(target=self._run, name="queue-commit", daemon=True).start()

    @property
    def num_waiting(self) -> int:
        """Calls that are not in a group yet."""
        return self._inbox.qsize()

    def call(self, work: Callable[[], T], synced: bool = True) -> T:
        """The result of `work`, after the COMMIT that covers it; raises what `work` raised. Any thread.

        Not `synced`: the COMMIT survives this process, but need not survive the machine.
        """
        answer: Future[T] = Future()
        self._inbox.put(_Call(work, synced, answer))
        return answer.result()

    def _run(self) -> None:
        """Consumes calls, produces answers; waits for the first call of a group; unblocked by `call`."""
        while True:
            group = self._next_group()
            try:
                results = self._perform(group)
            except BaseException as error:
                # What is durable is unknown after a failed sync or COMMIT, so this server may answer nothing more.
                say(traceback.format_exc())
                os._exit(EXIT_FULL if is_full_error(error) else 1)
            kill_point("queue.before_reply")
            for call, result in zip(group, results, strict=True):
                if isinstance(result, Exception):
                    call.answer.set_exception(result)
                else:
                    call.answer.set_result(result)

    def _next_group(self) -> list[_Call]:
        group = [self._inbox.get()]
        while len(group) < MAX_GROUP and not self._inbox.empty():
            group.append(self._inbox.get())
        return group

    def _perform(self, group: list[_Call]) -> list[Any]:
        """The result of each call, or the exception that it raised."""
        results: list[Any] = []
        self._index.begin(synced=any(call.synced for call in group))
        for call in group:
            try:
                with self._index.part():
                    results.append(call.work())
            except Exception as error:
                if is_full_error(error):
                    raise  # no caller's fault, and nothing that could be tried again
                results.append(error)
        self._files.sync()
        kill_point("queue.before_commit")
        self._index.commit()
        kill_point("queue.after_commit")
        self.num_commits += 1
        return results
