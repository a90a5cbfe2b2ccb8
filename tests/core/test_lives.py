"""The three tables: what the machines accept and refuse, state by state, and what the pages in docs/lives show."""

from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from pipeline.core import sequences
from pipeline.core.events import Finish, RestoredSequence, Role, SegmentInfo, VerdictInfo
from pipeline.core.sequences import Place, SequenceChange, Sequences
from pipeline.core.versions import VersionChange, Versions, VersionState
from pipeline.core.worker import Worker, WorkerChange, WorkerState
from tests.core.tables import CHANGES, LIVES, STATES, Pair, name

DOCS = Path(__file__).parents[2] / "docs" / "lives"
PAIRS = [(life, state, change) for life in LIVES for state in STATES[life] for change in CHANGES[life]]


def way_to(life: Mapping[Pair, object], start: object, goal: object) -> list[object]:
    """The changes that lead from one state to another."""
    ways: dict[object, list[object]] = {start: []}
    todo = deque([start])
    while todo:
        state = todo.popleft()
        for (before, change), after in life.items():
            if before == state and after not in ways:
                ways[after] = [*ways[state], change]
                todo.append(after)
    return ways[goal]


class OneSequence:
    """A sequence that is moved through the public methods of its ledger."""

    start = sequences.WAITING[Role.ROLLOUT]

    def __init__(self) -> None:
        self.all = Sequences()
        self.all.admit(1, ["000001-00000-0000"])
        self.one = self.all["000001-00000-0000"]

    @property
    def state(self) -> Place:
        waiting = [place for place, queue in self.all.waiting.items() if self.one.id in queue]
        assert waiting == [p for p in self.all.waiting if p == self.one.place], "the queues say the same"
        assert bool(self.one.task) == (self.one.state is sequences.SequenceState.RUNNING)
        return self.one.place

    def change(self, change: object) -> None:
        all, one = self.all, self.one
        match change:
            case SequenceChange.DISPATCHED:
                all.dispatch(one.id, "task")
            case SequenceChange.FLUSHED | SequenceChange.ABORTED | SequenceChange.GENERATED:
                finish = next(f for f, c in sequences.CHANGE_OF.items() if c == change)
                segment = SegmentInfo(id=one.id, idx=one.num_segments, num_tokens=1, version=0, finish=finish)
                all.close("task", segment)
            case SequenceChange.JUDGED:
                all.judge("task", VerdictInfo(id=one.id, score=1.0, failure=""))
            case SequenceChange.RELEASED:
                all.release("task")
            case SequenceChange.BATCHED:
                all.batch(1, [one.id], [])
            case SequenceChange.DROPPED:
                all.batch(1, [], [(one.id, "reason")])
            case SequenceChange.TRAINED:
                all.trained(1)


class OneVersion:
    start = VersionState.UNWRITTEN

    def __init__(self) -> None:
        self.all = Versions()

    @property
    def state(self) -> VersionState:
        return self.all.state(1)

    def change(self, change: object) -> None:
        match change:
            case VersionChange.WRITTEN:
                self.all.write(1)
            case VersionChange.LOST:
                self.all.lose(1)
            case VersionChange.SEALED:
                self.all.seal(1)
            case VersionChange.SUPERSEDED:
                self.all.write(2)
                self.all.seal(2)


class OneWorker:
    start = WorkerState.PLANNED

    def __init__(self) -> None:
        self.one = Worker("rollout-0", Role.ROLLOUT, 0, "n0", (0,))

    @property
    def state(self) -> WorkerState:
        return self.one.state

    def change(self, change: object) -> None:
        match change:
            case WorkerChange.STARTED:
                self.one.start(0, 1)
            case WorkerChange.REPORTED:
                self.one.is_shared = False
                self.one.report(0)
            case WorkerChange.SLEPT if self.one.state is WorkerState.STARTING:
                self.one.is_shared = True
                self.one.report(0, is_asleep=True)
            case WorkerChange.SLEPT:
                self.one.sleep()
            case WorkerChange.SENT_DOWN:
                self.one.send_down()
            case WorkerChange.CALLED:
                self.one.call(1)
            case WorkerChange.WOKEN:
                self.one.wake(1)
            case WorkerChange.REFUSED if self.one.state is WorkerState.WAKING:
                self.one.fail_to_wake("no memory")
            case WorkerChange.ASKED:
                self.one.ask(1)
            case WorkerChange.LOADED:
                self.one.load(1)
            case WorkerChange.REFUSED:
                self.one.refuse(1, "shapes")
            case WorkerChange.EXPIRED:
                self.one.expire("limit exceeded")
            case WorkerChange.DIED:
                self.one.die()


