"""Rows of jsonl and parquet files, local or behind any fsspec URL, each with its place for messages.

A plain jsonl file needs neither pyarrow nor fsspec, so reading one at submit costs no heavy import.
"""

import hashlib
import io
import json
from collections.abc import Iterator
from typing import Any, BinaryIO

from pipeline.core.errors import DataError

_BOM = b"\xef\xbb\xbf"
_PARQUET_BATCH_ROWS = 1024
_REMOTE_BYTES = 1 << 20


class NoSuchFile(DataError):
    """There is no file of this name, in a place that can be looked at."""


def read_rows(file: str) -> Iterator[tuple[str, Any]]:
    """Yield (place, value) of each row: `data.jsonl, line 3` or `data.parquet, row 3`, counted from 1.

    Raises DataError for a file that is missing, unreadable, of another kind, broken or without a row.
    """
    kinds = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    read = next((read for ending, read in kinds.items() if file.lower().endswith(ending)), None)
    if read is None:
        raise DataError(f"{file}: unknown kind of file; valid endings: {', '.join(kinds)}")
    is_empty = True
    with _open(file) as source:
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
    with _open(file) as source:
        try:
            return hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]
        except OSError as error:
            raise DataError(f"{file}: cannot be read: {error}") from None


def _open(file: str) -> BinaryIO:
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
    decoder = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
    for number, line in enumerate(source, start=1):
        place = f"{file}, line {number}"
        content = line.removeprefix(_BOM) if number == 1 else line
        if not content.strip():
            continue
        try:
            value = decoder.decode(content.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{place}: not UTF-8 at byte {error.start + 1}; valid: UTF-8 text") from None
        except json.JSONDecodeError as error:
            raise DataError(f"{place}: bad JSON at character {error.colno}: {error.msg}") from None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{place}: bad JSON: {error}") from None
        yield place, value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice in one object")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _read_parquet(file: str, source: BinaryIO) -> Iterator[tuple[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        parquet = pq.ParquetFile(source)
        names = parquet.schema_arrow.names
        for name in names:
            if names.count(name) > 1:
                raise DataError(f"{file}, column {name}: the column is there twice")
        for batch in parquet.iter_batches(batch_size=_PARQUET_BATCH_ROWS):
            for value in batch.to_pylist():
                number += 1
                yield f"{file}, row {number}", value
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: broken parquet after row {number}: {error}") from None
