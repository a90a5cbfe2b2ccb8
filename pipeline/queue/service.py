"""The queue's calls over Arrow Flight. Control is JSON, payload is Arrow.

do_put(command {kind, attempt}, one batch)    prompts, segments, verdicts; one "ok" once it is durable
do_get(ticket {call, attempt, ...})           claim, get, batch: whole sequences
do_action(type, body {attempt, ...})          everything that moves no payload; one JSON result
"""

import json
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.flight as fl

from pipeline.core.errors import Fenced
from pipeline.processes import say
from pipeline.queue import payload, sequences, steps
from pipeline.queue.channel import ERRORS, AnswerProofs, ServerHandshake, told
from pipeline.queue.commit import GroupCommit
from pipeline.queue.index import Index
from pipeline.queue.schema import PROMPTS, SEGMENTS, VERDICTS
from pipeline.queue.segments import SegmentFiles

_LOOKING = ("ping", "stats", "step_rows", "batch_parts")
"""Actions that change nothing."""
_KINDS = {"prompts": PROMPTS, "segments": SEGMENTS, "verdicts": VERDICTS}


class QueueService(fl.FlightServerBase):  # type: ignore[misc]
    """Serves one attempt; each call of another attempt is Fenced. Answers from the moment it is made."""

    def __init__(self, location: str, secret: bytes, attempt: int, index: Index, files: SegmentFiles) -> None:
        self._attempt = attempt
        self._index = index
        self._files = files
        self._commit = GroupCommit(index, files)
        self._assembling = threading.Lock()
        self._kept: tuple[int, int, pa.Table] | None = None  # a step's batch, and after how many actions it was made
        self._num_actions = 0
        super().__init__(location, auth_handler=ServerHandshake(secret), middleware={"proof": AnswerProofs(secret)})

    def do_put(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: fl.MetadataRecordBatchReader,
        writer: fl.FlightMetadataWriter,
    ) -> None:
        with _errors_told():
            call = self._checked(descriptor.command)
            batch = _checked_batch(reader.read_chunk().data, _KINDS[call["kind"]])
            self._commit.call(lambda: self._put(call["kind"], batch))
        writer.write(b"ok")

    def _put(self, kind: str, batch: pa.RecordBatch) -> None:
        if kind == "prompts":
            sequences.admit(self._index, self._files, batch)
        elif kind == "segments":
            sequences.put_segments(self._index, self._files, self._attempt, batch)
        else:
            sequences.put_verdicts(self._index, self._files, self._attempt, batch)

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.RecordBatchStream:
        with _errors_told():
            call = self._checked(ticket.ticket)
            if call["call"] == "batch":
                return fl.RecordBatchStream(self._batch(call["step"]))
            # Owners need not survive the machine: the controller dies with it, and the next attempt outranks them.
            found = self._commit.call(lambda: self._find(call), synced=False)
            return fl.RecordBatchStream(payload.assemble(found, self._files.read))

    def _batch(self, step: int) -> pa.Table:
        """All ranks of a training group ask for the same one at the same time: it is put together once for them all,
        and kept until the controller has anything changed."""
        with self._assembling:
            num_actions = self._num_actions
            if self._kept is None or self._kept[:2] != (step, num_actions):
                index = self._index
                found = self._commit.call(lambda: payload.find(index, steps.batch_ids(index, step)), synced=False)
                self._kept = step, num_actions, payload.assemble(found, self._files.read)
            return self._kept[2]

    def _find(self, call: dict[str, Any]) -> list[payload.StoredSequence]:
        if call["call"] == "claim":
            sequences.claim(self._index, self._attempt, call["ids"], call["turns"], call["restart"])
        return payload.find(self._index, call["ids"])

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[fl.Result]:
        with _errors_told():
            call = self._checked(action.body.to_pybytes())
            try:
                result = self._commit.call(lambda: self._act(action.type, call))
            finally:
                if action.type not in _LOOKING:
                    self._num_actions += 1  # after it: what was found meanwhile may be from before
                    self._kept = None
            return [fl.Result(json.dumps(result).encode())]

    def _act(self, name: str, call: dict[str, Any]) -> Any:
        known: dict[str, Callable[[], Any]] = {
            "commit_batch": lambda: steps.commit_batch(
                self._index, call["step"], call["ids"], call["dropped"], call["parts"]
            ),
            "batch_parts": lambda: steps.batch_parts(self._index, call["above"]),
            "commit_trained": lambda: steps.commit_trained(self._index, call["step"]),
            "record_step": lambda: steps.record_step(self._index, call["step"], call["row"]),
            "step_rows": lambda: steps.step_rows(self._index, call["above"]),
            "restore": lambda: steps.restore(self._index, call["version"], call["strict"]),
            "stats": self._stats,
            "ping": lambda: True,
        }
        return known[name]()

    def _stats(self) -> dict[str, int]:
        counts = {
            "syncs": self._files.num_syncs,
            "commits": self._commit.num_commits,
            "waiting": self._commit.num_waiting,
        }
        return steps.count(self._index) | counts

    def _checked(self, command: bytes) -> dict[str, Any]:
        call: dict[str, Any] = json.loads(command)
        if call["attempt"] != self._attempt:
            raise Fenced(f"attempt {call['attempt']} called the queue server of attempt {self._attempt}")
        return call


@contextmanager
def _errors_told() -> Iterator[None]:
    """The border of the process: every error reaches the caller; one that is our fault also reaches the log."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, tuple(ERRORS.values())):
            say(traceback.format_exc())
        raise told(error) from None


def _checked_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Nothing malformed may become durable: schema, offsets, text and nulls are checked."""
    if not batch.schema.equals(schema, check_metadata=True):
        raise ValueError(f"a batch of another schema: {batch.schema.to_string()}")
    batch.validate(full=True)
    for field, column in zip(schema, batch.columns, strict=True):
        if not field.nullable and column.null_count:
            raise ValueError(f"column {field.name} has nulls")
    return batch
