"""The files of weight stores: their names, the memory that they take, and those whose owner is dead."""

import contextlib
import errno
import fcntl
import os
import re
from collections.abc import Iterable

from pipeline.core.errors import RunError
from pipeline.gps.lock import open_own
from pipeline.gps.ranges import Range
from pipeline.gps.room import META_BYTES

SHM = "/dev/shm"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def janitor(user_prefix: str) -> list[str]:
    """Remove this user's stores whose names start with `user_prefix` and whose owner is dead. Returns their names."""
    removed = []
    for file in sorted(os.listdir(SHM)):
        name, _, kind = file.rpartition(".")
        if kind != "meta" or not name.startswith(user_prefix):
            continue
        try:
            fd = open_own(f"{SHM}/{file}", os.O_RDWR)
        except (OSError, ValueError):  # gone, or what another user has put there: a file, a link, a folder
            continue
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            slots = [f for f in os.listdir(SHM) if re.fullmatch(re.escape(name) + r"\.\d+", f)]
            unlink(name, len(slots))
            removed.append(name)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return removed


def path_of(name: str, part: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name of a weight store: letters, digits, '.', '_' and '-' only")
    return f"{SHM}/{name}.{part}"


def unlink(name: str, num_slots: int) -> None:
    for part in [*map(str, range(num_slots)), "meta"]:  # meta last: what it does not name, no janitor would find
        with contextlib.suppress(OSError):  # gone, or another user's, who may have taken the name
            os.unlink(path_of(name, part))


def claim(path: str) -> int:
    """Create the meta file and lock it as its owner; again if a janitor came between the two."""
    while True:
        fd = create(path, META_BYTES, [(0, META_BYTES)])
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink:
            return fd
        os.close(fd)


def create(path: str, nbytes: int, ranges: Iterable[Range]) -> int:
    """A new file, the memory of `ranges` taken."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.ftruncate(fd, nbytes)
        allocate(fd, path, ranges)
    except BaseException:
        os.close(fd)
        os.unlink(path)
        raise
    return fd


def allocate(fd: int, path: str, ranges: Iterable[Range]) -> None:
    """What is not taken now would mean SIGBUS when memory runs out later."""
    for offset, length in ranges:
        try:
            os.posix_fallocate(fd, offset, length)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            left = os.statvfs(SHM)
            free = left.f_bavail * left.f_frsize
            raise RunError(f"{path} needs {length} bytes, but {SHM} has {free} left") from error
