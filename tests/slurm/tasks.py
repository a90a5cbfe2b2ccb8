"""What tests have workers run: importable there, and light."""

import fcntl
import os
import socket
import threading
import time
from typing import Any

from submitit.core.utils import DelayedSubmission

from pipeline import wire
from pipeline.gps.store import Store
from pipeline.stage import StageResult, StageSpec, TaskContext, current_task


def here() -> Any:
    """The running task. (A closure that names the context variable itself could not be pickled.)"""
    return current_task.get()


def clock(task: TaskContext, spec: StageSpec) -> StageResult:
    """A stage that is done at once: when it ran, on the clock that all processes of a machine share."""
    return {"at": time.monotonic()}


class Resumable:
    """submitit's protocol: what `checkpoint` returns is to be submitted next."""

    def __init__(self, done: int) -> None:
        self.done = done

    def __call__(self) -> int:
        here().next_order(10)
        return self.done

    def checkpoint(self) -> DelayedSubmission:
        return DelayedSubmission(Resumable(self.done + 1))


def deaf(sock: socket.socket, order: wire.WorkerOrder) -> None:
    """A worker's main function that never looks at its socket again: it does not notice the agent's end."""
    ready = wire.WorkerReady(worker=order.start.worker, version=0, pid=os.getpid(), seconds={})
    sock.sendall(wire.encode_message(ready))
    threading.Event().wait()


def hold(sock: socket.socket, order: wire.WorkerOrder) -> None:
    """A worker's main function that has each device that it sees to itself, or ends: it locks a file for each, for as
    long as it lives. It becomes a program, so that /proc shows its environment."""
    for device in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
        file = os.open(os.path.join(order.start.options["locks"], device), os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.set_inheritable(file, True)
    os.execve("/bin/sleep", ["sleep", "infinity"], os.environ | {"HOLDER": order.start.worker})


def trespass(sock: socket.socket, order: wire.WorkerOrder) -> None:
    """A worker's main function that tries to open the weights of another node, and says what came of it."""
    try:
        Store.attach(order.start.options["store"])
        reason = "nothing"
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
    sock.sendall(wire.encode_message(wire.UpdateFailed(worker=order.start.worker, version=0, reason=reason)))


def obey(task: TaskContext, spec: StageSpec) -> StageResult:
    """A stage that waits until it is told to end, or to leave: the kinds of its orders."""
    orders: list[str] = []
    while not {"end", "leave"} & set(orders):
        if order := task.next_order(10):
            orders.append(order.kind)
    return {"orders": orders}
