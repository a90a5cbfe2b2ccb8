"""Loading a pickle runs what is in it, so only a file that is surely this user's own is loaded."""

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
