"""Reward: the generative judge reads each response and generates a verdict, or fails in a way that has a type."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

from pipeline.config import Config
from pipeline.core.errors import StageFailed
from pipeline.core.events import Finish, SegmentInfo, VerdictInfo
from pipeline.kill_points import kill_point
from pipeline.queue.schema import SequenceRow, State, VerdictRow
from pipeline.stage import StageResult, StageSpec, TaskContext
from stages.engines.base import Output, Request
from stages.exact import ExactChecker
from stages.genrm import verdict as verdicts
from stages.genrm.measurement import Measurement
from stages.genrm.prompt import JudgePrompt
from stages.genrm.verdict import Failure, FailureType, Score
from stages.prompts import examples_of_step
from stages.serving import GROUP_S, Inbox, returned, seed_of, serve
from stages.text import decode_response, load_tokenizer


def reward(task: TaskContext, spec: StageSpec) -> StageResult:
    """Judge dispatched sequences until the order to end."""
    service = Reward(task, spec)
    serve(task, service, service.inbox)
    return {"metrics": service.metrics()}


@dataclass(slots=True)
class _Trial:
    """One try to judge one sequence. `is_late`: its time is up and it is being aborted."""

    id: str
    row: SequenceRow
    turn: int
    prompt_ids: list[int]
    number: int
    deadline: float
    is_late: bool = False
    tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Ended:
    """`verdict` is None for a sequence that was given back unjudged by the judge of `version`, and for one that was
    judged before (`version` is None then)."""

    row: SequenceRow
    verdict: VerdictRow | None = None
    version: int | None = None


class Reward:
    """The sequences of one reward task: `_running` in the engine, `_ended` but not yet put and reported."""

    def __init__(self, task: TaskContext, spec: StageSpec) -> None:
        config: Config = task.worker.config
        self.inbox: Inbox = Inbox()
        self._task, self._spec, self._worker, self._config = task, spec, task.worker, config
        self._genrm = config.reward.genrm
        self._regex = verdicts.regex(self._genrm.verdict) if self._genrm.verdict.structured else ""
        self._tokenizer = task.worker.tokenizer
        self._policy = load_tokenizer(config.model.policy.path, config.model.trust_remote_code)
        self._prompt = JudgePrompt(self._genrm.template, self._tokenizer)
        self._measurement = (
            Measurement(ExactChecker(config.evaluate.function), verdicts.middle(self._genrm.verdict))
            if config.evaluate.function
            else None
        )
        self._running: dict[str, _Trial] = {}
        self._ended: list[_Ended] = []
        self._ended_since = 0.0
        self._counts: Counter[str] = Counter()
        self._is_leaving = False

    @property
    def num_open(self) -> int:
        return len(self._running) + len(self._ended)

    def dispatch(self, ids: Sequence[str], turns: Sequence[int]) -> None:
        """Claim the sequences and ask the judge about each. One that has a verdict already is only reported."""
        if self._is_leaving:
            self._task.report_segments([returned(id, self._worker.engine.version) for id in ids])
            return
        rows = self._worker.queue.claim(list(ids), list(turns))
        trials = []
        for row, turn in zip(rows, turns, strict=True):
            if row.state == State.SCORED:
                self._end(_Ended(row=row))
            else:
                trials.append(self._trial(row, turn, self._judge_prompt(row), number=0))
        self._submit(trials)

    def abort(self, ids: Sequence[str]) -> None:
        """Give these back unjudged, unless the verdict is there first."""
        wanted = set(ids)
        self._worker.engine.abort([trial.id for trial in self._running.values() if trial.row.id in wanted])

    def leave(self) -> None:
        self._is_leaving = True
        self._worker.engine.abort(list(self._running))

    def withdraw(self) -> None:
        self._worker.engine.abort(list(self._running))

    def take(self, output: Output) -> None:
        trial = self._running[output.id]
        trial.tokens += output.tokens
        if not output.finish:
            return
        del self._running[output.id]
        self._counts["num_tokens"] += len(trial.tokens)
        if output.finish == "abort" and not trial.is_late:
            self._end(_Ended(row=trial.row, version=output.version))
            return
        outcome = self._outcome(trial, output.finish)
        if isinstance(outcome, Failure):
            self._task.log(f"{trial.row.id} try {trial.number + 1}: {outcome.type}")
            if outcome.type in verdicts.TRANSIENT and trial.number < self._genrm.retries:
                if self._is_leaving:
                    self._end(_Ended(row=trial.row, version=output.version))
                else:
                    self._submit([self._trial(trial.row, trial.turn, trial.prompt_ids, trial.number + 1)])
                return
        self._give(trial, outcome, output.version)

    def settle(self, now: float) -> float | None:
        self._abort_late(now)
        if self._ended and (not self._running or now >= self._ended_since + GROUP_S):
            ended, self._ended = self._ended, []
            self._put(ended)
        due = [self._ended_since + GROUP_S] if self._ended else []
        due += [trial.deadline for trial in islice(self._not_late(), 1)]
        return min(due, default=None)

    def metrics(self) -> dict[str, float]:
        """Counts only: several replicas are added up."""
        counts = self._counts + (self._measurement.counts if self._measurement else Counter())
        names = ("num_verdicts", "num_tokens", "num_failed")
        return {f"genrm/{name}": float(counts[name]) for name in dict.fromkeys((*names, *counts))}

    def _judge_prompt(self, row: SequenceRow) -> list[int]:
        response = decode_response(self._policy, row.tokens)
        if not self._prompt.needs_messages:
            return self._prompt.ids(row.text, response)
        example = examples_of_step(self._config, row.step)[row.prompt_no]
        return self._prompt.ids(row.text, response, example.messages)

    def _trial(self, row: SequenceRow, turn: int, prompt_ids: list[int], number: int) -> _Trial:
        deadline = time.monotonic() + self._genrm.timeout_s
        return _Trial(f"{row.id}/judge-{turn}.{number}", row, turn, prompt_ids, number, deadline)

    def _submit(self, trials: list[_Trial]) -> None:
        self._running |= {trial.id: trial for trial in trials}
        self._worker.engine.submit([self._request(trial) for trial in trials], self.inbox)

    def _request(self, trial: _Trial) -> Request:
        return Request(
            id=trial.id,
            prompt_ids=trial.prompt_ids,
            max_tokens=self._genrm.max_tokens,
            temperature=self._genrm.temperature,
            seed=seed_of(self._config.run.seed, self._spec.step, trial.row.id, "judge", trial.number),
            stop_ids=self._tokenizer.stop_ids,
            logprobs=False,
            regex=self._regex,
        )

    def _not_late(self) -> Iterator[_Trial]:
        """In the order of their deadlines: all have the same limit, and a new trial is inserted last."""
        return (trial for trial in self._running.values() if not trial.is_late)

    def _abort_late(self, now: float) -> None:
        late = list(takewhile(lambda trial: trial.deadline <= now, self._not_late()))
        if late and self._config.is_strict:
            raise StageFailed(
                f"{late[0].id} took longer than reward.genrm.timeout_s ({self._genrm.timeout_s:g} s): in a strict run "
                "no result may depend on time, so raise the limit"
            )
        for trial in late:
            trial.is_late = True
        if late:
            self._worker.engine.abort([trial.id for trial in late])

    def _outcome(self, trial: _Trial, finish: str) -> Score | Failure:
        """Of what the judge generated, and of nothing else."""
        if finish == "abort":
            return Failure(FailureType.TIMEOUT)
        if finish == "error":
            return Failure(FailureType.REFUSED)
        return verdicts.parse(self._generated(trial.tokens), finish, self._genrm.verdict)

    def _generated(self, tokens: list[int]) -> str:
        """The judge's text. Where a token ends the reasoning, nothing else does: a judge that quotes the tag from the
        response, which was given to it in pieces, is still reasoning."""
        tag = self._genrm.verdict.reasoning_end
        end = self._tokenizer.control_id(tag) if tag else None
        if end is None:
            return decode_response(self._tokenizer, tokens)
        if end not in tokens:
            return decode_response(self._tokenizer, tokens).replace(tag, " ")
        after = len(tokens) - tokens[::-1].index(end)
        return tag + decode_response(self._tokenizer, tokens[after:])

    def _give(self, trial: _Trial, outcome: Score | Failure, version: int) -> None:
        score = outcome.value if isinstance(outcome, Score) else None
        failure = outcome.type if isinstance(outcome, Failure) else ""
        self._counts["num_verdicts"] += 1
        if failure:
            self._counts["num_failed"] += 1
            self._counts[f"failed_{failure}"] += 1
        if score is not None and self._measurement is not None:
            self._measurement.add(trial.row, decode_response(self._policy, trial.row.tokens), score)
        verdict = VerdictRow(
            id=trial.row.id,
            turn=trial.turn,
            score=score,
            failure=failure,
            critique=decode_response(self._tokenizer, trial.tokens),
            tokens=trial.tokens,
            version=version,
            replica=self._worker.name,
        )
        self._end(_Ended(row=trial.row, verdict=verdict, version=version))
        kill_point("reward.mid")

    def _end(self, ended: _Ended) -> None:
        if not self._ended:
            self._ended_since = time.monotonic()
        self._ended.append(ended)

    def _put(self, ended: list[_Ended]) -> None:
        """Put, then report."""
        given = [e.verdict for e in ended if e.verdict is not None]
        if given:
            self._worker.queue.put_verdicts(given)
        infos = [VerdictInfo(id=v.id, score=v.score, failure=v.failure, num_tokens=len(v.tokens)) for v in given]
        stored = [e.row for e in ended if e.version is None]
        infos += [VerdictInfo(id=row.id, score=row.score, failure=row.failure) for row in stored]
        if infos:
            self._task.report_verdicts(infos)
        back = [
            SegmentInfo(id=e.row.id, idx=e.row.num_segments, num_tokens=0, version=e.version, finish=Finish.ABORT)
            for e in ended
            if e.verdict is None and e.version is not None
        ]
        if back:
            self._task.report_segments(back)
