"""Reward: each response is scored by the judge, the user's functions or both, or fails in a way that has a type."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pipeline.config import Config
from pipeline.config_reward import GENRM
from pipeline.core.events import Finish, SegmentInfo, VerdictInfo
from pipeline.data import Example
from pipeline.kill_points import kill_point
from pipeline.queue.schema import SequenceRow, State, VerdictRow
from pipeline.stage import StageResult, StageSpec, TaskContext
from stages.engines.base import Output
from stages.exact import ExactChecker
from stages.genrm import verdict as verdicts
from stages.genrm.measurement import Measurement
from stages.genrm.verdict import Failure, FailureType, Score
from stages.prompts import examples_of_step
from stages.scoring.base import Answer, Give, Question, Source
from stages.scoring.endpoint import EndpointJudge
from stages.scoring.engine import EngineJudge
from stages.scoring.functions import FunctionSource
from stages.scoring.opponents import Opponents
from stages.scoring.samples import Samples
from stages.serving import GROUP_S, Inbox, returned, seed_of, serve
from stages.text import decode_response, load_tokenizer


def reward(task: TaskContext, spec: StageSpec) -> StageResult:
    """Judge dispatched sequences until the order to end."""
    service = Reward(task, spec)
    serve(task, service, service.inbox)
    return {"metrics": service.metrics(), "samples": service.samples.kept}


@dataclass(slots=True)
class _Asked:
    """One try of one question."""

    source: Source
    question: Question
    number: int


@dataclass(slots=True)
class _Open:
    """A sequence that is being scored: the questions that are not answered yet, and what was said so far.

    `is_returned`: one was taken back, so that the sequence is too.
    """

    row: SequenceRow
    turn: int
    response: str
    asked: dict[str, _Asked] = field(default_factory=dict)
    scores: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, list[FailureType]] = field(default_factory=dict)
    critiques: list[Answer] = field(default_factory=list)
    is_returned: bool = False


@dataclass(frozen=True, slots=True)
class _Ended:
    """`verdict` is None for a sequence that was given back unjudged by the judge of `version`, and for one that was
    judged before (`version` is None then)."""

    row: SequenceRow
    verdict: VerdictRow | None = None
    version: int | None = None


class Reward:
    """The sequences of one reward task: `_open` while sources are asked, `_ended` but not yet put and reported."""

    def __init__(self, task: TaskContext, spec: StageSpec) -> None:
        config: Config = task.worker.config
        self.inbox: Inbox = Inbox()
        self.samples = Samples(config.data.train_batch_size)
        self._task, self._spec, self._worker, self._config = task, spec, task.worker, config
        self._reward, self._genrm = config.reward, config.reward.genrm
        self._policy = load_tokenizer(config.model.policy.path, config.model.trust_remote_code)
        self._judge: EngineJudge | None = None
        self._sources = self._make_sources(self.inbox.put)
        self._version = self._judge.version if self._judge is not None else 0
        self._needs_example = any(source.needs_example for source in self._sources)
        self._opponents = Opponents(config, task.worker) if self._genrm and self._genrm.mode == "pairwise" else None
        self._measurement = (
            Measurement(ExactChecker(config.evaluate.function), verdicts.middle(self._genrm.verdict))
            if config.evaluate.function and self._genrm is not None
            else None
        )
        self._open: dict[str, _Open] = {}
        self._of_question: dict[str, str] = {}
        self._ended: list[_Ended] = []
        self._ended_since = 0.0
        self._counts: Counter[str] = Counter()
        self._sums: Counter[str] = Counter()
        self._is_leaving = False

    def _make_sources(self, give: Give) -> list[Source]:
        config, found = self._config, list[Source]()
        if self._genrm is not None and self._genrm.endpoint is not None:
            found.append(EndpointJudge(self._genrm, give))
        elif self._genrm is not None:
            self._judge = EngineJudge(config, self._worker.engine, self._worker.tokenizer, self.inbox)
            found.append(self._judge)
        return [*found, *(FunctionSource(name, config, give) for name in self._reward.functions)]

    @property
    def num_open(self) -> int:
        return len(self._open) + len(self._ended)

    def dispatch(self, ids: Sequence[str], turns: Sequence[int]) -> None:
        """Claim the sequences and ask about each. One that has a verdict already is only reported."""
        if self._is_leaving:
            self._task.report_segments([returned(id, self._version) for id in ids])
            return
        rows = self._worker.queue.claim(list(ids), list(turns))
        asked: dict[str, list[Question]] = {source.name: [] for source in self._sources}
        for row, turn in zip(rows, turns, strict=True):
            if row.state == State.SCORED:
                self._end(_Ended(row=row))
                continue
            opened = self._open[row.id] = _Open(row, turn, decode_response(self._policy, row.tokens))
            for source in self._sources:
                for number, other in enumerate(self._others(source, row)):
                    asked[source.name].append(self._question(source, opened, 0, number, other))
            self._close_if_done(opened)
        for source in self._sources:
            if asked[source.name]:
                source.ask(asked[source.name])

    def abort(self, ids: Sequence[str]) -> None:
        """Give these back unjudged, unless the verdict is there first."""
        self._take_back([self._open[id] for id in ids if id in self._open])

    def leave(self) -> None:
        self._is_leaving = True
        self._take_back(list(self._open.values()))

    def withdraw(self) -> None:
        self._take_back(list(self._open.values()))

    def take(self, said: Output | Answer) -> None:
        answer = said
        if isinstance(said, Output):
            assert self._judge is not None
            found = self._judge.take(said)
            if found is None:
                return
            answer = found
        assert isinstance(answer, Answer)
        opened = self._open[self._of_question.pop(answer.id)]
        asked = opened.asked.pop(answer.id)
        self._counts["num_tokens"] += answer.num_tokens
        if asked.source.name == GENRM and answer.outcome is not None:
            self._version = answer.version
        if answer.outcome is None:
            opened.is_returned = True
        elif isinstance(answer.outcome, Failure):
            self._hear_failure(opened, asked, answer, answer.outcome.type)
        else:
            self._hear_score(opened, asked, answer, answer.outcome)
        self._close_if_done(opened)

    def settle(self, now: float) -> float | None:
        due = [at for source in self._sources if (at := source.settle(now)) is not None]
        if self._ended and (not self._open or now >= self._ended_since + GROUP_S):
            ended, self._ended = self._ended, []
            self._put(ended)
        due += [self._ended_since + GROUP_S] if self._ended else []
        return min(due, default=None)

    def metrics(self) -> dict[str, float]:
        """Counts and sums only: several replicas are added up."""
        counts = self._counts + (self._measurement.counts if self._measurement else Counter())
        names = ("num_verdicts", "num_tokens", "num_failed")
        found = {f"genrm/{name}": float(counts[name]) for name in dict.fromkeys((*names, *counts))}
        return found | {f"reward/{name}": float(value) for name, value in self._sums.items()}

    # --- asking ----------------------------------------------------------------------------------------------------

    def _others(self, source: Source, row: SequenceRow) -> Sequence[str | None]:
        """What the response is compared with: of a source that does not compare, one time nothing."""
        if source.name == GENRM and self._opponents is not None:
            return self._opponents.of(row)
        return (None,)

    def _question(self, source: Source, opened: _Open, number: int, at: int, other: str | None) -> Question:
        row = opened.row
        is_judge, compared = source.name == GENRM, "" if other is None else f".{at}"
        name = "judge" if is_judge else source.name
        question = Question(
            id=f"{row.id}/{name}-{opened.turn}.{number}{compared}",
            row=row,
            response=opened.response,
            seed=seed_of(self._config.run.seed, self._spec.step, row.id, name, f"{number}{compared}"),
            example=self._example(row) if source.needs_example else None,
            other=other,
        )
        self._keep(opened, _Asked(source, question, number))
        return question

    def _keep(self, opened: _Open, asked: _Asked) -> None:
        opened.asked[asked.question.id] = asked
        self._of_question[asked.question.id] = opened.row.id

    def _example(self, row: SequenceRow) -> Example:
        return examples_of_step(self._config, row.step)[row.prompt_no]

    def _take_back(self, opened: Sequence[_Open]) -> None:
        for source in self._sources:
            ids = [id for one in opened for id, asked in one.asked.items() if asked.source is source]
            if ids:
                source.abort(ids)

    # --- hearing ---------------------------------------------------------------------------------------------------

    def _hear_score(self, opened: _Open, asked: _Asked, answer: Answer, score: Score) -> None:
        name = asked.source.name
        opened.scores.setdefault(name, []).append(score.value)
        if name == GENRM:
            opened.critiques.append(answer)
            return
        self._sums[f"num_scored_{name}"] += 1
        for key, value in {"": score.value, **{f"/{k}": v for k, v in answer.figures.items()}}.items():
            self._sums[f"sum_{name}{key}"] += value

    def _hear_failure(self, opened: _Open, asked: _Asked, answer: Answer, failure: FailureType) -> None:
        name, question = asked.source.name, asked.question
        about = f": {answer.text.strip()}" if name != GENRM and answer.text else ""
        self._task.log(f"{opened.row.id}{'' if name == GENRM else f' {name}'} try {asked.number + 1}: {failure}{about}")
        if failure in verdicts.TRANSIENT and asked.number < asked.source.retries:
            if self._is_leaving:
                opened.is_returned = True
                return
            at = int(question.id.rpartition(".")[2]) if question.other is not None else 0
            asked.source.ask([self._question(asked.source, opened, asked.number + 1, at, question.other)])
            return
        opened.failures.setdefault(name, []).append(failure)
        if name == GENRM:
            opened.critiques.append(answer)
        else:
            self._sums[f"num_failed_{name}"] += 1

    def _close_if_done(self, opened: _Open) -> None:
        if opened.asked:
            return
        del self._open[opened.row.id]
        if opened.is_returned:
            self._end(_Ended(row=opened.row, version=self._version))
        else:
            self._give(opened)

    def _outcome(self, opened: _Open) -> tuple[float | None, str]:
        """(score, failure). A response that was compared has the mean of what was said of it; who said nothing has
        failed, and so has the whole."""
        total = 0.0
        for source in self._sources:
            name = source.name
            if scores := opened.scores.get(name):
                total += self._reward.weight(name) * fmean(scores)
            else:
                failure = (opened.failures.get(name) or [FailureType.EMPTY])[0]
                return None, str(failure) if name == GENRM else f"{name}:{failure}"
        return total, ""

    def _give(self, opened: _Open) -> None:
        row = opened.row
        score, failure = self._outcome(opened)
        self._counts["num_verdicts"] += 1
        if failure:
            self._counts["num_failed"] += 1
            self._counts[f"failed_{failure.replace(':', '_')}"] += 1
        if self._measurement is not None and (judged := opened.scores.get(GENRM)):
            self._measurement.add(row, opened.response, fmean(judged))
        said = opened.critiques
        tokens = [token for answer in said for token in answer.tokens]
        verdict = VerdictRow(
            id=row.id,
            turn=opened.turn,
            score=score,
            failure=failure,
            critique="\n---\n".join(answer.text for answer in said),
            tokens=tokens,
            version=said[-1].version if said else 0,
            replica=self._worker.name,
        )
        self.samples.add(row, opened.response, verdict)
        self._end(_Ended(row=row, verdict=verdict, version=verdict.version))
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
