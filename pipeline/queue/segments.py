"""The payload on disk: Arrow IPC batches appended to segment files.

A server writes one file of its own and only ever appends to it. A batch is addressed by its block (file, offset,
length, CRC-32), which lives in the index: bytes that no committed block names (a torn tail, a refused put) do not
exist for readers, and a block whose bytes are missing or changed is an error that names file and offset.
"""

import os
import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from pipeline.core.errors import QueueDamaged
from pipeline.kill_points import kill_point

CACHE_BYTES = 64 << 20  # parsed blocks kept in memory: several steps of short sequences, one of long ones


@dataclass(frozen=True, slots=True)
class Block:
    """Where one batch lies; `crc` is the CRC-32 of its `length` bytes at `offset` of `file` (a name, not a path)."""

    file: str
    offset: int
    length: int
    crc: int


class SegmentFiles:
    """All segment files of a run. One thread appends and syncs; any thread reads."""

    def __init__(self, folder: Path, name: str) -> None:
        """Open (or go on behind the end of) the file `name` for writing; its entry in `folder` is made durable."""
        self._folder = folder
        self._name = name
        self._fd = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._end = os.fstat(self._fd).st_size
        self._is_dirty = False
        self._readers: dict[str, int] = {}
        self._cache: OrderedDict[Block, pa.RecordBatch] = OrderedDict()
        self._cached_bytes = 0
        self._lock = threading.Lock()  # of the readers' two tables
        self.num_syncs = 0
        directory = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        os.fsync(directory)
        os.close(directory)

    def append(self, batch: pa.RecordBatch) -> Block:
        """Write the batch behind the end; durable only after `sync`. After an OSError the next append overwrites."""
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as stream:
            stream.write_batch(batch)
        data = memoryview(sink.getvalue())
        block = Block(self._name, self._end, len(data), zlib.crc32(data))
        self._is_dirty = True
        kill_point("queue.before_write")
        written = 0
        while written < len(data):
            written += os.pwrite(self._fd, data[written:], self._end + written)
        kill_point("queue.after_write")
        self._end += len(data)
        return block

    def sync(self) -> None:
        """Make everything appended so far durable."""
        if self._is_dirty:
            os.fdatasync(self._fd)
            kill_point("queue.after_sync")
            self._is_dirty = False
            self.num_syncs += 1

    def read(self, block: Block) -> pa.RecordBatch:
        """The batch at `block`. Raises QueueDamaged if it is incomplete or altered."""
        with self._lock:
            if block in self._cache:
                self._cache.move_to_end(block)
                return self._cache[block]
            fd = self._reader(block.file)
        data = os.pread(fd, block.length, block.offset)
        where = f"{self._folder / block.file}: the batch at offset {block.offset}"
        if len(data) < block.length:
            raise QueueDamaged(f"{where} is incomplete: {len(data)} of {block.length} bytes are there")
        if (crc := zlib.crc32(data)) != block.crc:
            raise QueueDamaged(f"{where} has changed: its CRC-32 is {crc:08x}, written was {block.crc:08x}")
        with pa.ipc.open_stream(data) as stream:
            batch = stream.read_next_batch()
        self._remember(block, batch)
        return batch

    def _reader(self, file: str) -> int:
        if file not in self._readers:
            try:
                self._readers[file] = os.open(self._folder / file, os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise QueueDamaged(f"{self._folder / file}: the segment file is missing") from None
        return self._readers[file]

    def _remember(self, block: Block, batch: pa.RecordBatch) -> None:
        with self._lock:
            if block not in self._cache:
                self._cache[block] = batch
                self._cached_bytes += block.length
            while self._cached_bytes > CACHE_BYTES:
                oldest, _ = self._cache.popitem(last=False)
                self._cached_bytes -= oldest.length
