"""The queue as its users see it: blocking calls, each durable when it returns and safe to repeat."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from pipeline.core.errors import QueueUnavailable
from pipeline.core.events import RestoredSequence, RestoredStep
from pipeline.queue.channel import ClientHandshake, ProvenCalls, heard
from pipeline.queue.rows import to_batch, to_sequences
from pipeline.queue.schema import PROMPTS, SEGMENTS, VERDICTS, PromptRow, SegmentRow, SequenceRow, VerdictRow

T = TypeVar("T")
Call = Callable[[fl.FlightClient, fl.FlightCallOptions], T]
_RECONNECT = [
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
]
"""A new connection tries anew: by default all of a process share one state, which waits ever longer after failures, and
a server that is back is not asked."""
FIRST_PAUSE_S = 0.02  # between tries; doubled up to the last: a server restarts in about 0.4 s
LAST_PAUSE_S = 0.2


class _NotDurable(Exception):
    """The server went before it acknowledged."""


class _NotProven(Exception):
    """Somebody else answered, at the server's place."""


_LOST = (
    _NotDurable,
    _NotProven,
    fl.FlightUnavailableError,
    fl.FlightInternalError,
    fl.FlightTimedOutError,
    fl.FlightCancelledError,
    fl.FlightUnauthenticatedError,  # the token of a server that is no more
    fl.FlightServerError,  # without an error that our code told
)


