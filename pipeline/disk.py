"""When the disk is full: how it is recognised, and the room that is kept so that a run can still say so."""

import contextlib
import errno
import os
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)
EXIT_FULL = errno.ENOSPC
"""Exit code of a process that ends because the disk is full."""
RESERVE_BYTES = 4 << 20  # status, summary, marker and last log lines take some kB, MLflow's database up to a MB
_PROBE_BYTES = 64 << 10
_SQLITE_FULL, _SQLITE_SAYS = 13, "database or disk is full"


def is_full_error(error: BaseException | None) -> bool:
    """Whether this, or what it followed from, was raised because a disk, or a quota on it, is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in FULL:
            return True
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == _SQLITE_FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def is_full(folder: Path) -> bool:
    """Whether nothing can be written to the folder's disk any more."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        with open(probe, "wb", buffering=0) as file:
            file.write(b"\0" * _PROBE_BYTES)
            os.fsync(file.fileno())
    except OSError as error:
        return is_full_error(error)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return False


def explain_full(folder: Path, reason: str, elsewhere: str = "") -> str | None:
    """`reason` as the first cause of a run in `folder`, if it is a full disk that is behind it; else None.

    A disk need not be full any more: what did not fit was removed. `elsewhere`: where else the run writes.
    """
    is_here = is_full(folder)
    if not is_here and not any(said in reason for said in (*map(os.strerror, FULL), _SQLITE_SAYS)):
        return None
    is_named = is_here or not elsewhere or str(folder) in reason
    where = str(folder) if is_named else f"{folder} or {elsewhere}"
    return f"no space left on {where}: {reason.strip()}\nfree space, then resume"


class Reserve:
    """Some MiB of a run's disk, taken when an attempt begins: with them the end of the run can be written."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def take(self) -> None:
        """Raises OSError if there is not so much."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.posix_fallocate(fd, 0, RESERVE_BYTES)
        except OSError as error:
            self.give_back()
            raise OSError(error.errno, os.strerror(error.errno or 0), str(self._path)) from error
        finally:
            os.close(fd)

    def give_back(self) -> None:
        """Idempotent."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
