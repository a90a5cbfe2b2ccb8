"""Rows ⇄ Arrow batches.

Columns are built from buffers, not with `pa.array`, `pa.scalar` or `to_numpy`: the first call of any of these imports
pandas where it is installed, which costs each process 0.5 s and 40 MB. Tokens and logprobs are most of the work that a
client has with the queue: `struct` packs lists of Python numbers in half of numpy's time.
"""

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from pipeline.queue.schema import SEQUENCES, PromptRow, SegmentRow, SequenceRow, VerdictRow

_DTYPES: dict[str, Any] = {"int32": np.int32, "int64": np.int64, "float": np.float32}
_CODES: dict[str, Literal["i", "q", "f"]] = {"int32": "i", "int64": "q", "float": "f"}  # of `struct`


def numbers(values: "np.ndarray[Any, Any]", kind: pa.DataType, valid: Sequence[bool] | None = None) -> pa.Array:
    """An Arrow array over the memory of `values`, which must have the dtype of `kind`; null where not `valid`."""
    bits = None if valid is None else pa.py_buffer(np.packbits(np.array(valid, np.bool_), bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [bits, pa.py_buffer(values)])


def offsets_of(lengths: Sequence[int]) -> pa.Array:
    """[0, l0, l0 + l1, ...] as int32: where each of the lists of these lengths begins."""
    return numbers(np.array(list(accumulate(lengths, initial=0)), np.int32), pa.int32())


def lists_of(kind: pa.DataType, values: Sequence[Sequence[int] | Sequence[float]]) -> pa.ListArray:
    """An array of lists of numbers. What does not fit is a TypeError; a float out of range becomes inf."""
    code = _CODES[str(kind.value_type)]
    try:
        packed = b"".join([struct.pack(f"{len(value)}{code}", *value) for value in values])
    except struct.error as error:  # it says which type or range is wanted
        raise TypeError(f"not a list of {kind.value_type}: {error}") from None
    lengths = [len(value) for value in values]
    flat = pa.Array.from_buffers(kind.value_type, sum(lengths), [None, pa.py_buffer(packed)])
    return pa.ListArray.from_arrays(offsets_of(lengths), flat, type=kind)


def column(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    """One column: strings, numbers or lists of numbers; None only where the field is nullable."""
    kind = field.type
    if pa.types.is_list(kind):
        return lists_of(kind, values)
    if pa.types.is_string(kind):
        texts = [value.encode() for value in values]
        starts = offsets_of([len(text) for text in texts])
        return pa.Array.from_buffers(kind, len(texts), [None, starts.buffers()[1], pa.py_buffer(b"".join(texts))])
    if field.nullable:
        filled = [0 if value is None else value for value in values]
        return numbers(np.array(filled, _DTYPES[str(kind)]), kind, [value is not None for value in values])
    return numbers(np.fromiter(values, _DTYPES[str(kind)], len(values)), kind)


def to_batch(rows: Sequence[PromptRow | SegmentRow | VerdictRow], schema: pa.Schema) -> pa.RecordBatch:
    """One batch of these rows. A value that does not fit its column is a TypeError or OverflowError."""
    columns = [column(field, [getattr(row, field.name) for row in rows]) for field in schema]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def to_sequences(table: pa.Table) -> list[SequenceRow]:
    """The rows of a table of schema SEQUENCES."""
    columns = {name: _values(table.column(name)) for name in SEQUENCES.names}
    lengths = columns.pop("segment_lengths")
    columns["num_segments"] = [len(of) for of in lengths]
    for name in ("versions", "kv_versions"):
        of_segments = columns.pop(f"segment_{name}")
        columns[name] = [_spread(*pair) for pair in zip(of_segments, lengths, strict=True)]
    return [SequenceRow(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]


def _spread(versions: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """Each segment's version as often as it has tokens."""
    spread: list[int] = []
    for version, length in zip(versions, lengths, strict=True):
        spread += [version] * length
    return spread


def _values(column: pa.ChunkedArray) -> list[Any]:
    """`to_pylist`, which for lists of numbers takes half as long again as a memoryview."""
    if not pa.types.is_list(column.type):
        values: list[Any] = column.to_pylist()
        return values
    code = _CODES[str(column.type.value_type)]
    lists = []
    for chunk in column.chunks:
        flat = chunk.values
        data = memoryview(flat.buffers()[1] or b"").cast(code)[flat.offset :]
        lists += [data[start:end].tolist() for start, end in pairwise(chunk.offsets.to_pylist())]
    return lists
