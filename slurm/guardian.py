"""What outlives the processes of a node, to remove what they leave: its shared memory and its temporary files.

A guardian is a small shell in a session of its own, which ignores signals and reads from a pipe. Only the node's own
processes hold the other end, so end of file comes when the last of them is dead, whatever killed them. Where even the
guardian was killed, the next run's janitors do its work.
"""

import fcntl
import os
import re
import secrets
import shutil
import subprocess
from pathlib import Path

from pipeline.gps.files import SHM

_SCRIPT = 'trap "" HUP INT QUIT TERM USR1 USR2; while read -r _; do :; done; rm -rf -- "$1" "$2"*'


class Guardian:
    """`life`: the end of the pipe, for the node's processes to inherit."""

    def __init__(self, memory: str, folder: Path, witness: int | None = None) -> None:
        """To remove are `folder` and what is in shared memory under names that begin with `memory`.

        `witness` is a descriptor that the guardian holds until all is removed.
        """
        read, self.life = os.pipe()
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, "pivot-guardian", str(folder), f"{SHM}/{memory}"],
            stdin=read,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.defpath},
            start_new_session=True,
            pass_fds=[] if witness is None else [witness],
        )
        os.close(read)

    def let_go(self) -> None:
        """This process, though it lives on, has nothing to remove any more."""
        os.close(self.life)


class TemporaryFolder:
    """A folder for temporary files of this process's children. It is locked for as long as this process lives: that
    is how the janitor tells it from what a killed run left."""

    def __init__(self, root: Path, prefix: str) -> None:
        while True:
            self.path = root / f"{prefix}{secrets.token_hex(4)}"
            self.path.mkdir(mode=0o700)
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            if self.path.exists():  # else a janitor came in between
                return
            os.close(self._fd)


def remove_memory(prefix: str) -> None:
    """What lies in shared memory under names that begin so, and no process will miss."""
    for name in os.listdir(SHM):
        if name.startswith(prefix):
            Path(SHM, name).unlink(missing_ok=True)


def sweep(root: Path, prefix: str) -> list[str]:
    """Remove this user's temporary folders in `root` of this prefix whose owner is dead. Returns their names."""
    removed = []
    for name in sorted(os.listdir(root)):
        path = root / name
        if not re.fullmatch(re.escape(prefix) + r".*-[0-9a-f]{8}", name):
            continue
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # gone, or no folder
        try:
            if os.fstat(fd).st_uid != os.getuid():
                continue
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(name)
        except BlockingIOError:
            pass  # its owner lives
        finally:
            os.close(fd)
    return removed
