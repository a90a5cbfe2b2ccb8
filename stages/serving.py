"""The loop of a stage task that has sequences dispatched to it: orders and engine outputs in, reports out.

Both arrive in one inbox, so the task waits in one place, without polling the one while it misses the other.
"""

import hashlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from pipeline.core.events import Finish, SegmentInfo
from pipeline.stage import Order, TaskContext

GROUP_S = 0.02
"""What has ended is put together for this long, unless nothing runs any more: each put is a synced write."""

_STOP_CHECK_S = 0.2  # how soon the forwarding thread notices that its task has failed

Inbox = queue.SimpleQueue[Any]
"""Order, Output, what else the service puts there for its own `take`, or an exception."""


class Service(Protocol):
    """What a stage does with its sequences. Each dispatched id is reported as ended exactly once."""

    @property
    def num_open(self) -> int:
        """Sequences that were dispatched and not yet reported as ended."""

    def dispatch(self, ids: Sequence[str], turns: Sequence[int]) -> None: ...

    def abort(self, ids: Sequence[str]) -> None: ...

    def take(self, output: Any) -> None:
        """An engine's output, or what else comes into the inbox of this service."""

    def settle(self, now: float) -> float | None:
        """Put and report what is due at `now` (time.monotonic()); the time of the next call, None: not needed."""

    def leave(self) -> None:
        """The engine is to be free soon: abort all that runs. From now on nothing is begun: what is dispatched, or is
        to be tried again, is reported as aborted."""

    def withdraw(self) -> None:
        """The task has failed: have the engine stop what nobody waits for any more."""


def serve(task: TaskContext, service: Service, inbox: Inbox) -> None:
    """Run until the order to end or to leave has come and every sequence is reported.

    Consumes orders and outputs; produces puts and reports (through the service); waits for the inbox; unblocked by an
    order, an output, or the time that the service named. Raises what the service or the channel raised.
    """
    try:
        with _orders_into(inbox, task):
            _serve(task, service, inbox)
    except BaseException:
        service.withdraw()
        raise


def _serve(task: TaskContext, service: Service, inbox: Inbox) -> None:
    is_ending = is_leaving = False
    due: float | None = None
    while not is_ending or service.num_open:
        for item in _take_all(inbox, due):
            match item:
                case Order(kind="dispatch"):
                    service.dispatch(item.ids, item.turns)
                case Order(kind="abort"):
                    service.abort(item.ids)
                case Order(kind="end"):
                    is_ending = True
                case Order(kind="leave"):
                    is_ending = is_leaving = True
                    service.leave()
                case Order():
                    raise ValueError(f"unknown order {item}")
                case BaseException():
                    raise item
                case _:
                    service.take(item)
        if is_leaving:
            _give_back(task, service)
        due = service.settle(time.monotonic())


def _give_back(task: TaskContext, service: Service) -> None:
    """What was dispatched before the controller heard that the task leaves. It takes back by itself what comes later
    than this, or never: the task has ended then."""
    while order := task.next_order(0.0):
        if order.kind == "dispatch":
            service.dispatch(order.ids, order.turns)


def returned(id: str, version: int) -> SegmentInfo:
    """The report of a sequence that was dispatched to a task that leaves. Its owner in the queue stays who it was."""
    return SegmentInfo(id=id, idx=0, num_tokens=0, version=version, finish=Finish.ABORT)


def seed_of(*parts: object) -> int:
    """A seed that depends on every part, the same on every machine: 0 <= seed < 2**31."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:4], "little") & 0x7FFFFFFF


def _take_all(inbox: Inbox, due: float | None) -> Iterator[Any]:
    """All that is there; if nothing is, wait for the first until `due`."""
    try:
        yield inbox.get(timeout=None if due is None else max(0.0, due - time.monotonic()))
        while True:
            yield inbox.get_nowait()
    except queue.Empty:
        return


@contextmanager
def _orders_into(inbox: Inbox, task: TaskContext) -> Iterator[None]:
    """Forward the task's orders to its inbox, from a thread that ends with the block: up to the order to end or to
    leave, so that nobody waits for the thread then."""
    is_over = threading.Event()

    def forward() -> None:
        try:
            while not is_over.is_set():
                order = task.next_order(_STOP_CHECK_S)
                if order is not None:
                    inbox.put(order)
                    if order.kind in ("end", "leave"):
                        return
        except BaseException as error:
            inbox.put(error)

    thread = threading.Thread(target=forward, name=f"orders of {task.spec.task}", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
