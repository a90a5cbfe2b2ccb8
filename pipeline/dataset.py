"""Training data by row number, without all of them in memory: what is kept of ten million rows is some megabytes.

A jsonl file is walked through once, and where every 64th row begins is kept; of a parquet file its row groups.
A row is parsed when it is asked for.
"""

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any, BinaryIO, NamedTuple, Protocol

from pipeline.config import Data
from pipeline.core.errors import DataError
from pipeline.data import Example, parse
from pipeline.data_files import kind_of, open_file, parquet_rows, text_of, value_of
from pipeline.sampler import Mixture, Sampler

_SPACING = 64
"""A row is found by reading at most so many."""


class Found(NamedTuple):
    """A row's number in its file, its place for messages, and what it holds."""

    number: int
    place: str
    value: Any


class RowFile(Protocol):
    num_rows: int

    def find(self, numbers: Sequence[int]) -> Iterator[Found]:
        """These rows, whose numbers ascend from 0. Raises DataError if the file is another one now."""


class JsonlFile:
    def __init__(self, file: str) -> None:
        self._file = file
        self._offsets, self._lines = array("q"), array("q")
        self.num_rows = 0
        with open_file(file) as source:
            for line_number, offset, _ in _rows(source, 1, 0):
                if self.num_rows % _SPACING == 0:
                    self._offsets.append(offset)
                    self._lines.append(line_number)
                self.num_rows += 1

    def find(self, numbers: Sequence[int]) -> Iterator[Found]:
        with open_file(self._file) as source:
            at = -1
            rows: Iterator[tuple[int, int, bytes]] = iter(())
            for number in numbers:
                if at < 0 or number // _SPACING > at // _SPACING:
                    block = number // _SPACING
                    source.seek(self._offsets[block])
                    rows = _rows(source, self._lines[block], self._offsets[block])
                    at = block * _SPACING - 1
                line_number, line = 0, b""
                while at < number:
                    at, (line_number, _, line) = at + 1, next(rows, (0, 0, b""))
                place = f"{self._file}, line {line_number}"
                if not line:
                    raise DataError(f"{self._file}: row {number + 1} is gone: the file was changed")
                yield Found(number, place, value_of(place, line))


def _rows(source: BinaryIO, line_number: int, offset: int) -> Iterator[tuple[int, int, bytes]]:
    """(line number, offset, text) of each row from here on."""
    for line in source:
        text = text_of(line, line_number)
        if text.strip():
            yield line_number, offset, text
        line_number, offset = line_number + 1, offset + len(line)


class ParquetFile:
    def __init__(self, file: str) -> None:
        self._file = file
        with open_file(file) as source:
            sizes = parquet_rows(file, source).group_sizes
        self._ends = list(accumulate(sizes))
        self.num_rows = self._ends[-1] if sizes else 0

    def find(self, numbers: Sequence[int]) -> Iterator[Found]:
        with open_file(self._file) as source:
            rows = parquet_rows(self._file, source)
            for group, within in _by_group(numbers, self._ends):
                first = self._ends[group - 1] if group else 0
                for number, value in rows.of_group(group, within):
                    yield Found(first + number, f"{self._file}, row {first + number + 1}", value)


def _by_group(numbers: Iterable[int], ends: Sequence[int]) -> Iterator[tuple[int, list[int]]]:
    """(group, numbers within it), of ascending numbers."""
    found: dict[int, list[int]] = {}
    for number in numbers:
        group = bisect_right(ends, number)
        found.setdefault(group, []).append(number - (ends[group - 1] if group else 0))
    yield from found.items()


class Dataset:
    """The rows of all files, numbered through. `sizes`: how many each file has."""

    def __init__(self, files: Sequence[str], prompt_key: str) -> None:
        """Raises DataError for a file that cannot be read."""
        self._prompt_key = prompt_key
        kinds: dict[str, Callable[[str], RowFile]] = {".jsonl": JsonlFile, ".parquet": ParquetFile}
        self._files: list[RowFile] = [kinds[kind_of(file)](file) for file in files]
        self.sizes = tuple(file.num_rows for file in self._files)
        self._ends = list(accumulate(self.sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def examples(self, rows: Sequence[int]) -> list[Example]:
        """In the order asked for. Raises DataError for a row that does not fit the schema."""
        found: dict[int, Example] = {}
        for number, within in _by_group(sorted(set(rows)), self._ends):
            first = self._ends[number - 1] if number else 0
            for row, place, value in self._files[number].find(within):
                found[first + row] = parse(value, first + row, place, self._prompt_key)
        return [found[row] for row in rows]


def sampler_of(data: Data, sizes: Sequence[int], seed: int) -> Sampler | Mixture:
    """Which rows the steps take, of files with so many."""
    if data.weights:
        return Mixture(
            sizes=tuple(sizes),
            weights=tuple(data.weights),
            batch_size=data.train_batch_size,
            shuffle=data.shuffle,
            seed=seed,
        )
    return Sampler(num_rows=sum(sizes), batch_size=data.train_batch_size, shuffle=data.shuffle, seed=seed)
