"""Stored bytes: committed rows only, and a cut or altered batch is an error that names file and offset."""

import os
import re
import sqlite3
import threading
from pathlib import Path

import pytest

from pipeline.core.errors import QueueDamaged
from pipeline.queue.commit import GroupCommit
from pipeline.queue.index import Index
from pipeline.queue.rows import to_batch
from pipeline.queue.schema import SEGMENTS
from pipeline.queue.segments import SegmentFiles
from tests.queue.processes import Server, prompts, segment, wait_for


@pytest.fixture
def three_batches(server: Server) -> tuple[list[str], Path, list[int]]:
    """Three sequences, each segment put alone, then the server killed: ids, file, offsets of the batches."""
    rows = prompts(1, 3)
    ids = [row.id for row in rows]
    queue = server.client()
    queue.admit(rows)
    queue.claim(ids, [1] * 3)
    for no, id in enumerate(ids):
        queue.put_segments([segment(id, [no] * 50)])
    server.kill()
    with sqlite3.connect(server.run.queue / "index.db") as db:
        blocks = db.execute("SELECT file, offset FROM seg JOIN block ON no = block ORDER BY offset").fetchall()
    db.close()
    return ids, server.run.queue / "segments" / blocks[0][0], [offset for _, offset in blocks]


@pytest.mark.parametrize("num_bytes_left", [0, 100])
def test_a_cut_file_is_named_and_what_precedes_the_cut_is_readable(
    server: Server, three_batches: tuple[list[str], Path, list[int]], num_bytes_left: int
) -> None:
    ids, file, offsets = three_batches
    os.truncate(file, offsets[2] + num_bytes_left)
    server.restart()
    queue = server.client()
    assert [row.tokens for row in queue.get(ids[:2])] == [[0] * 50, [1] * 50]
    place = rf"{re.escape(str(file))}: the batch at offset {offsets[2]} is incomplete: {num_bytes_left} of \d+ bytes"
    for _ in range(2):
        with pytest.raises(QueueDamaged, match=place):
            queue.get(ids)
    assert queue.stats()["generated"] == 3


def test_an_altered_byte_is_named(server: Server, three_batches: tuple[list[str], Path, list[int]]) -> None:
    ids, file, offsets = three_batches
    with open(file, "r+b") as cut:
        cut.seek(offsets[2] - 100)
        byte = cut.read(1)
        cut.seek(offsets[2] - 100)
        cut.write(bytes([byte[0] ^ 1]))
    server.restart()
    queue = server.client()
    assert [row.tokens[0] for row in queue.get([ids[0], ids[2]])] == [0, 2]
    with pytest.raises(QueueDamaged, match=f"the batch at offset {offsets[1]} has changed: its CRC-32"):
        queue.get(ids)
    file.unlink()
    server.kill()
    server.restart()
    with pytest.raises(QueueDamaged, match=f"{re.escape(str(file))}: the segment file is missing"):
        server.client().get(ids[:1])


def test_bytes_that_no_commit_names_do_not_exist(tmp_path: Path) -> None:
    batch = to_batch([segment("a", [1, 2, 3])], SEGMENTS)
    files = SegmentFiles(tmp_path, "x.arrows")
    first = files.append(batch)
    with open(tmp_path / "x.arrows", "ab") as tail:
        tail.write(b"half a batch")
    again = SegmentFiles(tmp_path, "x.arrows")  # as after a crash, under the same name
    second = again.append(batch)
    assert second.offset == first.length + len(b"half a batch")
    assert again.read(first).equals(batch)
    assert again.read(second).equals(batch)


def test_the_cache_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = SegmentFiles(tmp_path, "x.arrows")
    batches = [to_batch([segment("a", [no] * 1000)], SEGMENTS) for no in range(5)]
    blocks = [files.append(batch) for batch in batches]
    monkeypatch.setattr("pipeline.queue.segments.CACHE_BYTES", 2 * blocks[0].length)
    for _ in range(2):
        assert all(files.read(block).equals(batch) for block, batch in zip(blocks, batches, strict=True))
    os.truncate(tmp_path / "x.arrows", 0)
    assert files.read(blocks[4]).equals(batches[4])
    for block in blocks[:3]:
        with pytest.raises(QueueDamaged):
            files.read(block)


def test_a_refused_call_does_not_harm_its_group(tmp_path: Path) -> None:
    """Both calls wait while the first holds the thread, so they are one group."""
    index = Index(tmp_path / "index.db", attempt=1)
    commit = GroupCommit(index, SegmentFiles(tmp_path, "x.arrows"))
    held, go = threading.Event(), threading.Event()
    outcomes: dict[str, object] = {}

    def hold() -> None:
        held.set()
        assert go.wait(10)

    def write(step: int, fault: bool) -> int:
        index.write("INSERT INTO step VALUES (?, '{}')", step)
        if fault:
            raise ValueError(f"step {step} refused")
        return step

    def call(name: str, step: int, fault: bool) -> None:
        try:
            outcomes[name] = commit.call(lambda: write(step, fault))
        except ValueError as error:
            outcomes[name] = str(error)

    first = threading.Thread(target=commit.call, args=(hold,))
    first.start()
    assert held.wait(10)
    others = [threading.Thread(target=call, args=args) for args in (("good", 1, False), ("bad", 2, True))]
    for thread in others:
        thread.start()
    wait_for(lambda: commit.num_waiting == 2, "both calls")
    go.set()
    for thread in (first, *others):
        thread.join(10)
    assert outcomes == {"good": 1, "bad": "step 2 refused"}
    assert commit.call(lambda: index.fetch("SELECT step FROM step")) == [(1,)]
    assert commit.num_commits == 3
