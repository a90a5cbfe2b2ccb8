"""What gives scores, behind one port: a judge on an engine of the run, a judge behind a URL, a function of the user's.

Questions go in; each is answered once, in the inbox of the task that asked.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from pipeline.data import Example
from pipeline.queue.schema import SequenceRow
from stages.genrm.verdict import Failure, Score


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """About one response, `response`; `id` is that of this try. `other`: the response that it is compared with, if it
    is compared. `example`: its row of the data, for a source that `needs_example`."""

    id: str
    row: SequenceRow
    response: str
    seed: int
    example: Example | None = None
    other: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`outcome` None: the question was taken back before there was one. `text` and `tokens` are what a judge generated
    (its tokens where it is ours), `version` that of its weights; `figures` is what else a function says."""

    id: str
    outcome: Score | Failure | None
    text: str = ""
    tokens: Sequence[int] = ()
    num_tokens: int = 0
    version: int = 0
    figures: Mapping[str, float] = field(default_factory=dict)


Give = Callable[[Answer | BaseException], None]
"""Takes an answer, or what broke the source: from any thread."""


class Source(Protocol):
    name: str
    retries: int
    """How often a transient failure is asked again."""
    needs_example: bool
    version: int
    """Of its weights; 0 where it has none of ours."""

    def ask(self, questions: Sequence[Question]) -> None: ...

    def abort(self, ids: Sequence[str]) -> None:
        """Take these back: each one's answer comes soon, and if it was not there yet, without an outcome."""

    def settle(self, now: float) -> float | None:
        """Enforce limits of time at `now` (time.monotonic()); when it is to be called again, None: not needed."""
