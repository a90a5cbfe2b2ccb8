"""A mount namespace of a test's own, with small file systems in it: what fills them harms nobody else."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.begun import begin_command
from tests.cli.conftest import COMMAND, environment


@dataclass(frozen=True)
class Disk:
    """A small file system, mounted at `path` where only `begin` sees it. `outside` is the same folder, seen by all."""

    path: Path
    pid: int

    @property
    def outside(self) -> Path:
        return Path(f"/proc/{self.pid}/root{self.path}")

    def begin(self, folder: Path, *arguments: str) -> "subprocess.Popen[str]":
        inside = ["nsenter", "-t", str(self.pid), "-m", f"--wd={folder}", "--"]
        return begin_command([*inside, *COMMAND, *arguments], environment(), None)

    def fill(self) -> Path:
        """Take all that is free, to the last byte."""
        path, size = self.outside / "fill", 1 << 20
        with open(path, "ab", buffering=0) as file:
            while size:
                try:
                    file.write(b"\0" * size)
                except OSError:
                    size //= 2
        return path


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Disk]:
    """Skips the test where a mount is refused."""
    path.mkdir(exist_ok=True)
    mount = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o "size=$1" tmpfs "$2" && echo mounted && exec sleep 600']
    with subprocess.Popen(
        [*mount, "sh", size, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stderr is not None
        if holder.stdout.readline() != "mounted\n":
            pytest.skip(f"nothing can be mounted here: {holder.stderr.read().strip()}")
        try:
            yield Disk(path, holder.pid)
        finally:
            holder.kill()


def free_bytes(disk: Disk) -> int:
    info = os.statvfs(disk.outside)
    return info.f_bavail * info.f_frsize
