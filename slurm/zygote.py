"""A node's zygote: one thread, every module that workers need already imported, and a fork for each worker.

    python -m slurm.zygote FD PARENT LIFE    FD: the SEQPACKET socket to the agent, PARENT: the agent's pid,
                                             LIFE: a descriptor to be held to the end, by workers too
                                             (behind processes.SHIELD: signals are ignored from the start)

The agent sends Preload once, then Fork (with the worker's socket, by SCM_RIGHTS) and Kill; the zygote answers Ready
or Failed, then Forked and Exited for each worker. A worker is a process group of its own, with the ranks of its engine,
and has ended when the last of them has: until then they hold its slots. End of file is the agent's death: the zygote
leaves, and by PDEATHSIG its workers.
Only a process of one thread forks safely, so nothing here may start another: neither gRPC nor an OpenMP pool.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

import msgspec

from pipeline import wire
from pipeline.processes import adopt_orphans, die_with_parent

COMMON = (
    "pipeline.config",
    "pipeline.stage",
    "pipeline.gps.store",
    "pyarrow.flight",
    "submitit.core.utils",
    "cloudpickle",
)
"""What every worker needs, whatever its engine: imported before the agent knows the run's own modules."""

MAX_MESSAGE_BYTES = 1 << 16
_DYING_S = 0.01
"""How often it looks whether a dead worker's group has ended."""


class Preload(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Import these; a module's function `preload()`, if it has one, is called."""

    modules: list[str]


class Fork(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    order: wire.WorkerOrder
    log: str


class Kill(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    worker: str


class Ping(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Say that you live."""


class Alive(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers Ping."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    seconds: float  # since the interpreter's start


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    reason: str


class Forked(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Answers Fork."""

    worker: str
    pid: int


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    worker: str
    code: int  # as subprocess gives it: negative for a signal


ToZygote = Preload | Fork | Kill | Ping
FromZygote = Ready | Failed | Forked | Exited | Alive

_decoder = msgspec.msgpack.Decoder(ToZygote)
_encoder = msgspec.msgpack.Encoder()


class Zygote:
    """Consumes the agent's orders and its children's deaths; waits for both at once."""

    def __init__(self, control: socket.socket, started: float) -> None:
        self._control = control
        self._started = started
        self._children: dict[int, tuple[str, int]] = {}  # pidfd to worker and process group
        self._dying: dict[str, tuple[int, int]] = {}  # worker to process group and exit code

    def serve(self) -> NoReturn:
        while True:
            limit_s = _DYING_S if self._dying else None
            readable, _, _ = select.select([self._control.fileno(), *self._children], [], [], limit_s)
            for fd in readable:
                if fd == self._control.fileno():
                    self._obey()
                else:
                    self._bury(fd)
            for worker, (group, code) in list(self._dying.items()):
                if _has_ended(group):
                    del self._dying[worker]
                    self._say(Exited(worker=worker, code=code))

    def _obey(self) -> None:
        data, fds, _, _ = socket.recv_fds(self._control, MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            os._exit(0)
        match _decoder.decode(data):
            case Preload(modules=modules):
                self._preload(modules)
            case Fork() as fork:
                self._fork(fork, fds[0])
            case Ping():
                self._say(Alive())
            case Kill(worker=worker):
                for pidfd, (name, _) in self._children.items():
                    if name == worker:
                        signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def _say(self, message: FromZygote) -> None:
        self._control.send(_encoder.encode(message))

    def _preload(self, modules: list[str]) -> None:
        try:
            import_all(modules)
            threads = _thread_names()
            if len(threads) > 1:
                raise RuntimeError(f"importing {modules} left {len(threads)} threads: {threads}; only one may fork")
        except Exception as error:
            traceback.print_exc()
            self._say(Failed(reason=f"{type(error).__name__}: {error}"))
            return
        keep_all()
        self._say(Ready(seconds=time.monotonic() - self._started))

    def _fork(self, fork: Fork, fd: int) -> None:
        zygote = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._become_worker(fork, fd, zygote)
        os.close(fd)
        self._children[os.pidfd_open(pid)] = fork.order.start.worker, pid
        self._say(Forked(worker=fork.order.start.worker, pid=pid))

    def _become_worker(self, fork: Fork, fd: int, zygote: int) -> NoReturn:
        try:
            die_with_parent(signal.SIGKILL, zygote)
            os.setpgid(0, 0)
            self._control.close()
            for pidfd in self._children:
                os.close(pidfd)
            write_to(fork.log)
            work(socket.socket(fileno=fd), fork.order)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    def _bury(self, pidfd: int) -> None:
        worker, group = self._children.pop(pidfd)
        with contextlib.suppress(ProcessLookupError):  # it died before it was one
            os.killpg(group, signal.SIGKILL)
        info = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        assert info is not None
        os.close(pidfd)
        code = info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
        self._dying[worker] = group, code


# --- what a process does to become a worker, fork or not ------------------------------------------------------------


def import_all(modules: Sequence[str]) -> None:
    """A module's function `preload()`, if it has one, is called."""
    for module in modules:
        prepare = getattr(importlib.import_module(module), "preload", None)
        if prepare is not None:
            prepare()


def keep_all() -> None:
    """For good: a collection in a worker would walk the whole heap that it has from its imports, and a fork would then
    unshare its pages."""
    gc.enable()
    gc.collect()
    gc.freeze()


def write_to(log: str) -> None:
    """What this process prints goes there."""
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


def work(sock: socket.socket, order: wire.WorkerOrder) -> NoReturn:
    """Be the worker, to its end."""
    from pipeline.gps.store import confine
    from pipeline.stage import resolve

    code = 1
    try:
        confine(f"{order.gps}-")
        os.environ.update(order.env)
        resolve(order.start.main)(sock, order)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _has_ended(group: int) -> bool:
    """All of a process group, whose first process is buried. The others are this process's children then."""
    try:
        while os.waitpid(-group, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return True
    return False


def _thread_names() -> list[str]:
    names = []
    for thread in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{thread}/comm", encoding="utf-8") as file:
            names.append(file.read().strip())
    return names


def main(fd: int, parent: int, life: int) -> NoReturn:
    started = time.monotonic()
    die_with_parent(signal.SIGKILL, parent)
    adopt_orphans()
    os.set_inheritable(life, False)  # forks have it; programs that they start do not
    os.umask(0o077)  # what workers write is nobody else's
    gc.disable()  # imports allocate much and free nothing
    for module in COMMON:
        importlib.import_module(module)
    Zygote(socket.socket(fileno=fd), started).serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
