"""The machine under a virtual node: everything that was ever started on it is below this process, and dies with it.

Run as a script, on an interpreter without packages. It is a subreaper: daemons that detach and orphans of any depth
become its children, so the processes of the node are its descendants, whatever they did to hide. It reaps them too.
With the argument `own-memory` they have a /dev/shm of their own.

consumes  one JSON line `{"start": [PROGRAM, ...], "log": FILE}` on stdin for each program to start; end of file
produces  one line with the program's pid for each; at the end of file, it kills all descendants and exits
waits for the next line or the end of a child; nothing limits that, for the end of its starter is an end of file
"""

import ctypes
import json
import os
import selectors
import signal
import sys

_PR_SET_CHILD_SUBREAPER = 36
_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x20000, 0x4000, 0x40000


def start(order: dict[str, object]) -> int:
    argv, log = order["start"], order["log"]
    assert isinstance(argv, list) and isinstance(log, str)
    return os.posix_spawn(
        argv[0],
        argv,
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
        setsigdef=[signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT],  # Python ignores the first two, jobs must not
    )


def reap() -> bool:
    """Whether there are children left."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if pid == 0:
            return True


def parents() -> dict[int, int]:
    """The parent of each process of this machine."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    found[int(entry)] = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue
    return found


def descendants(root: int) -> list[int]:
    """Parents before their children."""
    of: dict[int, list[int]] = {}
    for pid, parent in parents().items():
        of.setdefault(parent, []).append(pid)
    found = list(of.get(root, []))
    for pid in found:
        found.extend(of.get(pid, []))
    return found


def serve() -> None:
    wakeup, waker = os.pipe()
    for fd in (wakeup, waker):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    selector.register(wakeup, selectors.EVENT_READ)
    buffer = b""
    while True:
        ready = {key.fd for key, _ in selector.select()}
        if wakeup in ready:
            os.read(wakeup, 4096)
            reap()
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                print(start(json.loads(line)), flush=True)


def own_memory() -> None:
    """Mount a new /dev/shm that only this process and its descendants see. It goes with the last of them. OSError."""
    _call("unshare", _CLONE_NEWNS)
    _call("mount", None, b"/", None, _MS_REC | _MS_PRIVATE, None)
    _call("mount", b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777")


def _call(name: str, *arguments: int | bytes | None) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")


def main() -> None:
    if "own-memory" in sys.argv[1:]:
        own_memory()
    _call("prctl", _PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    serve()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while reap():  # what forks meanwhile is found in the next round
        for pid in descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            break


if __name__ == "__main__":
    sys.exit(main())
