"""The watcher where blocks change hands: shifts, the planner's answers, their journal, and what they were worth."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.dag import Progress
from pipeline.core.events import Finish, Role, SegmentInfo, VerdictInfo
from pipeline.core.iteration import IterationCost
from pipeline.core.planner.bindings import Bindings
from pipeline.core.planner.planner import Candidate, Plan
from pipeline.core.planner.settings import PlannerSettings
from pipeline.core.snapshot import Snapshot
from pipeline.run_folder import RunFolder
from pipeline.watcher import Watcher
from pipeline.watching.book import Book, read_book
from pipeline.watching.worth import Prediction, left_of, measure
from pipeline.wire import WorkerReady
from pipeline.wire_counts import Counts
from pipeline.wire_shift import Slept, Woken
from tests.fakes.blocks import FakeCore
from tests.fakes.plan import make_plan
from tests.test_watcher import config_of, no_fault

NUM = 8
TICK = ev.TimerFired(name="none")
DONE, RUNNING = Progress.DONE, Progress.RUNNING


class Run:
    """A watcher over a core of four blocks, of which the last trains; `now` is its clock."""

    def __init__(
        self,
        folder: Path,
        *changes: str,
        decide: Callable[[Snapshot, PlannerSettings, Bindings], Plan] | None = None,
        fault: Callable[[Exception], None] = no_fault,
        config: Config | None = None,
    ) -> None:
        plan = make_plan(sequences_per_step=NUM, total_steps=9, staleness=1, is_streaming=True)
        self.core = FakeCore(plan, 4, train=(3,))
        self.run = RunFolder(folder)
        self.run.create()
        self.posted: list[ev.Event] = []
        self.now = 100.0
        self.watcher = Watcher(
            self.core,
            config or config_of("placement.mode=shiftable", *changes),
            self.posted.append,
            self.run,
            clock=lambda: self.now,
            fault=fault,
            decide=decide,
        )
        self.core.bind(Role.ROLLOUT, 0, 1)
        self.core.bind(Role.REWARD, 2, 3)
        self.after(ev.RunRestored(version=0))

    def after(self, event: ev.Event = TICK, *decisions: de.Decision, at: float | None = None) -> None:
        self.now = self.now if at is None else at
        self.watcher.after(event, list(decisions), self.now)

    def give(self, worker: str, *ids: str) -> None:
        for id in ids:
            self.core.sequences.dispatch(id, f"task of {worker}")
        self.after(TICK, de.Dispatch(task=f"task of {worker}", worker=worker, ids=ids, turns=(1,) * len(ids)))

    def close(self, worker: str, id: str, num_tokens: int, finish: Finish, idx: int = 0) -> None:
        segment = SegmentInfo(id=id, idx=idx, num_tokens=num_tokens, version=0, finish=finish)
        self.core.sequences.close(f"task of {worker}", segment)
        self.after(ev.SegmentClosed(task=f"task of {worker}", segments=(segment,)))

    def count(self, worker: str, **what: Any) -> None:
        values = {"running": 1, "waiting": 0, "num_tokens": 0, "rss_bytes": 1} | what
        self.watcher.heard(Counts(worker=worker, **values))

    def snapshot(self) -> Snapshot:
        return self.watcher._snapshot(self.now)

    def ages(self, role: Role, step: int) -> float:
        """Tokens of those that have some, in sum."""
        view = self.snapshot().role(role)
        crowd = next(c for c in view.crowds if c.step == step)
        return sum(i * num for i, num in enumerate(crowd.ages)) * view.bin_tokens

    def lines(self, kind: str) -> list[dict[str, Any]]:
        """Once all is written."""
        self.watcher._thread.submit(lambda: None).result()
        return [line for line in read_book(self.run.decisions) if line["kind"] == kind]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "r")
    yield run
    run.watcher.close()


# --- what runs --------------------------------------------------------------------------------------------------------


def test_between_two_flushes_a_sequence_ages_with_its_engines_iterations(run: Run) -> None:
    a, b, c, *_ = run.core.admit(1)
    run.give("rollout-0", a, b)
    run.give("rollout-1", c)
    run.count("rollout-0", num_iterations=10)
    assert run.ages(Role.ROLLOUT, 0) == pytest.approx(20.0)
    run.close("rollout-0", a, 9, Finish.FLUSH)
    assert run.ages(Role.ROLLOUT, 0) == pytest.approx(9.0 + 10.0), "what is durable is known"
    run.count("rollout-0", num_iterations=5, running=1, waiting=1)
    assert run.ages(Role.ROLLOUT, 0) == pytest.approx(9.0 + 5.0), "the engine has not begun with the last one"
    run.count("rollout-0", num_iterations=5)
    run.watcher.heard(WorkerReady(worker="rollout-0", version=0, pid=1, seconds={}))
    run.give("rollout-1", run.core.admit(2)[0])
    assert run.snapshot().blocks[1].num_running == 2


def test_a_verdict_ages_and_its_length_is_learned(run: Run) -> None:
    ids = run.core.admit(1)
    before = run.snapshot().reward.survival
    for id in ids:
        run.give("rollout-0", id)
        run.close("rollout-0", id, 40, Finish.STOP)
        run.give("reward-2", id)
    run.count("reward-2", num_iterations=3)
    assert run.ages(Role.REWARD, 0) == pytest.approx(3.0 * NUM)
    longest = run.watcher._config.reward.genrm.max_tokens
    for id in ids:
        verdict = VerdictInfo(id=id, score=1.0, failure="", num_tokens=longest)
        run.core.sequences.judge("task of reward-2", verdict)
        run.after(ev.VerdictGiven(task="task of reward-2", verdicts=(verdict,)))
    assert run.snapshot().reward.survival[-2] > before[-2] + 0.05
    assert run.snapshot().reward.crowds == (), "all judged"
    assert run.snapshot().rollout.survival != run.watcher.monitor.believed.rollout.survival  # type: ignore[union-attr]


def test_what_runs_on_a_block_that_leaves_waits(run: Run) -> None:
    ids = run.core.admit(1)
    run.give("rollout-0", *ids)
    run.close("rollout-0", ids[0], 7, Finish.FLUSH)
    run.core.blocks.all[0].wanted = Role.REWARD
    del run.core.blocks.held[0]
    run.after()
    seen = run.snapshot()
    assert [b.num_running for b in seen.blocks] == [0, 0, 0, 0]
    assert seen.rollout.crowds[0].num_waiting == NUM - 1 and sum(seen.rollout.crowds[0].ages) == pytest.approx(1.0)
    assert seen.blocks[0].role is Role.REWARD and seen.blocks[0].ready_in_s == pytest.approx(0.2)


def test_what_fits_into_a_cache_is_what_its_engine_says(run: Run) -> None:
    run.watcher.heard(WorkerReady(worker="reward-0", version=0, pid=1, seconds={}, is_asleep=True, kv_tokens=4321))
    assert run.snapshot().reward.kv_tokens == 4321.0 != run.snapshot().rollout.kv_tokens


def test_costs_are_told_once_until_they_change(run: Run) -> None:
    def work(at_s: float, decode_s: float) -> list[ev.Event]:
        run.posted.clear()
        run.now = at_s
        run.count("rollout-0", num_iterations=100, decode_s=decode_s, batch=4.0, context=100.0)
        return list(run.posted)

    first = work(100.0, 1.0)
    assert [type(e) for e in first] == [ev.CostsMeasured] * 2
    assert [e.role for e in first if isinstance(e, ev.CostsMeasured)] == [Role.ROLLOUT, Role.REWARD]
    assert work(101.0, 1.0) == [], "not so often"
    for at_s in range(106, 200, 6):
        settled = work(at_s, 1.0)
    assert settled == [], "nothing new"
    changed = [event for at_s in range(200, 230, 6) for event in work(at_s, 2.0)]
    assert changed and {e.role for e in changed if isinstance(e, ev.CostsMeasured)} == {Role.ROLLOUT}


# --- steps ------------------------------------------------------------------------------------------------------------


def test_the_runs_step_1_is_the_planners_step_0_and_makes_version_1(run: Run) -> None:
    run.core.admit(1)
    run.core.admit(2)
    run.after(at=110.0)
    seen = run.snapshot()
    assert (seen.version, seen.num_admitted) == (0, 2)
    assert [crowd.step for crowd in seen.rollout.crowds] == [0, 1]
    for sequence in run.core.sequences.of_step(1):
        run.give("rollout-0", sequence.id)
        run.close("rollout-0", sequence.id, 5, Finish.STOP)
        run.give("reward-2", sequence.id)
        run.core.sequences.judge("task of reward-2", VerdictInfo(id=sequence.id, score=1.0, failure=""))
    run.core.progress(1, 120.0, rollout=DONE, reward=DONE, batch=RUNNING)
    run.after(at=120.0)
    seen = run.snapshot()
    assert seen.train.is_waiting and seen.train.left_s is None
    assert [crowd.step for crowd in seen.rollout.crowds] == [1]
    run.core.blocks.all[3].wanted = Role.TRAIN
    run.after(at=121.0)
    assert run.snapshot().train.left_s == pytest.approx(1.0 + 0.2), "called: the shift, and the training"
    run.core.bind(Role.TRAIN, 3)
    run.core.progress(1, 122.0, batch=DONE, train=RUNNING)
    run.after(at=122.0)
    run.core.progress(1, 130.0, train=DONE, publish=RUNNING)
    run.after(at=130.0)
    assert run.snapshot().train.left_s is not None, "until its version is there"
    run.core.versions.write(1)
    run.core.versions.seal(1)
    run.after(at=132.0)
    seen = run.snapshot()
    assert (seen.version, seen.train.left_s, seen.train.is_waiting) == (1, None, False)
    assert [crowd.step for crowd in seen.rollout.crowds] == [1]
    assert seen.train.step_s == pytest.approx((0.3 * 1.0 + 10.0) / 1.3, rel=0.1), "from 122 to 132"


def test_a_version_that_is_lost_is_made_again(run: Run) -> None:
    for step in (1, 2):
        run.core.admit(step)
        run.core.progress(step, 105.0, rollout=DONE, reward=DONE, batch=DONE, train=RUNNING)
        run.core.progress(step, 105.0, train=DONE, publish=DONE)
        run.core.versions.write(step)
        run.core.versions.seal(step)
        run.after(at=110.0 + step)
    assert run.snapshot().version == 2
    run.core.versions.reset(1)
    run.core.steps[2].stages["train"] = Progress.PENDING
    run.after(at=120.0)
    seen = run.snapshot()
    assert seen.version == 1 and seen.train.left_s is not None, "it has begun once, and is to begin again"


# --- shifts -----------------------------------------------------------------------------------------------------------


def shift(run: Run, block: int, old: Role, new: Role, event: ev.Event = TICK) -> None:
    """Two seconds down, three up."""
    core, start = run.core, run.now
    core.blocks.all[block].wanted = new
    del core.blocks.held[block]
    run.after(event, de.ShiftDown(worker=f"{old}-{block}", following=(f"{new}-{block}",), version=0))
    run.now = start + 2.0
    run.watcher.heard(
        Slept(worker=f"{old}-{block}", held_bytes=10, num_aborted=5, seconds={"tasks": 1.5, "release": 0.4})
    )
    run.after(ev.WorkerSlept(worker=f"{old}-{block}"), de.ShiftUp(worker=f"{new}-{block}", version=0))
    run.now = start + 5.0
    run.watcher.heard(Woken(worker=f"{new}-{block}", version=0, held_bytes=99, seconds={"read": 2.0, "cache": 0.5}))
    core.bind(new, block)
    run.after(ev.WorkerWoken(worker=f"{new}-{block}", version=0))


def test_shifts_are_measured_kept_and_counted(run: Run) -> None:
    run.after(ev.PlanMade(number=7, moves=((1, Role.REWARD),)), at=150.0)
    shift(run, 1, Role.ROLLOUT, Role.REWARD)
    shift(run, 3, Role.REWARD, Role.TRAIN)
    first, second = run.lines("shift")
    assert (first["block"], first["old"], first["new"], first["decision"]) == (1, "rollout", "reward", None)
    assert first["down_s"] == {"tasks": 1.5, "release": 0.4, "all": 2.0}
    assert first["up_s"] == {"read": 2.0, "cache": 0.5, "all": 3.0}
    assert (first["aborted"], first["asleep_bytes"], first["awake_bytes"]) == (5, 10, 99)
    assert first["took_s"] == pytest.approx(5.0) and not first["failure"] and second["new"] == "train"
    row = run.watcher.metrics(1)
    assert (row["shift/num"], row["shift/num_rollout_reward"], row["shift/num_train"]) == (2.0, 1.0, 1.0)
    assert (row["shift/down_s"], row["shift/up_s"], row["shift/aborted"]) == (2.0, 3.0, 10.0)
    assert "role/rollout/running" in row and "planner/cycle_s" in row
    assert run.watcher.metrics(2)["shift/num"] == 0.0, "each is of one row"
    assert run.snapshot().shift_s[Role.REWARD] > 2.0, "5 s were measured, .2 s believed"
    assert run.snapshot().last_shift_s == 150.0


def test_a_plan_that_moves_a_block_is_named_by_its_shift(run: Run) -> None:
    run.core.blocks.all[1].wanted = Role.REWARD
    del run.core.blocks.held[1]
    run.after(ev.PlanMade(number=7, moves=((1, Role.REWARD),)), at=150.0)
    run.core.bind(Role.REWARD, 1)
    run.after(at=151.0)
    assert [line["decision"] for line in run.lines("shift")] == [7]


def test_a_block_that_is_lost_ends_its_shift_and_comes_back_from_nowhere(run: Run) -> None:
    run.core.blocks.all[1].wanted = Role.REWARD
    del run.core.blocks.held[1]
    run.after()
    run.core.blocks.lost.add(1)
    run.core.blocks.all[1].wanted = None
    run.after()
    assert run.snapshot().blocks[1].is_silent
    run.core.blocks.lost.clear()
    run.core.blocks.all[1].wanted = Role.ROLLOUT
    run.after()
    seen = run.snapshot().blocks[1]
    assert (seen.role, seen.is_silent) == (Role.ROLLOUT, False) and seen.ready_in_s > 0
    run.core.bind(Role.ROLLOUT, 1)
    run.after(at=200.0)
    assert run.snapshot().blocks[1].ready_in_s == 0
    lost, back = run.lines("shift")
    assert (lost["failure"], lost["took_s"]) == ("lost", None) and back["old"] is None
    assert run.watcher.metrics(1)["shift/num"] == 0.0 and run.snapshot().shift_s[Role.ROLLOUT] == pytest.approx(0.2)


# --- the planner ------------------------------------------------------------------------------------------------------


def ask(run: Run, number: int = 1) -> ev.PlanMade:
    async def answered() -> ev.PlanMade:
        run.watcher.ask(number, "step 1 admitted")
        while True:
            await asyncio.sleep(0)
            for event in run.posted:
                if isinstance(event, ev.PlanMade) and event.number == number:
                    return event

    return asyncio.run(answered())


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


def foretell(seen: Snapshot, settings: PlannerSettings, bindings: Bindings) -> Plan:
    chosen = Candidate(num_rollout=1, num_reward=3, value_s=50.0, gain_s=6.0, penalty_s=1.0)
    return Plan(reason="foretold", moves={1: Role.REWARD}, candidates=(chosen,), chosen=0, cycle_s=20.0)


def live_through(run: Run) -> None:
    """Decision 9 at 100 s, which shifts; A is judged at 110 and published at 130, when B is judged, at 120, too."""
    run.core.admit(1)
    run.core.admit(2)
    run.after()
    made = ask(run, 9)
    shift(run, 1, Role.ROLLOUT, Role.REWARD, made)
    run.core.progress(1, 110.0, rollout=DONE, reward=DONE, batch=DONE, train=RUNNING)
    run.after(at=110.0)
    run.core.progress(2, 120.0, rollout=DONE, reward=DONE, batch=DONE)
    run.after(at=120.0)
    assert run.lines("worth") == []
    run.core.progress(1, 130.0, train=DONE)
    run.core.versions.write(1)
    run.core.versions.seal(1)
    run.after(at=130.0)
    run.after(at=140.0)


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


def test_costs_of_a_run_without_measurements_are_what_is_assumed(run: Run) -> None:
    assert isinstance(run.watcher.monitor.cost(Role.ROLLOUT), IterationCost)  # type: ignore[union-attr]