ONES: Mapping[str, Callable[[], OneSequence | OneVersion | OneWorker]] = {
    "sequence": OneSequence,
    "version": OneVersion,
    "worker": OneWorker,
}


@pytest.mark.parametrize(("life", "state", "change"), PAIRS, ids=lambda value: str(value))
def test_a_machine_does_what_its_table_says_and_nothing_else(life: str, state: object, change: object) -> None:
    one = ONES[life]()
    for step in way_to(LIVES[life], one.start, state):
        one.change(step)
    assert one.state == state
    try:
        one.change(change)
    except AssertionError:
        assert (state, change) not in LIVES[life]
    assert one.state == LIVES[life].get((state, change), state)


def test_only_the_owner_may_report() -> None:
    one = OneSequence()
    one.change(SequenceChange.DISPATCHED)
    segment = SegmentInfo(id=one.one.id, idx=0, num_tokens=1, version=0, finish=Finish.STOP)
    assert not one.all.close("other", segment) and not one.all.close("", segment)
    assert one.all.close("task", segment)
    assert not one.all.close("task", segment), "it ended"


def test_what_comes_back_waits_in_front_in_submission_order() -> None:
    all = Sequences()
    ids = [f"000001-00000-{i:04d}" for i in range(5)]
    all.admit(1, ids)
    for seq_id in ids[:4]:
        all.dispatch(seq_id, "a" if seq_id != ids[1] else "b")
    waiting = all.waiting[sequences.WAITING[Role.ROLLOUT]]
    assert list(waiting) == ids[4:]
    all.close("b", SegmentInfo(id=ids[1], idx=0, num_tokens=2, version=3, finish=Finish.ABORT))
    assert list(waiting) == [ids[1], ids[4]]
    assert (all[ids[1]].num_tokens, all[ids[1]].max_version) == (2, 3), "it keeps its tokens"
    all.release("a")
    assert list(waiting) == [ids[0], ids[2], ids[3], ids[1], ids[4]]


def test_a_version_older_than_that_of_the_last_segment_is_a_fault() -> None:
    one = OneSequence()
    one.change(SequenceChange.DISPATCHED)
    for idx, version in enumerate((1, 1, 2)):
        segment = SegmentInfo(id=one.one.id, idx=idx, num_tokens=1, version=version, finish=Finish.FLUSH)
        assert one.all.close("task", segment)
    with pytest.raises(AssertionError):
        one.all.close("task", SegmentInfo(id=one.one.id, idx=3, num_tokens=1, version=1, finish=Finish.FLUSH))


def test_only_the_version_that_was_asked_for_counts_as_loaded() -> None:
    worker = Worker("rollout-0", Role.ROLLOUT, 0, "n0", (0,))
    worker.start(0, 1)
    worker.report(0)
    worker.ask(2)
    assert not worker.load(1) and not worker.refuse(1, "shapes") and worker.version == 0
    assert worker.load(2) and worker.version == 2


def test_a_sequence_cannot_be_restored_in_an_unknown_state() -> None:
    with pytest.raises(ValueError, match="000001-00000-0000 restored in unknown state 'lost'"):
        Sequences().restore(1, RestoredSequence(id="000001-00000-0000", state="lost"))


# --- the pages ------------------------------------------------------------------------------------------------------


def table_of(life: Mapping[Pair, object]) -> str:
    """The table of transitions as a page shows it."""
    rows = [f"| {name(state)} | {change} | {name(after)} |" for (state, change), after in life.items()]
    return "\n".join(["| state | what happens | state after |", "|---|---|---|", *rows])


def restored_table() -> str:
    rows = [f"| {state} | {name(place)} |" for state, place in sequences.RESTORED_TO.items()]
    return "\n".join(["| in the index | goes on as |", "|---|---|", *rows])


@pytest.mark.parametrize("life", LIVES)
def test_a_page_shows_the_table_of_the_code(life: str) -> None:
    page = (DOCS / f"{life}.md").read_text(encoding="utf-8")
    tables = [table_of(LIVES[life]), *([restored_table()] if life == "sequence" else [])]
    missing = [table for table in tables if table not in page]
    assert not missing, f"docs/lives/{life}.md is to contain:\n\n" + "\n\n".join(missing)
    assert page.count("|---|") == sum(table.count("|---|") for table in tables), "and no other table"
    undescribed = [name(state) for state in STATES[life] if f"**{name(state)}**" not in page]
    assert not undescribed, "each state is described"
