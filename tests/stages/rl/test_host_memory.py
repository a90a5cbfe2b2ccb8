"""The file that a trainer sleeps in: whose it is, and that nothing of it outlives a run."""

import os
import secrets
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.errors import RunError
from pipeline.gps.files import janitor
from slurm.guardian import Guardian
from stages.rl.host_memory import SharedFile
from tests.fakes.ranks import started
from tests.fakes.scripted import wait_until

SHM = Path("/dev/shm")


@pytest.fixture
def prefix():
    name = f"pivot-test-{os.getpid()}-{secrets.token_hex(4)}-"
    yield name
    for path in SHM.glob(f"{name}*"):
        path.unlink()


def files(prefix: str) -> set[str]:
    return {path.name.removeprefix(prefix) for path in SHM.glob(f"{prefix}*")}


def test_bytes_come_back_from_where_they_were_put(prefix):
    file = SharedFile(SHM / f"{prefix}train-0")
    file.reserve(3000)
    file.write(1000, memoryview(b"abc" * 300))
    found = bytearray(900)
    file.read(1000, memoryview(found))
    assert bytes(found) == b"abc" * 300
    file.reserve(100)
    assert file.num_bytes == 3000
    with pytest.raises(RunError, match="bytes of the trainer's state are missing"):
        file.read(2500, memoryview(found))


def test_it_is_this_users_alone_and_goes_with_its_owner(prefix):
    file = SharedFile(SHM / f"{prefix}train-0")
    assert files(prefix) == {"train-0.0", "train-0.meta"}
    for path in SHM.glob(f"{prefix}*"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert janitor(prefix) == []  # its owner lives
    with pytest.raises(FileExistsError):
        SharedFile(SHM / f"{prefix}train-0")
    del file
    assert files(prefix) == set()


def test_without_a_path_there_is_no_file(prefix):
    before = set(os.listdir(SHM))
    file = SharedFile(None)
    file.reserve(10)
    file.write(0, memoryview(b"0123456789"))
    found = bytearray(10)
    file.read(0, memoryview(found))
    assert found == b"0123456789" and set(os.listdir(SHM)) <= before


def test_memory_that_is_short_is_refused_before_a_byte_is_written(prefix):
    file = SharedFile(SHM / f"{prefix}train-0")
    file.reserve(4096)
    free = os.statvfs(SHM)
    with pytest.raises(RunError, match=r"cannot sleep: .* of shared memory"):
        file.reserve(free.f_blocks * free.f_frsize + (1 << 20))
    assert file.num_bytes == 4096 == (SHM / f"{prefix}train-0.0").stat().st_size


def hold(path: Path) -> None:
    file = SharedFile(path)
    file.reserve(4096)
    signal.pause()
    del file


def killed(path: Path) -> None:
    """Leaves what a killed worker leaves."""
    process = started(hold, path)
    wait_until(lambda: Path(f"{path}.0").exists() and Path(f"{path}.0").stat().st_size == 4096)
    process.kill()
    process.join()
    assert Path(f"{path}.0").exists()


def test_the_janitor_removes_what_a_killed_process_left(prefix):
    killed(SHM / f"{prefix}train-0")
    assert janitor(prefix) == [f"{prefix}train-0"]
    assert files(prefix) == set()


_CYCLE = """
import sys, torch
from pathlib import Path
from stages.rl.offload import Offload
offload, tensor = Offload(torch.device("cpu"), Path(sys.argv[1])), torch.arange(1000)
offload.take([tensor, torch.ones(9)])
offload.give_back()
"""


@pytest.mark.parametrize("point", ["down.offload", "up.restore"])
def test_who_is_killed_in_a_shift_leaves_nothing_that_stays(prefix, point):
    path = SHM / f"{prefix}train-0"
    command = [sys.executable, "-c", _CYCLE, str(path)]
    for name, code in ((point, -signal.SIGKILL), ("", 0)):
        done = subprocess.run(command, env=os.environ | {"PIVOT_KILL_POINT": name}, check=False)
        assert done.returncode == code
        assert files(prefix) == ({"train-0.0", "train-0.meta"} if name else set())


def test_the_next_life_of_a_worker_takes_the_name_over(prefix):
    killed(SHM / f"{prefix}train-1")
    file = SharedFile(SHM / f"{prefix}train-1")
    assert file.num_bytes == 0 and (SHM / f"{prefix}train-1.0").stat().st_size == 0


def test_the_guardian_removes_it_with_all_that_is_the_nodes(prefix, tmp_path):
    killed(SHM / f"{prefix}train-0")
    guardian = Guardian(prefix, tmp_path / "temporary")
    guardian.let_go()
    guardian._process.wait(10)
    assert files(prefix) == set()
