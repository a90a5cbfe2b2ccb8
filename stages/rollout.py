"""Rollout: the policy answers the prompts that are dispatched; its tokens go to the queue as segments.

Token ids are the truth: what the engine sampled is stored and continued as it is, never through text.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pipeline.config import Config
from pipeline.core.errors import StageFailed
from pipeline.core.events import Finish, SegmentInfo
from pipeline.kill_points import kill_point
from pipeline.queue.schema import GIVEN, SegmentRow, SequenceRow, State
from pipeline.stage import StageResult, StageSpec, TaskContext
from stages.engines.base import Output, Request
from stages.serving import GROUP_S, Inbox, returned, seed_of, serve


def rollout(task: TaskContext, spec: StageSpec) -> StageResult:
    """Serve dispatched sequences until the order to end. Raises StageFailed if the engine refuses one."""
    from stages.conversations import Conversations

    service = (Conversations if task.worker.config.rollout.function else Rollout)(task, spec)
    serve(task, service, service.inbox)
    return {"metrics": service.metrics()}


@dataclass(slots=True)
class Segment:
    """The segment of a sequence that is being generated: tokens since the last one that was closed.

    `version` (and `kv_version`, None: the same) are those of its tokens, as the engine's outputs say.
    """

    row: SequenceRow
    turn: int
    idx: int
    version: int
    kv_version: int | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def next(self) -> "Segment":
        return Segment(row=self.row, turn=self.turn, idx=self.idx + 1, version=self.version)


class Rollout:
    """The sequences of one rollout task: `_running` in the engine; `_closed`, in order, are segments not yet put.

    The task does not belong to one version: the spec's is the lowest one allowed, and each segment has one of its own.
    In strict mode a sequence is put whole or not at all: an interrupted one starts again from its prompt, because the
    rest of its random stream is gone.
    """

    def __init__(self, task: TaskContext, spec: StageSpec) -> None:
        self.inbox: Inbox = Inbox()
        self.num_tokens = 0
        self._task, self._spec, self._worker = task, spec, task.worker
        self._config: Config = task.worker.config
        self._stop_ids: tuple[int, ...] = task.worker.tokenizer.stop_ids
        self._running: dict[str, Segment] = {}
        self._closed: list[tuple[Segment, Finish]] = []
        self._closed_since = 0.0
        self._next_flush: float = time.monotonic() + self._config.rollout.flush_s
        self._is_leaving = False

    @property
    def num_open(self) -> int:
        return len(self._running) + len(self._closed)

    def metrics(self) -> dict[str, float]:
        return {"rollout/num_tokens": self.num_tokens}

    def dispatch(self, ids: Sequence[str], turns: Sequence[int]) -> None:
        """Claim the sequences and give them to the engine, with the tokens that they already have."""
        host, lowest = self._worker.engine, self._spec.version
        if self._is_leaving:
            self._task.report_segments([returned(id, lowest) for id in ids])
            return
        if host.version < lowest:
            raise StageFailed(f"{self._spec.task} is for version {lowest} or newer, the engine has {host.version}")
        rows = self._worker.queue.claim(list(ids), list(turns), restart=self._config.is_strict)
        requests = []
        for row, turn in zip(rows, turns, strict=True):
            if self._has(row.id):
                raise StageFailed(f"sequence {row.id} was dispatched twice to {self._spec.task}")
            version = row.versions[-1] if row.versions else lowest  # until there are tokens
            requests += self._begin(Segment(row=row, turn=turn, idx=row.num_segments, version=version))
        host.submit(requests, self.inbox)

    def _has(self, id: str) -> bool:
        return id in self._running

    def _begin(self, segment: Segment) -> list[Request]:
        """What is to be generated of a sequence that has come; nothing if it has ended before."""
        if finish := self._ended_before(segment.row):
            self._close(segment, finish)
            return []
        self._running[segment.row.id] = segment
        return [self._request(segment.row)]

    def abort(self, ids: Sequence[str]) -> None:
        """Their last outputs arrive like any other; one that has finished meanwhile stays finished."""
        self._worker.engine.abort([i for i in ids if i in self._running])

    def leave(self) -> None:
        self._is_leaving = True
        self._worker.engine.abort(list(self._running))

    def withdraw(self) -> None:
        self._worker.engine.abort(list(self._running))

    def take(self, output: Output) -> None:
        segment = self._running.get(output.id)
        if segment is None:
            raise StageFailed(f"the engine returned tokens of sequence {output.id} after its end")
        if output.finish == "error":
            raise StageFailed(
                f"the engine refused sequence {output.id}: prompt of {len(segment.row.prompt_ids)} tokens, "
                f"{len(segment.row.tokens)} generated before, rollout.max_response_length "
                f"{self._config.rollout.max_response_length}"
            )
        if len(output.tokens) != len(output.logprobs):
            raise StageFailed(
                f"the engine returned {len(output.tokens)} tokens and {len(output.logprobs)} logprobs of {output.id}"
            )
        if output.tokens:
            if segment.tokens and (output.version, output.kv_version) != (segment.version, segment.kv_version):
                self._close(segment, Finish.FLUSH)
                segment = self._running[output.id] = segment.next()
            segment.version, segment.kv_version = output.version, output.kv_version
            segment.tokens += output.tokens
            segment.logprobs += output.logprobs
        if any(logprob >= GIVEN for logprob in output.logprobs):
            raise StageFailed(f"the engine returned a logprob that is none, {max(output.logprobs)}, of {output.id}")
        if output.finish:
            del self._running[output.id]
            self._end(segment, Finish(output.finish))
            kill_point("rollout.mid")

    def _end(self, segment: Segment, finish: Finish) -> None:
        """The engine has ended what it was asked for."""
        self._close(segment, finish)

    def settle(self, now: float) -> float | None:
        is_flush_due = now >= self._next_flush
        if self._closed and (not self._running or is_flush_due or now >= self._closed_since + GROUP_S):
            closed, self._closed = self._closed, []
            self._put(closed)
        if is_flush_due:
            self._next_flush = now + self._config.rollout.flush_s
            if not self._config.is_strict:
                self._flush()
        if not self._running:
            return None
        return min(self._next_flush, self._closed_since + GROUP_S) if self._closed else self._next_flush

    def _ended_before(self, row: SequenceRow) -> Finish | None:
        """How the sequence has ended already, if it has: put by a task that died before its report, or by the rules
        for length and stop, which count from the beginning of the sequence."""
        if row.state != State.ADMITTED:
            return Finish(row.finish)
        if row.tokens and row.tokens[-1] in self._stop_ids:
            return Finish.STOP
        return Finish.LENGTH if len(row.tokens) >= self._config.rollout.max_response_length else None

    def _request(self, row: SequenceRow) -> Request:
        num_before = len(row.tokens)
        return Request(
            id=row.id,
            prompt_ids=[*row.prompt_ids, *row.tokens],
            max_tokens=self._config.rollout.max_response_length - num_before,
            temperature=self._config.rollout.temperature,
            seed=seed_of(self._config.run.seed, self._spec.step, row.id, num_before),
            stop_ids=self._stop_ids,
            num_kept=num_before,
        )

    def _close(self, segment: Segment, finish: Finish) -> None:
        if not self._closed:
            self._closed_since = time.monotonic()
        self._closed.append((segment, finish))

    def _flush(self) -> None:
        """Make the tokens of unfinished sequences durable; each goes on with a new segment."""
        flushed = [segment for segment in self._running.values() if segment.tokens]
        if not flushed:
            return
        self._put([(segment, Finish.FLUSH) for segment in flushed])
        for segment in flushed:
            self._running[segment.row.id] = segment.next()

    def _put(self, segments: Iterable[tuple[Segment, Finish]]) -> None:
        rows, infos = [], []
        for segment, finish in segments:
            is_kept = self._is_kept(segment, finish)
            if is_kept:
                rows.append(self._row(segment, finish))
            infos.append(
                SegmentInfo(
                    id=segment.row.id,
                    idx=segment.idx,
                    num_tokens=len(segment.tokens) if is_kept else 0,
                    version=segment.version,
                    finish=finish,
                )
            )
            self.num_tokens += len(segment.tokens)
        if rows:
            self._worker.queue.put_segments(rows)
        self._task.report_segments(infos)

    def _is_kept(self, segment: Segment, finish: Finish) -> bool:
        """Whether there is something to store: the others are reported only."""
        if segment.row.state != State.ADMITTED:
            return False
        return finish is not Finish.ABORT or (bool(segment.tokens) and not self._config.is_strict)

    def _row(self, segment: Segment, finish: Finish) -> SegmentRow:
        return SegmentRow(
            id=segment.row.id,
            idx=segment.idx,
            turn=segment.turn,
            tokens=segment.tokens,
            logprobs=segment.logprobs,
            version=segment.version,
            kv_version=segment.kv_version,
            replica=self._worker.name,
            finish=finish,
        )
