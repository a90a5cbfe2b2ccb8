"""What every process of a run does at its start: die with its parent, outlive stray signals, find its own package.

A run is a tree of processes (controller ▶ agents ▶ zygote ▶ workers, controller ▶ queue server). Nothing of it may
outlive its parent, and only the controller reacts to signals: everything below it ends by end of file or SIGKILL.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

SHIELD = ("/bin/sh", "-c", 'trap "" TERM USR1 USR2 INT HUP; exec "$@"', "sh")
"""Put before a command: it and its children ignore what reaches whole process groups and Slurm steps, from their first
instruction on (SIG_IGN survives fork and exec)."""

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)
"""What stops a run in order (USR2: Slurm's warning). Nothing of it but its controller reacts."""

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_prctl: Callable[..., int] = ctypes.CDLL(None, use_errno=True).prctl


def die_with_parent(sig: signal.Signals, expected_parent: int) -> None:
    """Have the kernel send `sig` to this process when its parent ends; leave at once if that already happened.

    The kernel means the parent's *thread* that forked: start such children from a thread that lives as long as the
    process (its main thread).
    """
    if _prctl(_PR_SET_PDEATHSIG, int(sig), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != expected_parent:
        os._exit(3)


def adopt_orphans() -> None:
    """From now on what descends from this process, and whose parent has ended, is its child, and its own to bury."""
    if _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def dying_with(sig: signal.Signals) -> Callable[[], None]:
    """For `subprocess.Popen(preexec_fn=...)`: the child dies by `sig` with this process."""
    parent = os.getpid()
    return lambda: die_with_parent(sig, parent)


def python_command(module: str, *args: str) -> list[str]:
    """Run a module of this package in a fresh interpreter: unbuffered, and with a traceback on a crash in C."""
    return [sys.executable, "-u", "-P", "-X", "faulthandler", "-m", module, *args]


def python_environment(drop: Sequence[str] = (), **extra: str) -> dict[str, str]:
    """This process's environment for a Python child that must find our packages and nobody else's of these names.

    PYTHON* variables are not inherited (a user's PYTHONPATH may hold another `pipeline`), nor is what begins with
    one of `drop`.
    """
    refused = ("PYTHON", *drop)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(refused)}
    root = Path(__file__).resolve().parent.parent
    found = {} if root.name in ("site-packages", "dist-packages") else {"PYTHONPATH": str(root)}
    return {**kept, "PYTHONSAFEPATH": "1", **found, **extra}


def when_ended(process: "subprocess.Popen[bytes]", then: Callable[[int], None]) -> None:
    """Call `then(returncode)` on the running loop as soon as the process ends."""
    import asyncio  # only the controller: not in the zygote, whose start everybody waits for

    loop = asyncio.get_running_loop()
    fd = os.pidfd_open(process.pid)

    def ended() -> None:
        loop.remove_reader(fd)
        os.close(fd)
        then(process.wait())

    loop.add_reader(fd, ended)


def beat_period_s(heartbeat_s: float) -> float:
    """How often a process says that it lives, if it is lost after `heartbeat_s` of silence."""
    return min(1.0, heartbeat_s / 4)


def say(text: str) -> None:
    """To this process's log, if that can be written: a full disk must not stop what is being reported."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def describe_exit(returncode: int) -> str:
    """`returncode` as subprocess and os.waitstatus_to_exitcode give it."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def log_tail(path: Path, lines: int = 20, since: int = 0) -> str:
    """The last lines of a log, whatever its size, but none of its first `since` bytes; "" if there is none."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since, size - lines * 400))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
