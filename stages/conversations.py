"""Rollout by a function of the user's: turns of the policy, and between them what tools say.

The function runs in a process of its own and asks for one turn after the other. Each turn is a segment (or several,
where it was flushed or cut), and so is what is given to the policy between two, which has no part in the loss.

A conversation that was broken off begins again from its start, wherever it goes on: the function is run anew and is
given the turns that are stored, until there are no more. What it puts between them must be what it put there before. So
no turn is lost and none is made twice; only tools are called again.
"""

import asyncio
import concurrent.futures
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipeline.core.errors import StageFailed
from pipeline.core.events import Finish
from pipeline.kill_points import kill_point
from pipeline.queue.schema import GIVEN, SequenceRow, State
from pipeline.stage import StageSpec, TaskContext
from stages.engines.base import Output, Request
from stages.own.host import Fault, OwnFunction, own_loop, pool_of
from stages.own.messages import Generate, Generated, Returned
from stages.prompts import examples_of_step
from stages.rollout import Rollout, Segment
from stages.serving import seed_of

_MEMORY_BYTES = 32 << 30  # tokenizers bring much that is only mapped
_CONCURRENCY = 4096


@dataclass(slots=True)
class _Talk:
    """One conversation. `tokens` are all of its response so far, `is_given` says which of them the policy was given;
    the function knows of the first `cursor`. `waiting` is its turn, which began at `cursor`; `idx`: its next segment's.
    """

    row: SequenceRow
    turn: int
    call: str
    idx: int
    version: int
    tokens: list[int]
    is_given: list[bool]
    cursor: int = 0
    finish: str = ""
    is_wanted_back: bool = False
    waiting: "asyncio.Future[Generated] | None" = None
    future: "concurrent.futures.Future[Returned | Fault] | None" = None
    held: list[Segment] = field(default_factory=list)
    """Closed, and put when all is: in a strict run."""

    def recorded_turn(self, stops: Sequence[int]) -> list[int]:
        """What is stored of the turn that begins at `cursor`."""
        end = self.cursor
        while end < len(self.tokens) and not self.is_given[end]:
            end += 1
            if self.tokens[end - 1] in stops:
                break
        return self.tokens[self.cursor : end]


@dataclass(frozen=True, slots=True)
class _Asked:
    """The function wants the next turn of a call."""

    call: str
    ask: Generate
    answer: "asyncio.Future[Generated]"


@dataclass(frozen=True, slots=True)
class _Ended:
    call: str
    outcome: "Returned | Fault | BaseException"


