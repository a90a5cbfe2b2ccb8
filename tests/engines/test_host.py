"""The front of an engine: what other threads ask is done in order, between two steps of the engine's own thread."""

import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest

from stages.engines.base import Engine, EngineCounts, EngineReport, Output, Request
from stages.engines.host import EngineHost
from tests.fakes.scripted import Script, ScriptedEngine, load, sleep, wake

WAIT_S = 10.0
Outbox = queue.SimpleQueue[Output]


class Hosted:
    def __init__(self, script: Callable[[Request], Script]) -> None:
        self.engine = ScriptedEngine(script)
        self.reports: list[tuple[float, EngineReport]] = []
        self.host = EngineHost(self.engine, lambda report: self.reports.append((time.monotonic(), report)))
        self.end: BaseException | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.host.run()
        except BaseException as error:
            self.end = error

    def stop(self) -> None:
        def leave(engine: Engine) -> None:
            raise SystemExit

        if self.thread.is_alive():
            self.host.post(leave)
            self.thread.join(WAIT_S)
        assert not self.thread.is_alive()


def script(request: Request) -> Script:
    return Script(
        tokens=[1, 2, 3],
        finish="" if request.id.startswith("endless") else "stop",
        is_refused="bad" in request.id,
        hold_after=1 if request.id == "held" else None,
    )


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    hosted = Hosted(script)
    yield hosted
    hosted.stop()


def request(id: str) -> Request:
    return Request(id=id, prompt_ids=[1], max_tokens=8)


def collect(outbox: Outbox, num_finished: int) -> dict[str, tuple[list[int], str]]:
    """Tokens and finish of each request, when so many have finished."""
    tokens: dict[str, list[int]] = {}
    finishes: dict[str, str] = {}
    while len(finishes) < num_finished:
        output = outbox.get(timeout=WAIT_S)
        assert output.id not in finishes, "output after the last one"
        tokens.setdefault(output.id, []).extend(output.tokens)
        if output.finish:
            finishes[output.id] = output.finish
    return {id: (tokens[id], finish) for id, finish in finishes.items()}


def test_outputs_arrive_in_the_outbox_of_their_request(hosted: Hosted) -> None:
    boxes: list[Outbox] = [queue.SimpleQueue(), queue.SimpleQueue()]
    hosted.host.submit([request("a"), request("b")], boxes[0])
    hosted.host.submit([request("c")], boxes[1])
    assert collect(boxes[0], 2) == {"a": ([1, 2, 3], "stop"), "b": ([1, 2, 3], "stop")}
    assert collect(boxes[1], 1) == {"c": ([1, 2, 3], "stop")}


def test_a_refused_request_ends_with_an_error_and_harms_no_other(hosted: Hosted) -> None:
    box: Outbox = queue.SimpleQueue()
    hosted.host.submit([request("bad"), request("good")], box)
    assert collect(box, 2) == {"bad": ([], "error"), "good": ([1, 2, 3], "stop")}


def test_an_id_that_is_running_is_refused_without_harm_to_who_runs(hosted: Hosted) -> None:
    first: Outbox = queue.SimpleQueue()
    second: Outbox = queue.SimpleQueue()
    hosted.host.submit([request("endless")], first)
    hosted.host.submit([request("endless")], second)
    assert collect(second, 1) == {"endless": ([], "error")}
    hosted.host.abort(["endless"])
    assert collect(first, 1)["endless"][1] == "abort"


def test_abort_ends_some_or_all(hosted: Hosted) -> None:
    box: Outbox = queue.SimpleQueue()
    hosted.host.submit([request(f"endless-{n}") for n in range(3)], box)
    hosted.host.abort(["endless-1", "unknown"])
    assert set(collect(box, 1)) == {"endless-1"}
    hosted.host.abort(None)
    assert {id: finish for id, (_, finish) in collect(box, 2).items()} == {"endless-0": "abort", "endless-2": "abort"}


def test_call_runs_on_the_engines_thread_and_raises_here(hosted: Hosted) -> None:
    assert hosted.host.call(lambda engine: threading.get_ident()) == hosted.thread.ident

    def fail(engine: Engine) -> None:
        raise KeyError("here")

    with pytest.raises(KeyError, match="here"):
        hosted.host.call(fail)
    assert hosted.host.call(lambda engine: engine.version) == hosted.host.version == 0


def test_an_error_of_the_engine_ends_the_loop(hosted: Hosted) -> None:
    hosted.host.post(lambda engine: engine.no_such_method())  # type: ignore[attr-defined]
    hosted.thread.join(WAIT_S)
    assert isinstance(hosted.end, AttributeError)


def first(box: Outbox, num: int) -> list[Output]:
    return [box.get(timeout=WAIT_S) for _ in range(num)]


def test_a_load_aborts_what_runs_and_its_outputs_arrive_first(hosted: Hosted) -> None:
    box: Outbox = queue.SimpleQueue()
    hosted.host.submit([request(f"endless-{n}") for n in range(3)], box)
    first(box, 3)
    assert load(hosted.host, 1) is None and hosted.host.version == 1
    said = [box.get_nowait() for _ in range(box.qsize())]
    assert {o.version for o in said} == {0} and sorted(o.id for o in said if o.finish) == [
        f"endless-{n}" for n in (0, 1, 2)
    ]
    hosted.host.submit([request("a")], box)  # its claim was still under way
    assert {o.version for o in first(box, 3)} == {1}