class QueueClient:
    """A connection to the queue server, made at the first call and again whenever it breaks. Any thread may call.

    Every call raises Fenced if the server serves another attempt, PermissionError if one side does not know the
    secret, QueueUnavailable if there is no answer within `deadline_s`, QueueDamaged if stored bytes are broken.
    """

    def __init__(self, endpoint: str, secret: bytes, attempt: int, deadline_s: float) -> None:
        self.endpoint = endpoint
        self._secret = secret
        self._attempt = attempt
        self._deadline_s = deadline_s
        self.waited_s = 0.0
        """How long callers have waited for the server, in total: what the queue costs them."""
        self._connection: fl.FlightClient | None = None
        self._lock = threading.Lock()  # of _connection
        self._calls = ProvenCalls(secret)
        self._has_given_up = threading.Event()

    def admit(self, rows: Sequence[PromptRow]) -> None:
        """Store new sequences. Repeating is no error; another prompt under a known id is a ValueError."""
        self._put("prompts", rows, PROMPTS)

    def put_segments(self, rows: Sequence[SegmentRow]) -> None:
        """Append segments: idx is the number of segments that the sequence has. Final ones make it GENERATED.

        All or nothing. Raises NotOwner unless this attempt and the row's turn were the last to claim the sequence;
        ValueError for a wrong idx, an illegal state, or unequal numbers of tokens and logprobs.
        """
        self._put("segments", rows, SEGMENTS)

    def put_verdicts(self, rows: Sequence[VerdictRow]) -> None:
        """Give GENERATED sequences their score, or failure: SCORED. All or nothing; errors like `put_segments`."""
        self._put("verdicts", rows, VERDICTS)

    def claim(self, ids: Sequence[str], turns: Sequence[int], restart: bool = False) -> list[SequenceRow]:
        """Become the owner of these sequences and get them, in this order. Raises NotOwner if a later turn has one.

        After a death between put and report a sequence may be further than its task expects (`state`): then there
        is nothing left to do but to report it. `restart`: unfinished responses start again from their prompts.
        """
        return self._get(call="claim", ids=list(ids), turns=list(turns), restart=restart) if ids else []

    def get(self, ids: Sequence[str]) -> list[SequenceRow]:
        """These sequences, in this order. Raises ValueError for an unknown id."""
        return self._get(call="get", ids=list(ids)) if ids else []

    def batch(self, step: int) -> list[SequenceRow]:
        """The recorded batch of `step`, in its order. Raises ValueError if there is none."""
        return self._get(call="batch", step=step)

    def commit_batch(
        self, step: int, ids: Sequence[str], dropped: Sequence[tuple[str, str]], parts: dict[str, Any] | None = None
    ) -> None:
        """Record which sequences are trained, in which order, and which are dropped, with reasons. `parts` (JSON-able)
        is what was measured of the step so far: kept with the batch, because it cannot be measured again.

        Raises ValueError unless these are all sequences of the step, `ids` are SCORED, and no other batch is there.
        """
        pairs = [list(pair) for pair in dropped]
        self._act("commit_batch", step=step, ids=list(ids), dropped=pairs, parts=parts or {})

    def batch_parts(self, above: int) -> dict[int, dict[str, Any]]:
        """Of each step > `above` with a recorded batch: the `parts` that were kept with it."""
        return dict(self._act("batch_parts", above=above))

    def commit_trained(self, step: int) -> tuple[int, int]:
        """Record that the batch of `step` is trained; returns (trained, dropped), whose sum the server checked."""
        trained, dropped = self._act("commit_trained", step=step)
        return trained, dropped

    def record_step(self, step: int, row: dict[str, Any]) -> bool:
        """Keep the metric row of `step` (JSON-able). False: it has one already, which stays."""
        return bool(self._act("record_step", step=step, row=row))

    def step_rows(self, above: int) -> list[tuple[int, dict[str, Any]]]:
        """The metric rows of all steps > `above`, ascending."""
        return [(step, row) for step, row in self._act("step_rows", above=above)]

    def restore(self, version: int, strict: bool) -> list[RestoredStep]:
        """Go back to the checkpoint of `version`: what is durable of each later step, ascending.

        Batches trained since are to be trained again. `strict`: steps without a recorded batch are forgotten.
        """
        return [
            RestoredStep(
                step=found["step"],
                batched=found["batched"],
                sequences=tuple(RestoredSequence(**sequence) for sequence in found["sequences"]),
            )
            for found in self._act("restore", version=version, strict=strict)
        ]

    def stats(self) -> dict[str, int]:
        """Sequences per state, segments, batches, steps; of this server syncs, commits and calls waiting."""
        counts: dict[str, int] = self._act("stats")
        return counts

    def give_up(self) -> None:
        """Wait for the server no more: calls that it does not answer, also those under way, fail at once."""
        self._has_given_up.set()

    def ping(self, timeout_s: float) -> bool:
        """Whether the server takes calls and commits them. One try, however it ends."""
        options = fl.FlightCallOptions(timeout=timeout_s)
        connection = None
        try:
            connection = self._connected(options)
            list(connection.do_action(fl.Action("ping", self._command()), options))
            if self._calls.is_proven():
                return True
        except (*_LOST, PermissionError):
            pass
        self._forget(connection)
        return False

    def close(self) -> None:
        """Drop the connection; a later call makes a new one."""
        with self._lock:
            self._connection = None

    def _put(self, kind: str, rows: Sequence[PromptRow | SegmentRow | VerdictRow], schema: pa.Schema) -> None:
        if not rows:
            return
        batch = to_batch(rows, schema)
        descriptor = fl.FlightDescriptor.for_command(self._command(kind=kind))

        def call(connection: fl.FlightClient, options: fl.FlightCallOptions) -> None:
            writer, acknowledgements = connection.do_put(descriptor, schema, options)
            with writer:  # leaving it raises what the server told
                writer.write_batch(batch)
                writer.done_writing()
                is_durable = acknowledgements.read() is not None
            if not is_durable:
                raise _NotDurable("no acknowledgement")

        self._until_answered(f"put of {len(rows)} {kind}", call)

    def _get(self, **call: Any) -> list[SequenceRow]:
        ticket = fl.Ticket(self._command(**call))
        table = self._until_answered(
            call["call"], lambda connection, options: connection.do_get(ticket, options).read_all()
        )
        return to_sequences(table)

    def _act(self, name: str, **call: Any) -> Any:
        action = fl.Action(name, self._command(**call))
        results = self._until_answered(name, lambda connection, options: list(connection.do_action(action, options)))
        return json.loads(results[0].body.to_pybytes())

    def _command(self, **call: Any) -> bytes:
        return json.dumps({"attempt": self._attempt, **call}).encode()

    def _until_answered(self, what: str, call: Call[T]) -> T:
        """Try until the server answers, with a result or an error, or the deadline passes."""
        started = time.monotonic()
        try:
            return self._try(what, call, started + self._deadline_s)
        finally:
            self.waited_s += time.monotonic() - started

    def _try(self, what: str, call: Call[T], deadline: float) -> T:
        pause_s = FIRST_PAUSE_S
        while True:
            connection = None
            try:
                options = fl.FlightCallOptions(timeout=max(deadline - time.monotonic(), 1e-3))
                connection = self._connected(options)
                answer = call(connection, options)
                if not self._calls.is_proven():
                    raise _NotProven("the answer is not from one who knows the secret of this run")
                return answer
            except _LOST as error:
                if isinstance(error, fl.FlightServerError) and self._calls.is_proven():
                    told = heard(error)
                    if told is not None:
                        raise told from None
                self._forget(connection)
                if time.monotonic() + pause_s > deadline or self._has_given_up.is_set():
                    raise QueueUnavailable(
                        f"the queue server at {self.endpoint} did not answer `{what}` within {self._deadline_s:g} s:"
                        f" {type(error).__name__}: {error}"
                    ) from error
            self._has_given_up.wait(pause_s)
            pause_s = min(2 * pause_s, LAST_PAUSE_S)

    def _connected(self, options: fl.FlightCallOptions) -> fl.FlightClient:
        with self._lock:
            if self._connection is None:
                connection = fl.connect(self.endpoint, middleware=[self._calls], generic_options=_RECONNECT)
                try:
                    connection.authenticate(ClientHandshake(self._secret), options)
                except fl.FlightUnauthenticatedError:
                    raise PermissionError(f"the queue server at {self.endpoint} refused our secret") from None
                self._connection = connection
            return self._connection

    def _forget(self, connection: fl.FlightClient | None) -> None:
        """Threads still in a call keep the broken connection until it fails for them too."""
        with self._lock:
            if self._connection is connection:
                self._connection = None
