"""What a process holds, seen from outside."""

import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.memory import device_bytes, has_gpus, private_bytes

MIB = 1 << 20


def test_private_memory_is_what_was_written() -> None:
    before = private_bytes()
    held = mmap.mmap(-1, 64 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    assert private_bytes() < before + 32 * MIB
    for page in range(0, len(held), mmap.PAGESIZE):
        held[page] = 1
    assert 60 * MIB < private_bytes(os.getpid()) - before < 80 * MIB
    held.close()
    assert private_bytes() < before + 32 * MIB


def test_a_dead_process_holds_nothing_that_could_be_said() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # a zombie
        with pytest.raises(ProcessLookupError):
            private_bytes(process.pid)
    with pytest.raises(OSError, match=str(process.pid)):
        private_bytes(process.pid)


def test_of_gpus_nothing_is_said_where_there_are_none() -> None:
    assert device_bytes(os.getpid()) in (None, 0)


def test_a_machine_has_gpus_if_a_driver_is_there(tmp_path: Path) -> None:
    assert not has_gpus(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert has_gpus(tmp_path)