class Conversations(Rollout):
    def __init__(self, task: TaskContext, spec: StageSpec) -> None:
        super().__init__(task, spec)
        self._talks: dict[str, _Talk] = {}
        self._num_turns = self._num_given = 0
        function = OwnFunction(
            where="rollout.function",
            path=self._config.rollout.function,
            kind="rollout",
            code_path=tuple(self._config.run.code_path),
            memory_bytes=_MEMORY_BYTES,
            processes=1,
            concurrency=_CONCURRENCY,
        )
        self._pool = pool_of(function)

    @property
    def num_open(self) -> int:
        return len(self._talks) + len(self._closed)

    def metrics(self) -> dict[str, float]:
        counts = {"rollout/num_turns": self._num_turns, "rollout/num_given_tokens": self._num_given}
        return super().metrics() | {name: float(count) for name, count in counts.items()}

    def abort(self, ids: Sequence[str]) -> None:
        """Those that the policy writes come back by the engine, the others at once."""
        self._worker.engine.abort([id for id in ids if id in self._running])
        for talk in [self._talks[id] for id in ids if id in self._talks]:
            talk.is_wanted_back = True
            if talk.row.id not in self._running:
                self._break(talk)

    def leave(self) -> None:
        self._is_leaving = True
        self.abort(list(self._talks))

    def withdraw(self) -> None:
        super().withdraw()
        for talk in self._talks.values():
            self._cancel(talk)

    def take(self, said: Any) -> None:
        match said:
            case _Asked():
                talk = self._talk_of(said.call)
                if talk is not None:
                    self._next_turn(talk, said)
            case _Ended():
                talk = self._talk_of(said.call)
                if talk is not None:
                    self._conclude(talk, said.outcome)
            case Output():
                if said.id in self._talks:
                    talk = self._talks[said.id]
                    talk.tokens += said.tokens
                    talk.is_given += [False] * len(said.tokens)
                super().take(said)

    # --- the function's side ---------------------------------------------------------------------------------------

    def _has(self, id: str) -> bool:
        return id in self._talks

    def _begin(self, segment: Segment) -> list[Request]:
        """Run the function. A conversation that has ended before is only reported."""
        row = segment.row
        if row.state != State.ADMITTED:
            self._closed_before(segment)
            return []
        call = f"{row.id}/{self._spec.task}/{segment.turn}"
        given = [logprob == GIVEN for logprob in row.logprobs]
        talk = _Talk(row, segment.turn, call, segment.idx, segment.version, list(row.tokens), given)
        self._talks[row.id] = talk
        example = examples_of_step(self._config, row.step)[row.prompt_no]
        model = self._config.model
        arguments = {
            "client": {"prompt_ids": list(row.prompt_ids), "tokenizer": (model.policy.path, model.trust_remote_code)},
            "messages": list(example.messages),
            "data_source": example.data_source,
            "ground_truth": example.ground_truth,
            "extra_info": example.extra_info,
            **self._config.rollout.function_options,
        }
        work = self._pool.call(call, arguments, None, partial(self._ask, call))
        talk.future = asyncio.run_coroutine_threadsafe(work, own_loop())
        talk.future.add_done_callback(partial(self._tell_end, call))
        return []

    async def _ask(self, call: str, ask: Generate) -> Generated:
        """On the loop of the user's code: handed to the task's own thread."""
        answer: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        self.inbox.put(_Asked(call, ask, answer))
        return await answer

    def _tell_end(self, call: str, future: "concurrent.futures.Future[Returned | Fault]") -> None:
        if not future.cancelled():
            self.inbox.put(_Ended(call, future.exception() or future.result()))

    def _talk_of(self, call: str) -> _Talk | None:
        talk = self._talks.get(call.partition("/")[0])
        return talk if talk is not None and talk.call == call else None

    # --- turns -----------------------------------------------------------------------------------------------------

    def _next_turn(self, talk: _Talk, asked: _Asked) -> None:
        """Give what is stored of it, and have the policy write the rest."""
        if talk.is_wanted_back or self._is_leaving:
            self._break(talk)
            return
        ids, known = asked.ask.ids, len(talk.row.prompt_ids) + talk.cursor
        talk.waiting = asked.answer
        if ids[:known] != [*talk.row.prompt_ids, *talk.tokens[: talk.cursor]]:
            raise StageFailed(f"rollout.function: {talk.row.id} asks for a turn after other tokens than its own")
        most = self._config.rollout.max_response_length
        if talk.cursor + len(ids) - known >= most:
            self._answer(talk, [], "length")  # what a tool says does not fit
            return
        self._give(talk, ids[known:])
        stops = (*asked.ask.stop_ids, *self._stop_ids)
        before = talk.recorded_turn(stops)
        if before and before[-1] in stops:
            self._answer(talk, before, "stop")
        elif talk.cursor + len(before) >= most:
            self._answer(talk, before, "length")
        elif talk.cursor + len(before) < len(talk.tokens):
            raise self._not_repeated(talk)
        else:
            self._write(talk, stops)

    def _give(self, talk: _Talk, tokens: list[int]) -> None:
        """What the function puts before the turn: stored already, or a segment of its own."""
        end = talk.cursor + len(tokens)
        if talk.cursor < len(talk.tokens):
            if talk.tokens[talk.cursor : end] != tokens or not all(talk.is_given[talk.cursor : end]):
                raise self._not_repeated(talk)
        elif tokens:
            talk.tokens += tokens
            talk.is_given += [True] * len(tokens)
            self._num_given += len(tokens)
            talk.version = max(talk.version, self._worker.engine.version)
            self._keep(talk, tokens, [GIVEN] * len(tokens))
        talk.cursor = end

    def _keep(self, talk: _Talk, tokens: list[int], logprobs: list[float]) -> None:
        segment = Segment(row=talk.row, turn=talk.turn, idx=talk.idx, version=talk.version)
        segment.tokens, segment.logprobs = tokens, logprobs
        talk.idx += 1
        self._close(segment, Finish.FLUSH)
        kill_point("rollout.given")

    def _write(self, talk: _Talk, stops: tuple[int, ...]) -> None:
        row, num_before = talk.row, len(talk.tokens)
        self._running[row.id] = Segment(row=row, turn=talk.turn, idx=talk.idx, version=talk.version)
        request = Request(
            id=row.id,
            prompt_ids=[*row.prompt_ids, *talk.tokens],
            max_tokens=self._config.rollout.max_response_length - num_before,
            temperature=self._config.rollout.temperature,
            seed=seed_of(self._config.run.seed, self._spec.step, row.id, num_before),
            stop_ids=stops,
            num_kept=num_before,
        )
        self._worker.engine.submit([request], self.inbox)

    def _end(self, segment: Segment, finish: Finish) -> None:
        """A turn has ended, or was cut."""
        talk = self._talks[segment.row.id]
        talk.idx = segment.idx
        if finish is Finish.ABORT:
            self._break(talk, segment)
            return
        talk.version = segment.version
        if segment.tokens:
            talk.idx += 1
            self._close(segment, Finish.FLUSH)
        self._answer(talk, talk.tokens[talk.cursor :], finish.value)

    def _answer(self, talk: _Talk, tokens: list[int], finish: str) -> None:
        assert talk.waiting is not None
        talk.cursor, talk.finish = talk.cursor + len(tokens), finish
        self._num_turns += 1
        answer, talk.waiting = talk.waiting, None
        own_loop().call_soon_threadsafe(_set, answer, Generated(talk.call, tokens, finish))

    def _not_repeated(self, talk: _Talk) -> StageFailed:
        return StageFailed(
            f"rollout.function: {talk.row.id} was broken off and began again, and from token {talk.cursor} on the "
            "function does something else than before: it may depend on nothing but its arguments and its turns"
        )

    # --- the end ---------------------------------------------------------------------------------------------------

    def _conclude(self, talk: _Talk, outcome: "Returned | Fault | BaseException") -> None:
        if isinstance(outcome, BaseException):
            raise outcome
        if isinstance(outcome, Fault):
            raise StageFailed(f"rollout.function failed on {talk.row.id} ({outcome.kind}): {outcome.text.strip()}")
        if talk.waiting is not None:
            raise StageFailed(f"rollout.function: {talk.row.id} has returned before its turn ended")
        if talk.cursor < len(talk.tokens):
            raise self._not_repeated(talk)
        self._close(self._empty(talk), Finish.LENGTH if talk.finish == "length" else Finish.STOP)
        del self._talks[talk.row.id]

    def _empty(self, talk: _Talk) -> Segment:
        return Segment(row=talk.row, turn=talk.turn, idx=talk.idx, version=talk.version)

    def _break(self, talk: _Talk, segment: Segment | None = None) -> None:
        """Give it back, with what the policy has written of a turn that was cut."""
        self._cancel(talk)
        self._close(segment or self._empty(talk), Finish.ABORT)
        del self._talks[talk.row.id]

    def _cancel(self, talk: _Talk) -> None:
        if talk.future is not None:
            talk.future.cancel()
        if talk.waiting is not None:
            own_loop().call_soon_threadsafe(talk.waiting.cancel)

    def _close(self, segment: Segment, finish: Finish) -> None:
        """In a strict run a conversation is put whole or not at all."""
        talk = self._talks[segment.row.id]
        if self._config.is_strict and finish is Finish.FLUSH:
            talk.held.append(segment)
            return
        if finish is not Finish.ABORT:
            for held in talk.held:
                super()._close(held, Finish.FLUSH)
        super()._close(segment, finish)

    def _closed_before(self, segment: Segment) -> None:
        super()._close(segment, Finish(segment.row.finish))


def _set(answer: "asyncio.Future[Generated]", turn: Generated) -> None:
    if not answer.done():
        answer.set_result(turn)
