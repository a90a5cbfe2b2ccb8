"""A judge on an engine of the run: what it generates is read as a verdict."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from pipeline.config import Config
from pipeline.config_reward import GENRM
from pipeline.core.errors import StageFailed
from stages.engines.base import Output, Request
from stages.engines.host import EngineHost
from stages.genrm import verdict as verdicts
from stages.genrm.prompt import JudgePrompt
from stages.genrm.verdict import Failure, FailureType, Score
from stages.scoring.base import Answer, Question
from stages.serving import Inbox
from stages.text import Tokenizer, decode_response


@dataclass(slots=True)
class _Trial:
    """`is_late`: its time is up and it is being aborted."""

    question: Question
    deadline: float
    is_late: bool = False
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class EngineJudge:
    """A Source whose outputs arrive in the inbox piece by piece: whoever takes them out gives them to `take`."""

    name = GENRM

    def __init__(self, config: Config, engine: EngineHost, tokenizer: Tokenizer, inbox: Inbox) -> None:
        assert config.reward.genrm is not None
        self._genrm, self._is_strict = config.reward.genrm, config.is_strict
        self._engine, self._tokenizer, self._inbox = engine, tokenizer, inbox
        self._regex = verdicts.regex(self._genrm.verdict) if self._genrm.verdict.structured else ""
        self._prompt = JudgePrompt(self._genrm.template, tokenizer)
        self.retries = self._genrm.retries
        self.needs_example = self._prompt.needs_messages
        self._running: dict[str, _Trial] = {}

    @property
    def version(self) -> int:
        return self._engine.version

    def ask(self, questions: Sequence[Question]) -> None:
        deadline = time.monotonic() + self._genrm.timeout_s
        self._running |= {question.id: _Trial(question, deadline) for question in questions}
        self._engine.submit([self._request(question) for question in questions], self._inbox)

    def abort(self, ids: Sequence[str]) -> None:
        self._engine.abort(list(ids))

    def settle(self, now: float) -> float | None:
        late = list(takewhile(lambda trial: trial.deadline <= now, self._not_late()))
        if late and self._is_strict:
            raise StageFailed(
                f"{late[0].question.row.id} took longer than reward.genrm.timeout_s ({self._genrm.timeout_s:g} s): in "
                "a strict run no result may depend on time, so raise the limit"
            )
        for trial in late:
            trial.is_late = True
        if late:
            self._engine.abort([trial.question.id for trial in late])
        return next((trial.deadline for trial in islice(self._not_late(), 1)), None)

    def take(self, output: Output) -> Answer | None:
        """The answer, when this was the last of it."""
        trial = self._running[output.id]
        trial.tokens += output.tokens
        trial.logprobs += output.logprobs
        if not output.finish:
            return None
        del self._running[output.id]
        is_taken_back = output.finish == "abort" and not trial.is_late
        return Answer(
            id=output.id,
            outcome=None if is_taken_back else self._outcome(trial, output.finish),
            text=decode_response(self._tokenizer, trial.tokens),
            tokens=trial.tokens,
            num_tokens=len(trial.tokens),
            version=output.version,
        )

    def _request(self, question: Question) -> Request:
        messages = question.example.messages if question.example is not None else ()
        return Request(
            id=question.id,
            prompt_ids=self._prompt.ids(question.row.text, question.response, messages, question.other),
            max_tokens=self._genrm.max_tokens,
            temperature=self._genrm.temperature,
            seed=question.seed,
            stop_ids=self._tokenizer.stop_ids,
            logprobs=self._genrm.mode == "soft",
            regex=self._regex,
        )

    def _not_late(self) -> Iterator[_Trial]:
        """In the order of their deadlines: all have the same limit, and a new trial is inserted last."""
        return (trial for trial in self._running.values() if not trial.is_late)

    def _outcome(self, trial: _Trial, finish: str) -> Score | Failure:
        """Of what the judge generated, and of nothing else."""
        if finish == "abort":
            return Failure(FailureType.TIMEOUT)
        if finish == "error":
            return Failure(FailureType.REFUSED)
        text, first = self._generated(trial.tokens)
        if self._genrm.mode != "soft":
            return verdicts.parse(text, finish, self._genrm.verdict)
        found = verdicts.find(text, finish, self._genrm.verdict)
        if isinstance(found, Failure):
            return found
        return verdicts.soften(
            found, self._pieces(text, trial.tokens[first:], trial.logprobs[first:]), self._genrm.verdict
        )

    def _generated(self, tokens: list[int]) -> tuple[str, int]:
        """The judge's text, and from which token on it is. Where a token ends the reasoning, nothing else does: a judge
        that quotes the tag from the response, which was given to it in pieces, is still reasoning."""
        tag = self._genrm.verdict.reasoning_end
        end = self._tokenizer.control_id(tag) if tag else None
        if end is None:
            return decode_response(self._tokenizer, tokens), 0
        if end not in tokens:
            return decode_response(self._tokenizer, tokens).replace(tag, " "), 0
        after = len(tokens) - tokens[::-1].index(end)
        return tag + decode_response(self._tokenizer, tokens[after:]), after

    def _pieces(self, text: str, tokens: list[int], logprobs: list[float]) -> Iterator[tuple[int, int, float]]:
        """(begin, end, logprob) in `text` of each token, from the last one backwards."""
        if tokens and tokens[-1] in self._tokenizer.stop_ids:
            tokens, logprobs = tokens[:-1], logprobs[:-1]
        end = len(text)
        for at in range(len(tokens) - 1, -1, -1):
            begin = max(0, len(text) - len(self._tokenizer.decode(tokens[at:])))
            yield begin, end, logprobs[at]
            end = begin
