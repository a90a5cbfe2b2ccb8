"""Rows ⇄ Arrow batches.

Columns are built from numpy buffers, not with `pa.array`, `pa.scalar` or `to_numpy`: the first call of any of these
imports pandas where it is installed, which costs each process 0.5 s and 40 MB.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.queue.schema import SEQUENCES, PromptRow, SegmentRow, SequenceRow, VerdictRow

_DTYPES: dict[str, Any] = {"int32": np.int32, "int64": np.int64, "float": np.float32}


def numbers(values: "np.ndarray[Any, Any]", kind: pa.DataType, valid: Sequence[bool] | None = None) -> pa.Array:
    """An Arrow array over the memory of `values`, which must have the dtype of `kind`; null where not `valid`."""
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.Array.from_buffers(kind, len(values), [bits, pa.py_buffer(values)])


def offsets_of(lengths: Sequence[int]) -> pa.Array:
    """[0, l0, l0 + l1, ...] as int32: where each of the lists of these lengths begins."""
    return numbers(np.cumsum([0, *lengths], dtype=np.int32), pa.int32())


def column(field: pa.Field, values: Sequence[Any]) -> pa.Array:
    """One column: strings, numbers or lists of numbers; None only where the field is nullable."""
    kind = field.type
    if pa.types.is_list(kind):
        lengths = [len(value) for value in values]
        flat = np.fromiter(chain.from_iterable(values), _DTYPES[str(kind.value_type)], sum(lengths))
        return pa.ListArray.from_arrays(offsets_of(lengths), numbers(flat, kind.value_type), type=kind)
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
    names = SEQUENCES.names
    columns = [table.column(name).to_pylist() for name in names]
    return [SequenceRow(**dict(zip(names, values, strict=True))) for values in zip(*columns, strict=True)]
