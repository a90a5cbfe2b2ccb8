"""What memory a process holds, as the kernel and the driver say: of the host, and of GPUs."""

import contextlib
import importlib
import os
from functools import cache
from pathlib import Path
from typing import Any

_DRIVERS = ("nvidiactl", "kfd", "dxg")
"""Files in /dev by which processes reach GPUs: of NVIDIA, of AMD, of either under Windows."""


def has_gpus(dev: Path = Path("/dev")) -> bool:
    """Whether this machine has any. A scheduler may give out devices where there are none (Slurm's are just files)."""
    return any((dev / name).exists() for name in _DRIVERS)


def private_bytes(pid: int | str = "self") -> int:
    """Private_Dirty of a process: what its end would free. Milliseconds per GB. Raises OSError if it is dead."""
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        for line in file:
            if line.startswith("Private_Dirty:"):
                return int(line.split()[1]) << 10
    raise ProcessLookupError(f"process {pid} has no memory any more")


def family(pid: int) -> list[int]:
    """The process, and all that descend from it: the ranks of an engine are children of its worker. Raises OSError if
    it is dead."""
    found = [pid]
    for parent in found:
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except OSError:
            if parent == pid:
                raise
            continue
        for thread in threads:
            with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{thread}/children", encoding="ascii") as file:
                found += map(int, file.read().split())
    return found


def held_bytes(pid: int) -> int:
    """private_bytes of the process and its family."""
    held = private_bytes(pid)
    for child in family(pid)[1:]:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            held += private_bytes(child)
    return held


def device_bytes(pid: int) -> int | None:
    """What a process and its family hold of this machine's NVIDIA GPUs, contexts with it; None where nobody can say."""
    nvml = _nvml()
    if nvml is None:
        return None
    held, pids = 0, family(pid)
    try:
        for index in range(nvml.nvmlDeviceGetCount()):
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
                if process.pid in pids:
                    if process.usedGpuMemory is None:  # some drivers do not tell
                        return None
                    held += process.usedGpuMemory
    except nvml.NVMLError:
        return None
    return held


@cache
def _nvml() -> Any:
    """pynvml, if it and a driver are there. It is no dependency of this package."""
    with contextlib.suppress(Exception):
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return nvml
    return None