def test_a_load_that_keeps_caches_aborts_nothing(hosted: Hosted) -> None:
    box: Outbox = queue.SimpleQueue()
    hosted.engine.released.clear()
    hosted.host.submit([request("held")], box)
    (begun,) = first(box, 1)
    assert load(hosted.host, 1, keep_kv=True) is None
    hosted.engine.released.set()
    rest = first(box, 2)
    assert [(o.version, o.kv_version, o.finish) for o in (begun, *rest)] == [(0, None, ""), (1, 0, ""), (1, 0, "stop")]


def test_after_a_failed_load_nothing_runs_until_one_succeeds(hosted: Hosted) -> None:
    """Its weights may be anything; what is dispatched meanwhile is given back."""
    box: Outbox = queue.SimpleQueue()
    hosted.engine.unloadable = {1}
    hosted.host.submit([request("held")], box)
    first(box, 1)
    assert "cannot be loaded" in str(load(hosted.host, 1, keep_kv=True))
    assert first(box, 1)[0].finish == "abort"
    hosted.host.submit([request("late")], box)
    assert [(o.id, o.finish, o.tokens) for o in first(box, 1)] == [("late", "abort", [])]
    assert load(hosted.host, 2) is None
    hosted.host.submit([request("late")], box)
    assert collect(box, 1) == {"late": ([1, 2, 3], "stop")}


def test_a_sleep_aborts_what_runs_and_all_that_comes_while_it_lasts(hosted: Hosted) -> None:
    box: Outbox = queue.SimpleQueue()
    hosted.host.submit([request(f"endless-{n}") for n in range(3)], box)
    first(box, 3)
    assert sleep(hosted.host) is None and hosted.engine.is_asleep
    said = [box.get_nowait() for _ in range(box.qsize())]
    assert sorted(o.id for o in said if o.finish == "abort") == [f"endless-{n}" for n in (0, 1, 2)]
    hosted.host.submit([request("late"), request("later")], box)
    assert [(o.id, o.finish, o.tokens) for o in first(box, 2)] == [("late", "abort", []), ("later", "abort", [])]
    hosted.host.abort(None)
    hosted.host.abort(["late"])
    assert hosted.host.seconds.keys() == {"release"}
    assert wake(hosted.host, 4) is None and hosted.host.version == 4
    assert hosted.host.seconds.keys() == {"read", "cache"}
    hosted.host.submit([request("late")], box)
    assert {(o.version, o.finish) for o in first(box, 3)} == {(4, ""), (4, "stop")}


def test_after_a_failed_wake_nothing_runs(hosted: Hosted) -> None:
    box: Outbox = queue.SimpleQueue()
    hosted.engine.unloadable = {1}
    sleep(hosted.host)
    assert "cannot be loaded" in str(wake(hosted.host, 1))
    hosted.host.submit([request("late")], box)
    assert [(o.id, o.finish, o.tokens) for o in first(box, 1)] == [("late", "abort", [])]


def test_after_a_failed_sleep_nothing_runs(hosted: Hosted) -> None:
    """It may have lost a part of what it had."""
    box: Outbox = queue.SimpleQueue()
    sleep(hosted.host)
    assert isinstance(sleep(hosted.host), RuntimeError)
    hosted.host.submit([request("late")], box)
    assert [o.finish for o in first(box, 1)] == ["abort"]


def test_sequences_that_come_without_a_token_of_this_role_are_told_from_others(hosted: Hosted) -> None:
    box: Outbox = queue.SimpleQueue()
    kept = Request(id="kept", prompt_ids=[1] * 9, max_tokens=8, num_kept=4)
    hosted.host.submit([Request(id="new", prompt_ids=[1] * 7, max_tokens=8), kept, request("bad")], box)
    collect(box, 3)
    deadline = time.monotonic() + WAIT_S
    while sum(report.num_tokens for _, report in hosted.reports[-1:]) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    reports = [report for _, report in hosted.reports]
    assert (sum(r.num_started for r in reports), sum(r.started_tokens for r in reports)) == (1, 7)
    assert sum(r.num_iterations * r.batch for r in reports) == 6 and all(r.decode_s > 0 for r in reports)


def test_counts_are_reported_when_they_change_and_not_too_often(hosted: Hosted) -> None:
    box: Outbox = queue.SimpleQueue()
    for n in range(40):  # for longer than one interval
        hosted.host.submit([request(f"r{n}")], box)
        collect(box, 1)
        time.sleep(0.01)
    deadline = time.monotonic() + WAIT_S
    while not hosted.reports or counted(hosted.reports[-1][1]) != hosted.host.call(lambda engine: engine.counts()):
        assert time.monotonic() < deadline
        time.sleep(0.005)  # the last change is reported although the engine is idle
    times = [at for at, _ in hosted.reports]
    assert all(later - earlier >= 0.2 for earlier, later in pairwise(times))
    assert len(hosted.reports) <= 1 + (times[-1] - times[0]) / 0.2


def counted(report: EngineReport) -> EngineCounts:
    return EngineCounts(
        running=report.running, waiting=report.waiting, num_tokens=report.num_tokens, held_tokens=report.kv_tokens
    )


def test_the_abort_of_64_takes_a_step_and_little_more() -> None:
    """From the order to the last output. (benchmarks/migration.py measures a real engine.)"""
    hosted, times = Hosted(lambda request: Script(tokens=[1] * 1000, finish="")), []
    for _ in range(20):
        box: Outbox = queue.SimpleQueue()
        hosted.host.submit([request(f"r{n}") for n in range(64)], box)
        first(box, 64)
        started = time.perf_counter()
        hosted.host.abort(None)
        left = 64
        while left:
            left -= box.get(timeout=WAIT_S).finish == "abort"
        times.append(time.perf_counter() - started)
    hosted.stop()
    assert statistics.median(times) < 0.05
