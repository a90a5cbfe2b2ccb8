"""The durable life of a sequence: ADMITTED ▶ GENERATED ▶ SCORED ▶ BATCHED ▶ TRAINED, or DROPPED.

This file takes it as far as SCORED; steps.py does the rest. Every function checks all of its rows, then writes all of
them, and can be repeated: what is there already is answered like the first time and changes nothing.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pyarrow as pa

from pipeline.core.errors import NotOwner
from pipeline.core.events import Finish
from pipeline.queue.index import Index
from pipeline.queue.schema import State
from pipeline.queue.segments import Block, SegmentFiles

_CLAIMABLE = (State.ADMITTED, State.GENERATED, State.SCORED)
_FINAL = (Finish.STOP, Finish.LENGTH)


@dataclass(slots=True)
class _Entry:
    """What the index knows of one sequence; changed as the rows of a put are checked, one after the other."""

    id: str
    state: State
    attempt: int
    turn: int
    num_segments: int

    def require_owner(self, attempt: int, turn: int) -> None:
        if (attempt, turn) != (self.attempt, self.turn):
            raise NotOwner(
                f"{self.id} belongs to attempt {self.attempt} turn {self.turn}; attempt {attempt} turn {turn} wrote"
            )


def require_state(id: str, state: State, *wanted: State) -> None:
    if state not in wanted:
        raise ValueError(f"{id} is {state}, wanted {' or '.join(wanted)}")


def _entries(index: Index, ids: Sequence[str]) -> dict[str, _Entry]:
    """Raises ValueError for ids that were never admitted."""
    rows = index.fetch(
        "SELECT seq.id, state, attempt, turn, (SELECT count(*) FROM seg WHERE seq_id = seq.id)"
        " FROM json_each(?) CROSS JOIN seq ON seq.id = value",
        json.dumps(ids),
    )
    found = {row[0]: _Entry(row[0], State(row[1]), *row[2:]) for row in rows}
    if unknown := [id for id in ids if id not in found]:
        raise ValueError(f"{len(unknown)} unknown sequences: {', '.join(unknown[:5])}")
    return found


def admit(index: Index, files: SegmentFiles, batch: pa.RecordBatch) -> None:
    """Store new sequences as ADMITTED. One that is there must have the same prompt, else ValueError."""
    ids: list[str] = batch.column("id").to_pylist()
    if len(set(ids)) < len(ids):
        raise ValueError("a put of prompts names a sequence twice")
    rows = index.fetch(
        "SELECT seq.id, prompt_row, file, offset, length, crc FROM json_each(?) CROSS JOIN seq ON seq.id = value"
        " JOIN block ON no = prompt_block",
        json.dumps(ids),
    )
    known = {id: files.read(Block(*place)).slice(row, 1) for id, row, *place in rows}
    for row, id in enumerate(ids):
        if id in known and not known[id].equals(batch.slice(row, 1)):
            raise ValueError(f"{id} was admitted before with another prompt")
    new = [row for row, id in enumerate(ids) if id not in known]
    if not new:
        return
    block = index.add_block(files.append(batch))
    keys = [batch.column(name).to_pylist() for name in ("id", "step", "prompt_no", "member")]
    index.write_each(
        "INSERT INTO seq(id, step, prompt_no, member, state, prompt_block, prompt_row) VALUES (?, ?, ?, ?, ?, ?, ?)",
        [(*(key[row] for key in keys), State.ADMITTED, block, row) for row in new],
    )


def claim(index: Index, attempt: int, ids: Sequence[str], turns: Sequence[int], restart: bool) -> None:
    """Make (attempt, turns[i]) the owner of ids[i]. Raises NotOwner if a later turn owns one of them.

    `restart`: segments of earlier turns of sequences that are not GENERATED are forgotten (strict determinism).
    """
    if len(ids) != len(turns):
        raise ValueError(f"claim: {len(ids)} ids, {len(turns)} turns")
    entries = _entries(index, ids)
    for id, turn in zip(ids, turns, strict=True):
        entry = entries[id]
        require_state(id, entry.state, *_CLAIMABLE)
        if (attempt, turn) < (entry.attempt, entry.turn):
            entry.require_owner(attempt, turn)
    owners = [(attempt, turn, id) for id, turn in zip(ids, turns, strict=True)]
    index.write_each("UPDATE seq SET attempt = ?, turn = ? WHERE id = ?", owners)
    if restart:
        index.write_each(
            "DELETE FROM seg WHERE (attempt, turn) < (?, ?) AND seq_id = ?",
            [owner for owner in owners if entries[owner[2]].state == State.ADMITTED],
        )


def put_segments(index: Index, files: SegmentFiles, attempt: int, batch: pa.RecordBatch) -> None:
    """Append segments to the sequences that (attempt, turn) owns; a final one makes its sequence GENERATED.

    Raises NotOwner, or ValueError (unequal lengths of tokens and logprobs, wrong idx, state, finish or version of the
    caches); then nothing
    of the put is stored. A segment that is there already, of the same turn and content length, is no error.
    """
    num_tokens, num_logprobs = (_lengths(batch.column(name)) for name in ("tokens", "logprobs"))
    names = ("id", "idx", "turn", "version", "kv_version", "replica", "finish")
    rows = list(zip(*(batch.column(name).to_pylist() for name in names), strict=True))
    entries = _entries(index, list({row[0] for row in rows}))
    new: list[tuple[Any, ...]] = []
    for at, (id, idx, turn, version, kv_version, replica, finish) in enumerate(rows):
        if kv_version is not None and kv_version > version:
            raise ValueError(f"{id} segment {idx}: of version {version}, from caches of version {kv_version}")
        if num_tokens[at] != num_logprobs[at]:
            raise ValueError(f"{id} segment {idx}: {num_tokens[at]} tokens, {num_logprobs[at]} logprobs")
        entry, segment = entries[id], (attempt, turn, version, kv_version, replica, num_tokens[at], Finish(finish))
        if idx < entry.num_segments and _segment(index, id, idx) == [segment]:
            continue
        entry.require_owner(attempt, turn)
        require_state(f"{id} (segment {idx})", entry.state, State.ADMITTED)
        if idx != entry.num_segments:
            raise ValueError(f"{id}: segment {idx} does not follow, it has {entry.num_segments} segments")
        entry.num_segments += 1
        entry.state = State.GENERATED if finish in _FINAL else State.ADMITTED
        new.append((id, idx, *segment, at))
    if not new:
        return
    block = index.add_block(files.append(batch))
    index.write_each(
        "INSERT INTO seg(seq_id, idx, attempt, turn, version, kv_version, replica, num_tokens, finish, row, block)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        [(*row, block) for row in new],
    )
    index.write_each(
        "UPDATE seq SET state = ? WHERE id = ?",
        [(State.GENERATED, row[0]) for row in new if row[8] in _FINAL],
    )


def put_verdicts(index: Index, files: SegmentFiles, attempt: int, batch: pa.RecordBatch) -> None:
    """Store verdicts on GENERATED sequences that (attempt, turn) owns: SCORED. Errors like `put_segments`."""
    rows = list(zip(*(batch.column(name).to_pylist() for name in ("id", "turn", "score", "failure")), strict=True))
    entries = _entries(index, [row[0] for row in rows])
    new: list[tuple[Any, ...]] = []
    for at, (id, turn, score, failure) in enumerate(rows):
        if (score is None) != bool(failure) or (score is not None and not math.isfinite(score)):
            raise ValueError(f"{id}: a verdict has a finite score or a failure, got {score} and {failure!r}")
        entry = entries[id]
        if entry.state == State.SCORED and _verdict(index, id) == [(attempt, turn, score, failure)]:
            continue
        entry.require_owner(attempt, turn)
        require_state(f"{id} (verdict)", entry.state, State.GENERATED)
        entry.state = State.SCORED
        new.append((score, failure, at, id))
    if not new:
        return
    block = index.add_block(files.append(batch))
    index.write_each(
        "UPDATE seq SET state = ?, verdict_block = ?, score = ?, failure = ?, verdict_row = ? WHERE id = ?",
        [(State.SCORED, block, *row) for row in new],
    )


def _lengths(lists: pa.ListArray) -> list[int]:
    offsets = lists.offsets.to_pylist()
    return [end - start for start, end in pairwise(offsets)]


def _segment(index: Index, id: str, idx: int) -> list[Any]:
    sql = "SELECT attempt, turn, version, kv_version, replica, num_tokens, finish FROM seg WHERE seq_id = ? AND idx = ?"
    return index.fetch(sql, id, idx)


def _verdict(index: Index, id: str) -> list[Any]:
    return index.fetch("SELECT attempt, turn, score, failure FROM seq WHERE id = ?", id)
