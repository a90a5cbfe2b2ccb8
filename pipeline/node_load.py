"""What the nodes of a local run take of the machine: one look at /proc for all of them.

They run on the controller's own host, so it can look for them; each is its agent and what that started.
"""

import os
import time
from collections.abc import Iterator
from typing import NamedTuple

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_AGENT = "slurm.agent"


class _Process(NamedTuple):
    """`started` tells one process from the next of the same pid. `ticks`: CPU time, of ended children too."""

    parent: int
    started: int
    ticks: int


class NodeLoad:
    """CPU and memory by node, as metrics `system/<node>/...`:

    cpu_cores            CPU seconds per second of the node's processes, since the sample before
    memory_gib           their own memory; shared weights are not in it
    host_cpu_percent     of the whole machine, since the sample before
    host_memory_percent
    """

    def __init__(self, controller: int) -> None:
        self._controller = controller
        self._time, self._host = time.monotonic(), _host_ticks()
        self._before = dict(_processes())

    def sample(self) -> dict[str, float]:
        """Takes milliseconds: some hundred small reads."""
        now, host, processes = time.monotonic(), _host_ticks(), dict(_processes())
        seconds = max(now - self._time, 1e-3)
        busy, total = (mine - its for mine, its in zip(host, self._host, strict=True))
        shared = {"host_cpu_percent": 100.0 * busy / max(total, 1), "host_memory_percent": _host_memory_percent()}
        row: dict[str, float] = {}
        for node, agent in self._agents(processes):
            tree = _tree(agent, processes)
            ticks = sum(processes[pid].ticks - self._ticks_before(pid, processes[pid]) for pid in tree)
            of_node = {
                "cpu_cores": max(ticks, 0) / _TICKS_PER_S / seconds,
                "memory_gib": sum(map(_private_bytes, tree)) / 2**30,
            }
            row |= {f"system/{node}/{name}": value for name, value in (of_node | shared).items()}
        self._time, self._host, self._before = now, host, processes
        return row

    def _ticks_before(self, pid: int, process: _Process) -> int:
        before = self._before.get(pid)
        return before.ticks if before is not None and before.started == process.started else 0

    def _agents(self, processes: dict[int, _Process]) -> Iterator[tuple[str, int]]:
        for pid, process in processes.items():
            if process.parent != self._controller:
                continue
            arguments = _read(f"/proc/{pid}/cmdline").split("\0")
            if _AGENT in arguments and "--node" in arguments:
                yield arguments[arguments.index("--node") + 1], pid


def _tree(root: int, processes: dict[int, _Process]) -> list[int]:
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found = [root]
    for pid in found:
        found += children.get(pid, ())
    return found


def _processes() -> Iterator[tuple[int, _Process]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (text := _read(f"/proc/{entry}/stat")):
            fields = text.rpartition(")")[2].split()
            yield int(entry), _Process(int(fields[1]), int(fields[19]), sum(map(int, fields[11:15])))


def _private_bytes(pid: int) -> int:
    fields = _read(f"/proc/{pid}/statm").split()
    return (int(fields[1]) - int(fields[2])) * _PAGE_BYTES if fields else 0


def _host_ticks() -> tuple[int, int]:
    """(busy, all) of all CPUs. Idle are the 4th and 5th; what guests take is in the first two already."""
    ticks = [int(field) for field in _read("/proc/stat").partition("\n")[0].split()[1:9]]
    return sum(ticks) - sum(ticks[3:5]), sum(ticks)


def _host_memory_percent() -> float:
    lines = (line.split() for line in _read("/proc/meminfo").splitlines())
    kib = {fields[0]: int(fields[1]) for fields in lines}
    return 100.0 * (1.0 - kib["MemAvailable:"] / kib["MemTotal:"])


def _read(path: str) -> str:
    """Empty for a process that has ended meanwhile."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""
