"""Whole sequences: what the index knows of them, joined with their prompts, tokens and verdicts from the blocks."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from pipeline.queue.index import Index
from pipeline.queue.rows import column, offsets_of
from pipeline.queue.schema import PROMPTS, SEQUENCES
from pipeline.queue.segments import Block

Read = Callable[[Block], pa.RecordBatch]


class Place(NamedTuple):
    """One row of one block."""

    block: Block
    row: int


class StoredSegment(NamedTuple):
    place: Place
    version: int
    kv_version: int
    num_tokens: int
    finish: str


class StoredSequence(NamedTuple):
    """A sequence as the index holds it, without payload."""

    state: str
    reason: str
    score: float | None
    failure: str
    prompt: Place
    verdict: Place | None
    segments: list[StoredSegment]


def find(index: Index, ids: Sequence[str]) -> list[StoredSequence]:
    """These sequences, in this order. Raises ValueError for an unknown id."""
    wanted = json.dumps(ids)
    rows = index.fetch(
        "SELECT key, state, reason, score, failure, prompt_block, prompt_row, verdict_block, verdict_row"
        " FROM json_each(?) CROSS JOIN seq ON seq.id = value ORDER BY key",
        wanted,
    )
    if len(rows) < len(ids):
        unknown = [ids[at] for at in sorted(set(range(len(ids))) - {row[0] for row in rows})]
        raise ValueError(f"{len(unknown)} unknown sequences: {', '.join(unknown[:5])}")
    segments = index.fetch(
        "SELECT key, block, row, version, coalesce(kv_version, version), num_tokens, finish"
        " FROM json_each(?) CROSS JOIN seg ON seq_id = value ORDER BY key, idx",
        wanted,
    )
    block_numbers = {row[5] for row in rows} | {row[7] for row in rows} - {None} | {row[1] for row in segments}
    blocks = {
        no: Block(*place)
        for no, *place in index.fetch(
            "SELECT no, file, offset, length, crc FROM json_each(?) CROSS JOIN block ON no = value",
            json.dumps(list(block_numbers)),
        )
    }
    found = [
        StoredSequence(
            state=state,
            reason=reason,
            score=score,
            failure=failure,
            prompt=Place(blocks[prompt_block], prompt_row),
            verdict=None if verdict_block is None else Place(blocks[verdict_block], verdict_row),
            segments=[],
        )
        for _, state, reason, score, failure, prompt_block, prompt_row, verdict_block, verdict_row in rows
    ]
    for key, block, row, *known in segments:
        found[key].segments.append(StoredSegment(Place(blocks[block], row), *known))
    return found


def assemble(sequences: Sequence[StoredSequence], read: Read) -> pa.Table:
    """A table of schema SEQUENCES. `read` fetches a block; what it raises for a damaged one goes through."""
    segments = [segment for sequence in sequences for segment in sequence.segments]
    pieces = _gather((segment.place for segment in segments), read)
    prompts = pa.Table.from_batches(_gather((s.prompt for s in sequences), read), PROMPTS).combine_chunks()
    lengths = [sum(segment.num_tokens for segment in s.segments) for s in sequences]
    columns = {name: prompts.column(name) for name in PROMPTS.names}
    for name in ("tokens", "logprobs"):
        kind = SEQUENCES.field(name).type
        flat = [_flat(piece.column(name)) for piece in pieces] or [_flat(column(SEQUENCES.field(name), []))]
        whole = flat[0] if len(flat) == 1 else pa.concat_arrays(flat)
        columns[name] = pa.ListArray.from_arrays(offsets_of(lengths), whole, type=kind)
    critiques = iter(
        text
        for piece in _gather((s.verdict for s in sequences if s.verdict is not None), read)
        for text in piece.column("critique").to_pylist()
    )
    plain: dict[str, list[Any]] = {
        "state": [s.state for s in sequences],
        "reason": [s.reason for s in sequences],
        "segment_versions": [[segment.version for segment in s.segments] for s in sequences],
        "segment_kv_versions": [[segment.kv_version for segment in s.segments] for s in sequences],
        "segment_lengths": [[segment.num_tokens for segment in s.segments] for s in sequences],
        "finish": [s.segments[-1].finish if s.segments else "" for s in sequences],
        "score": [s.score for s in sequences],
        "failure": [s.failure for s in sequences],
        "critique": ["" if s.verdict is None else next(critiques) for s in sequences],
    }
    columns |= {name: column(SEQUENCES.field(name), values) for name, values in plain.items()}
    return pa.Table.from_arrays([columns[name] for name in SEQUENCES.names], schema=SEQUENCES)


def _flat(lists: pa.ListArray) -> pa.Array:
    """The numbers in all of these lists (`flatten()` would import pyarrow.compute, 50 ms)."""
    start, end = lists.offsets[0].as_py(), lists.offsets[-1].as_py()
    return lists.values.slice(start, end - start)


def _gather(places: Iterable[Place], read: Read) -> list[pa.RecordBatch]:
    """The rows at `places`, in order; neighbours in one block come as one slice."""
    return [read(block).slice(start, length) for block, start, length in _runs(places)]


def _runs(places: Iterable[Place]) -> Iterator[tuple[Block, int, int]]:
    """Block, first row and length of each run of neighbours."""
    held: Block | None = None
    start = end = 0
    for block, row in places:
        if block is held and row == end:
            end += 1
            continue
        if held is not None:
            yield held, start, end - start
        held, start, end = block, row, row + 1
    if held is not None:
        yield held, start, end - start
