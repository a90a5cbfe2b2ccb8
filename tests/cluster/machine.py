"""One virtual machine of the test cluster: a tree of processes that can be listed, stopped and killed as a whole."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster import host
from tests.cluster.host import descendants

_ANSWER_S = 20


class Machine:
    """What is started here, and whatever that starts, lives at most as long as this object's process.

    `own_memory`: with a /dev/shm of its own, which takes the right to mount (`can_own_memory`).
    """

    def __init__(self, environment: Mapping[str, str], own_memory: bool = False) -> None:
        self._host = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(host.__file__)), *(["own-memory"] if own_memory else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            cwd="/",
            start_new_session=True,  # Ctrl-C is the starter's
        )

    def start(self, argv: Sequence[str], log: Path) -> int:
        """The pid of the program, whose output is appended to `log`."""
        assert self._host.stdin and self._host.stdout
        order = {"start": list(argv), "log": str(log)}
        self._host.stdin.write(json.dumps(order).encode() + b"\n")
        self._host.stdin.flush()
        if not select.select([self._host.stdout], [], [], _ANSWER_S)[0]:
            raise TimeoutError(f"{argv[0]} was not started within {_ANSWER_S} s")
        answer = self._host.stdout.readline()
        if not answer:
            raise RuntimeError(f"the virtual machine is dead: {argv[0]} was not started")
        return int(answer)

    @property
    def memory(self) -> Path:
        """Its /dev/shm, as other processes reach it."""
        return Path("/proc", str(self._host.pid), "root", "dev/shm")

    def processes(self) -> list[int]:
        """All that runs here, parents before their children. Zombies are not alive."""
        return [pid for pid in descendants(self._host.pid) if is_alive(pid)]

    def crash(self) -> int:
        """As in a power cut: stop all, so that nobody can react to the others' death, then kill all. Their number.

        Children are killed before their parents: a stopped process group that loses its last parent gets HUP and CONT
        from the kernel, and would go on for a moment.
        """
        stopped: list[int] = []
        while new := [pid for pid in self.processes() if pid not in stopped]:
            signal_all(new, signal.SIGSTOP)
            stopped += new
        living = self.processes()
        signal_all(living[::-1], signal.SIGKILL)
        self._wait_until_empty()
        return len(living)

    def kill_one_by_one(self, pause_s: float) -> int:
        """As in a bad shutdown: parents first, each with `pause_s` in which the others react. Their number."""
        killed: set[int] = set()
        while left := [pid for pid in self.processes() if pid not in killed]:
            signal_all(left[:1], signal.SIGKILL)
            killed.add(left[0])
            time.sleep(pause_s)
        self._wait_until_empty()
        return len(killed)

    def close(self) -> None:
        """End the machine and all that runs on it. Idempotent."""
        assert self._host.stdin and self._host.stdout
        self._host.stdin.close()
        try:
            self._host.wait(_ANSWER_S)
        finally:
            self._host.stdout.close()

    def _wait_until_empty(self) -> None:
        deadline = time.monotonic() + _ANSWER_S
        while left := self.processes():
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {left} outlived SIGKILL by {_ANSWER_S} s")
            time.sleep(0.01)


def can_own_memory() -> bool:
    """Whether this process may give a machine a /dev/shm of its own."""
    script = f"import runpy; runpy.run_path({host.__file__!r})['own_memory']()"
    return subprocess.run([sys.executable, "-I", "-S", "-c", script], capture_output=True).returncode == 0


def signal_all(pids: Sequence[int] | set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def is_alive(pid: int) -> bool:
    """A zombie is not, though kill(pid, 0) says so."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except OSError:
        return False
