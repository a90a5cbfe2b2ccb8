"""How a full disk is recognised."""

import errno
import os
import sqlite3
from pathlib import Path

import pytest

from pipeline.disk import RESERVE_BYTES, Reserve, explain_full, is_full, is_full_error
from tests.cli.private import free_bytes, small_disk


def raised(error: BaseException, after: BaseException | None = None) -> BaseException:
    try:
        try:
            if after is not None:
                raise after
        finally:
            raise error
    except BaseException as found:
        return found


def test_a_full_disk_is_known_by_its_errors() -> None:
    for code in (errno.ENOSPC, errno.EDQUOT):
        assert is_full_error(OSError(code, os.strerror(code)))
        assert is_full_error(raised(ValueError("no such savepoint"), after=OSError(code, "")))
    assert not is_full_error(OSError(errno.EIO, "")) and not is_full_error(raised(ValueError("x"), after=KeyError()))


def test_sqlite_says_it_in_its_own_way(tmp_path: Path) -> None:
    db = sqlite3.connect(tmp_path / "db")
    db.execute("PRAGMA max_page_count=4")
    db.execute("CREATE TABLE t(x)")
    with pytest.raises(sqlite3.OperationalError) as caught:
        db.execute("INSERT INTO t VALUES (zeroblob(100000))")
    db.close()
    assert is_full_error(caught.value)
    assert explain_full(tmp_path, str(caught.value)) is not None


def test_a_cause_names_the_disk_though_it_has_room_again(tmp_path: Path) -> None:
    said = "stage checkpoint failed: OSError: [Errno 28] No space left on device"
    assert explain_full(tmp_path, "stage rollout failed: boom") is None
    assert explain_full(tmp_path, said) == f"no space left on {tmp_path}: {said}\nfree space, then resume"
    assert str(explain_full(tmp_path, said, "s3://b")).startswith(f"no space left on {tmp_path} or s3://b: stage")
    assert list(tmp_path.iterdir()) == []


def test_a_reserve_is_room_on_a_disk_that_is_full(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "6m") as disk:
        reserve = Reserve(disk.outside / ".reserve")
        reserve.take()
        filler = disk.fill()
        assert is_full(disk.outside)
        assert explain_full(disk.outside, "killed by SIGBUS") is not None
        reserve.give_back()
        reserve.give_back()
        assert not is_full(disk.outside) and free_bytes(disk) >= RESERVE_BYTES
        disk.fill()
        with pytest.raises(OSError, match=r"No space left on device: '.*/\.reserve'"):
            reserve.take()
        assert os.listdir(disk.outside) == [filler.name]
