"""The kernel's locks on files in /dev/shm: a dead process's are free at once."""

import fcntl
import os
import stat
import time

from pipeline.core.errors import WeightsUnavailable

_POLL_S = 0.002


class Lock:
    """`flock` on a file of its own opening. Waits by polling, so that the wait can end and say who is in the way."""

    def __init__(self, path: str, kind: int, timeout_s: float, purpose: str) -> None:
        self.fd = open_own(path, os.O_RDWR)
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(self.fd, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    continue
                holders = _lock_holders(self.fd)
            os.close(self.fd)
            raise WeightsUnavailable(f"{purpose}: {path} was held by {holders} for {timeout_s:g} s")

    def share(self) -> None:
        """Let others hold it, too, who only want to share it."""
        fcntl.flock(self.fd, fcntl.LOCK_SH)

    def release(self) -> None:
        """Explicitly: closing alone would keep the lock while any duplicate of the descriptor lives."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)


def open_own(path: str, flags: int) -> int:
    """Open a file of ours: /dev/shm is open to all users, so neither a link nor another user's file is followed."""
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW)
    info = os.fstat(fd)
    if info.st_uid != os.getuid() or not stat.S_ISREG(info.st_mode):
        os.close(fd)
        raise ValueError(f"{path} is not a file of user {os.getuid()}")
    return fd


def _lock_holders(fd: int) -> str:
    """The processes that hold a lock on this file, by /proc/locks."""
    info = os.fstat(fd)
    inode = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    with open("/proc/locks", encoding="ascii") as file:
        rows = [line.split() for line in file]
    pids = sorted({row[4] for row in rows if "->" not in row and row[5] == inode})
    return f"process {', '.join(pids)}" if pids else "a process that cannot be seen from here"
