"""What a run leaves of its slots, loads and steps, and what those who look on are shown."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.core import events as ev
from pipeline.core.dag import Progress, StepProgress
from pipeline.core.events import Finish, Role, VerdictInfo
from pipeline.core.worker import WorkerState
from pipeline.watching.book import began, read_book
from pipeline.watching.history import History, length_bin
from pipeline.watching.rates import Rates
from pipeline.watching.recent import RecentShifts
from pipeline.watching.shifts import Shift
from pipeline.watching.slots import Slots
from pipeline.wire import WorkerExited
from pipeline.wire_counts import Counts
from tests.fakes.blocks import FakeCore
from tests.fakes.plan import make_plan
from tests.fakes.watched import Run, live_through, shift


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "r")
    yield run
    run.watcher.close()


def lines(run: Run, kind: str) -> list[dict[str, Any]]:
    run.watcher._thread.submit(lambda: None).result()
    return [line for line in read_book(run.run.timeline) if line["kind"] == kind]


def changes(run: Run) -> list[tuple[float, str, str]]:
    """(seconds, slot, code) of all that was written."""
    found, names = [], {}
    for line in lines(run, "slots"):
        names |= line["names"]
        found += [(line["at"] + ms / 1e3, names[str(number)], code) for ms, number, code in line["changes"]]
    return found


# --- slots ------------------------------------------------------------------------------------------------------------


def doing(core: FakeCore) -> str:
    slots = Slots(core)
    slots.look()
    ordered = sorted(slots.all, key=lambda slot: (slot.node, slot.number))
    return "".join(slot.doing.code for slot in ordered)


def test_a_slot_does_what_its_worker_that_is_awake_does() -> None:
    core = FakeCore(make_plan(sequences_per_step=8, staleness=1), 6)
    core.bind(Role.ROLLOUT, 0, 1)
    core.bind(Role.REWARD, 2, 3)
    core.bind(Role.TRAIN, 4)
    assert doing(core) == "rrjjt."
    ids = core.admit(1)
    step = core.steps[1]
    step.tasks = {
        "rollout": {"a": "rollout-0", "b": "rollout-1"},
        "reward": {"c": "reward-2"},
        "train": {"d": "train-4"},
        "prompts": {"e": "rollout-1"},
    }
    core.sequences.dispatch(ids[0], "a")
    assert doing(core) == "RrjjT.", "a task that has no sequence, or makes prompts, leaves its slot idle"
    step.tasks = {"evaluate": {"a": "rollout-1"}, "publish": {"b": "train-4"}}
    assert doing(core) == "rEjjP."
    step.tasks = {"checkpoint": {"a": "train-4"}}
    workers = core.fleet.workers
    assert doing(core) == "rrjjC."
    workers["train-4"].state = WorkerState.ASLEEP
    workers["reward-4"].state = WorkerState.WAKING
    workers["rollout-1"].state = WorkerState.LOADING
    workers["reward-3"].state = WorkerState.LEAVING
    workers["rollout-5"].state = WorkerState.STARTING
    workers["reward-2"].state = WorkerState.FENCED
    assert doing(core) == "rL.XXS", "who saves in his sleep has no slot"


def test_who_works_on_several_slots_is_on_each_of_them() -> None:
    core = FakeCore(make_plan(sequences_per_step=8), 2)
    core.bind(Role.ROLLOUT, 0)
    core.fleet.workers["rollout-0"].slots = (0, 1)
    ids = core.admit(1)
    core.steps[1].tasks = {"rollout": {"a": "rollout-0"}}
    core.sequences.dispatch(ids[0], "a")
    slots = Slots(core)
    slots.look()
    assert [(s.number, s.doing.code, s.worker, s.num_running) for s in slots.all] == [
        (0, "R", "rollout-0", 1),
        (1, "R", "rollout-0", 1),
    ]


# --- timeline.jsonl ---------------------------------------------------------------------------------------------------


def test_changes_of_slots_are_written_with_their_moments(run: Run) -> None:
    run.watcher.look()
    assert changes(run) == [(100.0, f"n0:{i}", code) for i, code in enumerate("rrjj")]
    for moment in (100.05, 100.11, 100.25, 101.0, 101.2, 102.0):
        run.now = moment
        run.core.fleet.workers["rollout-1"].state = WorkerState.LEAVING if moment == 100.25 else WorkerState.READY
        run.watcher.look()
    assert changes(run)[4:] == [(100.25, "n0:1", "X"), (101.0, "n0:1", "r")]


def test_what_was_seen_last_is_written_at_the_end(run: Run) -> None:
    run.watcher.look()
    run.core.fleet.workers["rollout-1"].state = WorkerState.LEAVING
    run.now = 100.2
    run.watcher.look()
    run.watcher.close()
    run.watcher._thread.shutdown(wait=True)
    assert [line["changes"] for line in read_book(run.run.timeline) if line["kind"] == "slots"][-1] == [[0, 1, "X"]]


def test_a_step_leaves_what_ran_and_how_long_responses_and_verdicts_were(run: Run) -> None:
    ids = run.core.admit(1)
    for id in ids:
        run.give("rollout-0", id)
        run.close("rollout-0", id, 40, Finish.STOP)
        run.give("reward-2", id)
        verdict = VerdictInfo(id=id, score=1.0, failure="", num_tokens=9)
        run.core.sequences.judge("task of reward-2", verdict)
        run.after(ev.VerdictGiven(task="task of reward-2", verdicts=(verdict,)))
    step = run.core.steps[1]
    step.started, step.ended = {"rollout": 101.0, "record": 109.0}, {"rollout": 104.5}
    run.after(ev.StepRecorded(step=1), at=110.0)
    (line,) = lines(run, "step")
    assert line["spans"] == [["rollout", -9000, -5500], ["record", -1000, 0]] and line["at"] == 110.0
    assert line["lengths"] == {
        "rollout": {str(length_bin(40)): len(ids)},
        "reward": {str(length_bin(9)): len(ids)},
    }


def test_bins_of_lengths_grow_with_the_lengths() -> None:
    for tokens in (1, 2, 3, 7, 100, 16384, 131072):
        low, high = (2 ** (b / 4) for b in (length_bin(tokens), length_bin(tokens) + 1))
        assert low <= tokens < high and high / low == pytest.approx(2**0.25)
    assert length_bin(0) == 0


def test_the_samples_of_a_day_are_not_many_more_than_those_of_an_hour() -> None:
    core = FakeCore(make_plan(), 1)
    history, loads = History(core, 0.0), {3600: 0, 86400: 0}
    num = looked = 0
    now = 0.0
    while now < 86400:
        num += sum(kind == "load" for kind, _, _ in history.look(now))
        looked += 1
        loads[3600] = num if now < 3600 else loads[3600]
        now = max(history._look_at, now + 0.05)
    assert 2000 < loads[3600] < 6000 and num < 2000 * (2 + math.log(86400 / 1000)) and looked < 70_000


def test_an_attempt_goes_on_with_the_age_of_the_run(tmp_path: Path) -> None:
    first = Run(tmp_path / "r")
    first.watcher.look()
    first.watcher.close()
    first.watcher._thread.shutdown(wait=True)
    path = first.run.timeline
    line = json.loads(path.read_text().splitlines()[0])
    path.write_text(json.dumps(line | {"wall": line["wall"] - 36_000}) + "\n")
    assert began(path) == pytest.approx(line["wall"] - 36_000)
    again = Run(tmp_path / "r")
    again.watcher.look()
    assert again.watcher._seen.history._look_at - again.now == pytest.approx(3.6, abs=0.1), "ten hours: 1 / 10,000"
    again.watcher.close()
    assert began(tmp_path / "gone") is None


def test_a_timeline_that_cannot_be_written_ends_nothing(run: Run) -> None:
    run.run.timeline.mkdir()
    run.watcher.look()
    run.now += 10
    run.watcher.look()
    run.watcher._thread.submit(lambda: None).result()
    assert run.watcher.picture()["slots"]


# --- rates ------------------------------------------------------------------------------------------------------------


def counts(worker: str, num_tokens: int) -> Counts:
    return Counts(worker=worker, running=1, waiting=0, num_tokens=num_tokens, rss_bytes=1)


def test_tokens_per_second_are_those_between_two_looks() -> None:
    rates = Rates()
    for at, num_tokens in ((0.0, 0), (0.5, 100), (1.0, 300)):
        rates.heard(counts("a", num_tokens), at)
    rates.look(1.0)
    assert rates.of == {"a": 300.0}
    rates.look(2.0)
    assert rates.of == {"a": 300.0}, "it may be within a long prefill"
    rates.look(3.0)
    assert rates.of == {"a": 0.0}
    rates.heard(counts("a", 500), 3.5)
    rates.look(4.0)
    assert rates.of == {"a": 400.0}, "since it was seen idle"
    rates.heard(counts("a", 10), 5.0)
    rates.heard(counts("a", 30), 6.0)
    rates.look(6.0)
    assert rates.of == {"a": 20.0}, "another process, which counts anew"
    rates.ended("a")
    rates.look(7.0)
    assert rates.of == {}


# --- who looks on -----------------------------------------------------------------------------------------------------


def test_the_picture_says_what_slots_queues_and_steps_do(run: Run) -> None:
    ids = run.core.admit(1)
    step = run.core.steps[1]
    step.started["prompts"] = 98.0
    step.stages["rollout"] = Progress.RUNNING
    step.tasks = {"rollout": {"task of rollout-0": "rollout-0"}}
    run.give("rollout-0", *ids[:3])
    run.close("rollout-0", ids[0], 40, Finish.STOP)
    for at, num_tokens in ((100.2, 0), (101.2, 70)):
        run.now = at
        run.watcher.heard(counts("rollout-0", num_tokens))
        run.watcher.look()
    run.now = 102.0
    run.watcher.look()
    seen = run.watcher.picture()
    first = {"node": "n0", "slot": 0, "role": "rollout", "state": "work", "worker": "rollout-0"}
    assert seen["slots"][0] == first | {"running": 2, "tokens_per_s": 70.0}
    assert [slot["state"] for slot in seen["slots"]] == ["work", "idle", "idle", "idle"]
    assert seen["queues"] == {
        "rollout": {"waiting": len(ids) - 3, "running": 2},
        "reward": {"waiting": 1, "running": 0},
    }
    (told,) = seen["steps"]
    assert (told["step"], told["sequences"], told["rolled_out"], told["scored"]) == (1, len(ids), 1, 0)
    assert told["running"] == ["rollout"] and told["expected_s"] is None
    run.watcher.heard(WorkerExited(worker="rollout-0", life=0, reason="gone"))
    assert run.watcher.picture()["slots"][0]["tokens_per_s"] == 0.0
    json.dumps(seen, allow_nan=False)


def test_a_step_is_expected_to_take_as_long_as_its_like(run: Run) -> None:
    def live(number: int, took_s: float) -> None:
        step = run.core.steps[number] = StepProgress.open(number, set())
        step.started["prompts"] = run.now
        step.started["record"] = run.now + took_s
        run.after(ev.StepRecorded(step=number), at=run.now + took_s)

    for number, took_s in ((1, 20.0), (2, 30.0), (3, 22.0), (4, 34.0)):
        live(number, took_s)
    assert run.watcher._seen._took_s == {1: 20.0, 2: 30.0, 3: 22.0, 4: 34.0}
    run.core.steps.clear()
    for number in (5, 6):
        run.core.admit(number)
        run.core.steps[number].started["prompts"] = run.now
    expected = {step["step"]: step["expected_s"] for step in run.watcher.picture()["steps"]}
    assert expected == {5: 21.0, 6: 32.0}


def test_the_last_shifts_are_told_with_what_they_were_worth(tmp_path: Path) -> None:
    from tests.fakes.watched import foretell

    run = Run(tmp_path / "r", decide=foretell)
    live_through(run)
    run.watcher._thread.submit(lambda: None).result()
    (told,) = run.watcher.picture()["shifts"]
    assert (told["old"], told["new"], told["slots"], told["decision"]) == ("rollout", "reward", 1, 9)
    assert told["predicted_gain_s"] == 6.0 and told["took_s"] == pytest.approx(5.0)
    (worth,) = run.lines("worth")
    assert told["measured_gain_s"] == worth["measured_gain_s"]
    (line,) = run.lines("shift")
    assert line["slots"] == ["n0:1"]
    shift(run, 2, Role.REWARD, Role.ROLLOUT)
    assert [one["decision"] for one in run.watcher.picture()["shifts"]] == [9, None]
    assert run.watcher.picture()["shifts"][-1]["predicted_gain_s"] is None
    run.watcher.close()


def ended(block: int, **more: Any) -> Shift:
    values = {"old": Role.ROLLOUT, "new": Role.REWARD, "begun_s": 1.0, "ended_s": 1.5, "decision": 3}
    return Shift(block=block, **(values | more))


def test_blocks_that_move_together_are_one_shift_and_only_the_last_ones_are_kept() -> None:
    recent = RecentShifts(block_slots=2)
    recent.weighed(3, 1.0)
    recent.decided(3, 4.0)
    recent.ended(ended(0), wall=50.0, step=7)
    recent.ended(ended(1, ended_s=1.9), wall=50.3, step=7)
    recent.ended(ended(2, new=Role.TRAIN), wall=50.4, step=7)
    recent.ended(ended(3, ended_s=None, failure="lost"), wall=50.4, step=7)
    recent.ended(ended(4, old=None), wall=50.4, step=7)
    first, second = recent.told()
    assert (first["slots"], second["slots"], second["new"]) == (4, 2, "train")
    assert first["took_s"] == pytest.approx(0.9) and first["measured_gain_s"] is None
    recent.weighed(3, 2.5)
    assert recent.told()[0]["measured_gain_s"] == 2.5
    for number in range(100):
        recent.decided(10 + number, 0.0)
        recent.ended(ended(0, decision=10 + number), wall=60.0 + 3 * number, step=8)
    assert len(recent.told()) == 6 and len(recent._gains) <= 64
