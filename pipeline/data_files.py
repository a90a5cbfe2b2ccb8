"""Rows of jsonl and parquet files, local or behind any fsspec URL, each with its place for messages.

A plain jsonl file needs neither pyarrow nor fsspec, so reading one at submit costs no heavy import.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from pipeline.core.errors import DataError

_BOM = b"\xef\xbb\xbf"
_PARQUET_BATCH_ROWS = 1024
_PARQUET_BUFFER_BYTES = 1 << 20
"""Columns are read piece by piece: whole ones of a large file would fill the memory."""
_REMOTE_BYTES = 1 << 20


class NoSuchFile(DataError):
    """There is no file of this name, in a place that can be looked at."""


_ENDINGS = (".jsonl", ".parquet")


def kind_of(file: str) -> str:
    """The ending that says what the file is. Raises DataError for any other."""
    ending = next((ending for ending in _ENDINGS if file.lower().endswith(ending)), None)
    if ending is None:
        raise DataError(f"{file}: unknown kind of file; valid endings: {', '.join(_ENDINGS)}")
    return ending


def read_rows(file: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of each row: `data.jsonl, line 3` or `data.parquet, row 3`, counted from 1. The value of a
    line that is no JSON is the DataError which says so: those behind it can still be read.

    Raises DataError for a file that is missing, unreadable, of another kind, broken or without a row.
    """
    read = _read_parquet if kind_of(file) == ".parquet" else _read_jsonl
    is_empty = True
    with open_file(file) as source:
        try:
            for place, value in read(file, source):
                is_empty = False
                yield place, value
        except OSError as error:  # of its disk, or of the store that it is on
            raise DataError(f"{file}: cannot be read: {error}") from None
    if is_empty:
        raise DataError(f"{file}: the file has no row; valid: at least one")


def read_digest(file: str) -> str:
    """SHA-256 of what the file holds. Raises NoSuchFile, or DataError if it cannot be read."""
    with open_file(file) as source:
        try:
            return hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error}") from None


def open_file(file: str) -> BinaryIO:
    """Raises NoSuchFile, or DataError if it cannot be opened."""
    try:
        return open(file, "rb") if "://" not in file else _open_remote(file)
    except FileNotFoundError:
        raise NoSuchFile(f"{file}: no such file") from None
    except OSError as error:
        raise DataError(f"{file}: cannot be opened: {error}") from None


def _open_remote(file: str) -> BinaryIO:
    """Raises OSError for all that fsspec and the store's client raise, or if there is no answer in time."""
    from pipeline.remote import CALL_S, Files, describe, within

    def opened() -> Any:
        files = Files(file)
        files.forget()
        return files.fs.open(files.root, "rb")

    try:
        return io.BufferedReader(_Remote(within(CALL_S, f"{CALL_S:g} s", opened)), _REMOTE_BYTES)
    except FileNotFoundError:
        raise
    except Exception as error:
        raise OSError(describe(error)) from None


class _Remote(io.RawIOBase):
    """A file of fsspec whose reads end in time, and fail with OSError only."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def readinto(self, buffer: Any) -> int:
        from pipeline.remote import CALL_S, describe, within

        try:
            data = within(CALL_S, f"{CALL_S:g} s", lambda: self._source.read(len(buffer)))
        except Exception as error:
            raise OSError(describe(error)) from None
        buffer[: len(data)] = data
        return len(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        return int(self._source.seek(offset, whence))

    def tell(self) -> int:
        return int(self._source.tell())

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        if not self.closed:
            self._source.close()
        super().close()


def _read_jsonl(file: str, source: BinaryIO) -> Iterator[tuple[str, Any]]:
    """One JSON value per line. A byte order mark, CRLF and blank lines are accepted."""
    for number, line in enumerate(source, start=1):
        place, text = f"{file}, line {number}", text_of(line, number)
        if not text.strip():
            continue
        try:
            yield place, value_of(place, text)
        except DataError as error:
            yield place, error


def text_of(line: bytes, number: int) -> bytes:
    """A line of a jsonl file without the byte order mark that the first one may have."""
    return line.removeprefix(_BOM) if number == 1 else line


def value_of(place: str, text: bytes) -> Any:
    """What a line says. Raises DataError for what is no JSON."""
    try:
        return _DECODER.decode(text.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{place}: not UTF-8 at byte {error.start + 1}; valid: UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: bad JSON at character {error.colno}: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place}: bad JSON: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice in one object")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)


def _read_parquet(file: str, source: BinaryIO) -> Iterator[tuple[str, Any]]:
    rows = parquet_rows(file, source)
    number = 0
    for group, size in enumerate(rows.group_sizes):
        for _, value in rows.of_group(group, range(size)):
            number += 1
            yield f"{file}, row {number}", value


def parquet_rows(file: str, source: BinaryIO) -> "_ParquetRows":
    """Raises DataError for a file that is broken, or has a column twice."""
    return _ParquetRows(file, source)


class _ParquetRows:
    """An open parquet file; what is decoded at a time is a thousand rows. Raises DataError where it is broken."""

    def __init__(self, file: str, source: BinaryIO) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._file = file
        self._faults = (pa.ArrowException, OSError, UnicodeDecodeError)
        try:
            self._parquet = pq.ParquetFile(source, buffer_size=_PARQUET_BUFFER_BYTES)
        except self._faults as error:
            raise self._broken(0, error) from None
        names = self._parquet.schema_arrow.names
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"{file}, column {name}: the column is there twice")
        groups = self._parquet.metadata
        self.group_sizes = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]

    def of_group(self, group: int, numbers: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """(number, value) of these rows of a row group, whose numbers ascend from 0."""
        first, at = 0, 0
        try:
            for batch in self._parquet.iter_batches(batch_size=_PARQUET_BATCH_ROWS, row_groups=[group]):
                end = at
                while end < len(numbers) and numbers[end] < first + len(batch):
                    end += 1
                here = [number - first for number in numbers[at:end]]
                if here:
                    values = batch.slice(here[0], here[-1] - here[0] + 1).to_pylist()
                    for number in here:
                        yield first + number, values[number - here[0]]
                first, at = first + len(batch), end
                if at == len(numbers):
                    return
        except self._faults as error:
            raise self._broken(sum(self.group_sizes[:group]) + first, error) from None

    def _broken(self, number: int, error: Exception) -> DataError:
        return DataError(f"{self._file}: broken parquet after row {number}: {error}")
