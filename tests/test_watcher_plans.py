"""The planner of a live run: asked, answered, written down, and what its decisions were worth."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core import events as ev
from pipeline.core.events import Role
from pipeline.core.iteration import IterationCost
from pipeline.core.planner.bindings import Bindings
from pipeline.core.planner.planner import Plan
from pipeline.core.planner.settings import PlannerSettings
from pipeline.core.snapshot import Snapshot
from pipeline.watching.book import Book, read_book
from pipeline.watching.worth import Prediction, left_of, measure
from tests.fakes.watched import DONE, Run, ask, foretell, live_through
from tests.test_watcher import no_fault


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "r")
    yield run
    run.watcher.close()


# --- the planner ------------------------------------------------------------------------------------------------------


def test_the_planner_answers_and_its_decision_can_be_read(run: Run) -> None:
    run.core.admit(1)
    run.give("rollout-0", *run.core.admit(2))
    made = ask(run, 3)
    (line,) = run.lines("decision")
    assert (line["number"], line["cause"], line["version"], line["step"]) == (3, "step 1 admitted", 0, 1)
    assert line["reason"] == made.reason and line["took_s"] > 0 and line["at"] == 100.0
    assert line["moves"] == {str(block): role for block, role in made.moves}
    assert line["blocks"] == {"rollout": [0, 1], "reward": [2, 3], "train": []}
    chosen = line["candidates"][line["chosen"]]
    assert chosen["num_rollout"] + chosen["num_reward"] == 4 and made.again_s == 5.0


def test_a_planner_that_fails_is_harmless(tmp_path: Path) -> None:
    def broken(seen: Snapshot, settings: PlannerSettings, bindings: Bindings) -> Plan:
        raise ZeroDivisionError("no blocks")

    faults: list[Exception] = []
    run = Run(tmp_path / "r", decide=broken, fault=faults.append)
    made = ask(run)
    assert made.moves == () and "ZeroDivisionError" in made.reason
    assert [type(fault) for fault in faults] == [ZeroDivisionError]
    assert run.lines("decision")[0]["reason"] == made.reason
    assert run.lines("decision")[0]["candidates"] == []


def test_a_watcher_that_fails_says_so_once_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(tmp_path / "r", fault=no_fault)
    run.watcher._fault = run.watcher._say_once
    run.core.blocks.all = None  # type: ignore[assignment]
    for _ in range(3):
        run.after()
        run.count("nobody")
    run.watcher._running._engines = None  # type: ignore[assignment]
    made = ask(run)
    assert made.moves == () and "failed" in made.reason
    assert capsys.readouterr().err.count("the watcher failed, and the run goes on") == 1


def test_while_the_planner_thinks_the_loop_goes_on(tmp_path: Path) -> None:
    """It thinks until the loop has done what comes after the question: were it the same thread, for ever."""
    went_on = threading.Event()

    def slow(seen: Snapshot, settings: PlannerSettings, bindings: Bindings) -> Plan:
        assert went_on.wait(30)
        return Plan(reason="at last", moves={0: Role.REWARD})

    run = Run(tmp_path / "r", decide=slow)

    async def both() -> None:
        run.watcher.ask(1, "")
        for _ in range(100):
            run.after()
            run.count("rollout-0", num_iterations=1)
            await asyncio.sleep(0)
        assert not any(isinstance(event, ev.PlanMade) for event in run.posted)
        went_on.set()
        while not any(isinstance(event, ev.PlanMade) for event in run.posted):
            await asyncio.sleep(0)

    asyncio.run(both())
    made = next(event for event in run.posted if isinstance(event, ev.PlanMade))
    assert made.moves == ((0, Role.REWARD),)


def test_a_schedule_by_hand_makes_each_shift_once_when_its_moment_has_come(tmp_path: Path) -> None:
    schedule = [
        {"step": 1, "at": "rolled_out", "blocks": [1], "role": "reward"},
        {"step": 2, "at": "admitted", "blocks": [3], "role": "rollout"},
        {"step": 1, "at": "trained", "blocks": [1], "role": "rollout"},
    ]
    text = f"placement.planner.schedule={json.dumps(schedule)}"
    run = Run(tmp_path / "r", "placement.planner.enabled=false", text)
    assert ask(run, 1).moves == ()
    run.core.admit(1)
    run.core.progress(1, 100.0, rollout=DONE)
    made = ask(run, 2)
    assert made.moves == ((1, Role.REWARD),) and made.reason == "as scheduled"
    run.core.bind(Role.REWARD, 1)
    assert ask(run, 3).moves == (), "once"
    run.core.admit(2)
    run.core.bind(Role.TRAIN, 3)
    assert ask(run, 4).moves == (), "it trains"
    run.core.progress(1, 110.0, reward=DONE, batch=DONE, train=DONE)
    run.core.blocks.all[3].wanted = None
    assert dict(ask(run, 5).moves) == {1: Role.ROLLOUT, 3: Role.ROLLOUT}
    run.core.bind(Role.ROLLOUT, 1, 3)
    run.core.blocks.all[3].wanted = None
    assert ask(run, 6).moves == ((3, Role.ROLLOUT),), "as before it trained"
    assert [line["reason"] for line in run.lines("decision")].count("as scheduled") == 3


# --- what it was worth ------------------------------------------------------------------------------------------------


def test_worth_by_hand(run: Run) -> None:
    """A is judged 40 s after the decision and trained at 60, B is judged at 50: B can be trained at 60."""
    run.core.admit(1)
    run.core.admit(2)
    run.after()
    then = run.snapshot()
    predicted = Prediction(number=1, at_s=1000.0, first=0, has_next=True, value_s=70.0, gain_s=4.0, is_shift=True)
    judged, published = {0: 1040.0, 1: 1050.0}, {1: 1060.0}
    assert predicted.due_s({0: 1040.0}, published) is None and predicted.due_s(judged, {}) is None
    assert predicted.due_s(judged, published) == 1060.0
    worth = measure(predicted, judged, published, 1060.0, then)
    beyond = left_of(then, 2)
    assert left_of(replace(then, num_steps=2), 2) == 0.0 and beyond > 0
    assert left_of(replace(then, num_admitted=3), 2) == 0.0, "it is there, and nothing of it is left"
    assert left_of(then, 1) == pytest.approx(beyond), "none of it has begun"
    assert worth.measured_s == pytest.approx(60.0 + 0.02 * 40.0 + 0.05 * 50.0 + beyond / 4)
    assert worth.gain_s == pytest.approx(70.0 + 4.0 - worth.measured_s)
    assert worth.regret_s == pytest.approx(worth.measured_s - 70.0)
    alone = replace(predicted, has_next=False)
    assert alone.due_s({}, published) == 1060.0
    assert measure(alone, {0: 1040.0}, published, 1060.0, then).measured_s == pytest.approx(60.8 + beyond / 4)


def test_a_decision_is_closed_when_what_it_foretold_has_happened(tmp_path: Path) -> None:
    run = Run(tmp_path / "r", decide=foretell)
    live_through(run)
    (line,) = run.lines("worth")
    assert (line["number"], line["predicted_s"], line["predicted_gain_s"]) == (9, 50.0, 6.0)
    beyond_s = left_of(run.snapshot(), 2) / 4
    assert line["measured_s"] == pytest.approx(30.0 + 0.02 * 10.0 + 0.05 * 20.0 + beyond_s, rel=0.01)
    row = run.watcher.metrics(1)
    assert row["shift/predicted_gain_s"] == 6.0 and row["shift/regret_s"] == pytest.approx(line["regret_s"])
    assert row["shift/measured_gain_s"] == pytest.approx(line["measured_gain_s"])
    assert row["planner/num_asked"] == 1.0 and "shift/regret_s" not in run.watcher.metrics(2)


def test_a_full_disk_is_said_once_and_stops_nothing() -> None:
    said: list[str] = []
    book = Book(Path("/dev/full"), 1, said.append)
    for number in range(3):
        book.write("decision", 1.0, {"number": number})
    book.write("decision", 1.0, {"value": float("inf")})
    assert len(said) == 1 and "/dev/full" in said[0]


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    book = Book(path, 2, lambda text: None)
    book.write("decision", 1.0, {"number": 1})
    path.write_bytes(path.read_bytes() + b'{"kind":"decis')
    book._is_torn = True
    book.write("decision", 2.0, {"number": 2})
    assert [line["number"] for line in read_book(path)] == [1, 2]
    assert list(read_book(tmp_path / "none")) == []


def test_a_line_that_an_attempt_before_left_torn_takes_none_with_it(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    path.write_bytes(b'{"kind":"decision","number":1}\n{"kind":"decis')
    for number in (2, 3):
        Book(path, number, lambda text: None).write("decision", 1.0, {"number": number})
    assert [line["number"] for line in read_book(path)] == [1, 2, 3]


def test_costs_of_a_run_without_measurements_are_what_is_assumed(run: Run) -> None:
    assert isinstance(run.watcher.monitor.cost(Role.ROLLOUT), IterationCost)  # type: ignore[union-attr]
