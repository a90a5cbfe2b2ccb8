"""The loop that rollout and reward share."""

import threading
from collections.abc import Sequence

import pytest

from pipeline.stage import Order
from stages.engines.base import Output
from stages.serving import Inbox, seed_of, serve
from tests.fakes.scripted import FakeTask, FakeWorker, make_config


class Echo:
    """Ends a sequence when its output comes; asks to be called back while one is open."""

    def __init__(self) -> None:
        self.inbox: Inbox = Inbox()
        self.open: set[str] = set()
        self.num_settled = 0
        self.is_withdrawn = self.is_leaving = False
        self.returned: list[str] = []

    @property
    def num_open(self) -> int:
        return len(self.open)

    def dispatch(self, ids: Sequence[str], turns: Sequence[int]) -> None:
        if self.is_leaving:
            self.returned += ids
        else:
            self.open.update(ids)

    def abort(self, ids: Sequence[str]) -> None:
        for id in ids:
            self.inbox.put(Output(id=id, version=0, finish="abort"))

    def take(self, output: Output) -> None:
        self.open.remove(output.id)

    def settle(self, now: float) -> float | None:
        self.num_settled += 1
        return now + 0.001 if self.open else None

    def leave(self) -> None:
        self.is_leaving = True
        self.abort(list(self.open))

    def withdraw(self) -> None:
        self.is_withdrawn = True


def make_task() -> FakeTask:
    return FakeTask(FakeWorker(config=make_config()))


def test_task_ends_when_it_was_told_so_and_nothing_is_open() -> None:
    service, task = Echo(), make_task()
    task.dispatch(["a", "b"])
    task.abort(["a"])
    task.end()
    thread = threading.Thread(target=serve, args=(task, service, service.inbox))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()  # "b" is open
    service.inbox.put(Output(id="b", version=0, finish="stop"))
    thread.join(20.0)
    assert not thread.is_alive() and not service.open and not service.is_withdrawn
    assert service.num_settled > 3  # it was called when it had said, without any order or output
    assert not [t for t in threading.enumerate() if t.name.startswith("orders of")]


def test_task_that_leaves_ends_when_all_is_aborted_and_takes_in_what_was_still_on_its_way() -> None:
    service, task = Echo(), make_task()
    task.dispatch(["a", "b"])
    task.leave()
    task.dispatch(["c"])
    thread = threading.Thread(target=serve, args=(task, service, service.inbox))
    thread.start()
    thread.join(20.0)
    assert not thread.is_alive() and not service.open and not service.is_withdrawn
    assert service.returned == ["c"]


def test_what_the_channel_raises_ends_the_task() -> None:
    class Broken(FakeTask):
        def next_order(self, timeout_s: float | None) -> Order | None:
            raise ConnectionError("the agent is gone")

    service = Echo()
    with pytest.raises(ConnectionError, match="the agent is gone"):
        serve(Broken(FakeWorker(config=make_config())), service, service.inbox)
    assert service.is_withdrawn


def test_unknown_order_ends_the_task() -> None:
    service, task = Echo(), make_task()
    service.inbox.put(Order("pause"))
    with pytest.raises(ValueError, match="unknown order"):
        serve(task, service, service.inbox)
    assert not [t for t in threading.enumerate() if t.name.startswith("orders of")]


def test_seeds_are_the_same_everywhere_and_differ_by_each_part() -> None:
    assert seed_of(0, 1, "000001-00000-0000", 0) == 1_349_173_854
    assert len({seed_of(a, b, c) for a in range(5) for b in range(5) for c in "xyz"}) == 75
    assert all(0 <= seed_of(i) < 2**31 for i in range(1000))
