"""Rows ⇄ Arrow: every number arrives as it was, and what does not fit its column is refused."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from pipeline.queue.client import QueueClient
from pipeline.queue.rows import column, to_batch, to_sequences
from pipeline.queue.schema import SEGMENTS, SEQUENCES
from tests.queue.processes import prompts, segment

BIG = 2**31 - 1


def test_numbers_at_their_limits_arrive_as_they_were(queue: QueueClient, step: int) -> None:
    rows = prompts(step, 4)
    ids = [row.id for row in rows]
    queue.admit([replace(rows[0], prompt_ids=[]), *rows[1:]])
    queue.claim(ids, [1] * 4)
    logprobs = [-math.inf, -0.0, float(np.float32(0.1))]
    parts = [
        [replace(segment(ids[0], [0, BIG, -1], finish="flush", version=2**40), logprobs=logprobs)],
        [segment(id, [no], version=no) for no, id in enumerate(ids[1:3], 1)],  # their block is read in the middle
        [
            segment(ids[0], [7] * 300, finish="flush", idx=1, version=2**40 + 1, kv_version=2**40 - 1),
            segment(ids[3], [3], version=3, kv_version=3),
        ],
        [segment(ids[0], [], idx=2, version=2**40 + 2)],
    ]
    for part in parts:
        queue.put_segments(part)
    found = {row.id: row for row in queue.get([ids[3], ids[0], ids[2], ids[1]])}
    first = found[ids[0]]
    assert (first.prompt_ids, first.tokens) == ([], [0, BIG, -1] + [7] * 300)
    assert repr(first.logprobs[:3]) == repr(logprobs)
    assert first.versions == [2**40] * 3 + [2**40 + 1] * 300 and first.num_segments == 3
    assert first.kv_versions == [2**40] * 3 + [2**40 - 1] * 300
    assert [(found[id].tokens, found[id].versions) for id in ids[1:]] == [([no], [no]) for no in (1, 2, 3)]
    assert all(found[id].kv_versions == found[id].versions for id in ids[1:])
    assert all(type(token) is int for token in first.tokens + first.versions)


def test_numpy_numbers_are_numbers() -> None:
    row = replace(segment("a", [1]), tokens=list(np.arange(3, dtype=np.int64)), logprobs=list(np.ones(3, np.float32)))
    assert to_batch([row], SEGMENTS).column("tokens").to_pylist() == [[0, 1, 2]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tokens": [1.5]}, "not a list of int32: required argument is not an integer"),
        ({"tokens": [None]}, "not an integer"),
        ({"tokens": ["1"]}, "not an integer"),
        ({"tokens": [BIG + 1]}, "number <= 2147483647"),
        ({"logprobs": ["x"]}, "not a list of float: required argument is not a float"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, list[object]], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        to_batch([replace(segment("a", [1]), **change)], SEGMENTS)


def test_no_rows_at_all() -> None:
    """A step whose every member lost its verdict has an empty batch."""
    empty = pa.RecordBatch.from_arrays([column(field, []) for field in SEQUENCES], schema=SEQUENCES)
    assert to_sequences(pa.Table.from_batches([empty])) == []
