"""Loading a pickle runs what is in it, so only what is surely this user's own is loaded: a file that nobody else may
write, what a process is sent by its parent, or what it has just made itself.
"""

import os
import pickle
import stat
from pathlib import Path
from typing import Any


def load_own(path: Path) -> Any:
    """Raises PermissionError unless the file is this user's and nobody else may write it."""
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        if info.st_uid != os.getuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} is of uid {info.st_uid}, mode {stat.filemode(info.st_mode)}: not loaded")
        return pickle.load(file)


def of_parent(data: bytes) -> Any:
    """What came through a pipe that this process was born with; nobody but its parent has the other end."""
    return pickle.loads(data)


def travels(value: object) -> bool:
    """Whether what is sent of it arrives."""
    try:
        pickle.loads(pickle.dumps(value))
    except Exception:  # whatever an object of a library does
        return False
    return True
