"""Memory of the host that is no process's own: a file in shared memory, written and read, never mapped. Without torch.

    /dev/shm/<name>.0      the bytes
    /dev/shm/<name>.meta   empty; locked for as long as the process that made it lives

By that lock the janitor of the weight stores tells it from what a killed process left; the node's guardian goes by the
beginning of the name. What a dead process of the same name left is removed when the next one makes its own.
"""

import contextlib
import fcntl
import os
import weakref
from pathlib import Path

from pipeline.core.errors import ConfigError, RunError
from pipeline.gps.files import janitor
from pipeline.gps.room import check_room

_FLAGS = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class SharedFile:
    """`path` is /dev/shm/<name>; without one the file has no name and ends with the process.

    It only grows: the same file serves for every sleep. Raises FileExistsError if a living process has the name.
    """

    def __init__(self, path: Path | None) -> None:
        if path is None:
            self._fd = os.memfd_create("pivot-trainer", os.MFD_CLOEXEC)
            weakref.finalize(self, os.close, self._fd)
        else:
            janitor(path.name)
            meta, data = Path(f"{path}.meta"), Path(f"{path}.0")
            lock = _claim(meta)
            try:
                self._fd = os.open(data, _FLAGS, 0o600)
            except OSError:
                _remove([lock], [meta], os.getpid())
                raise
            weakref.finalize(self, _remove, [lock, self._fd], [data, meta], os.getpid())
        self._path = path
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Take the memory now: afterwards no write can fail for want of it. Raises RunError if it is short."""
        more = num_bytes - self.num_bytes
        if more <= 0:
            return
        try:
            check_room({"a trainer that sleeps": more})  # a full cgroup kills without a message
            os.posix_fallocate(self._fd, self.num_bytes, more)
        except (ConfigError, OSError) as error:
            os.ftruncate(self._fd, self.num_bytes)
            raise RunError(f"the trainer cannot sleep: {error}") from error
        self.num_bytes = num_bytes

    def write(self, at: int, data: memoryview) -> None:
        """`data` is one-dimensional, of bytes."""
        while data:
            done = os.pwrite(self._fd, data, at)  # one call writes 2 GiB at most
            at, data = at + done, data[done:]

    def read(self, at: int, data: memoryview) -> None:
        """Fill `data` with what was written at `at`. Raises RunError if the file ends before."""
        while data:
            done = os.preadv(self._fd, [data], at)
            if not done:
                raise RunError(f"{self._path} ends at {at}: {len(data)} bytes of the trainer's state are missing")
            at, data = at + done, data[done:]


def _claim(meta: Path) -> int:
    """Create the file and lock it; again if a janitor came between the two."""
    while True:
        fd = os.open(meta, _FLAGS, 0o600)
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def _remove(descriptors: list[int], paths: list[Path], owner: int) -> None:
    """The data first: what no meta names, no janitor would find. A fork of the owner removes nothing."""
    for path in paths if os.getpid() == owner else ():
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    for fd in descriptors:
        os.close(fd)
