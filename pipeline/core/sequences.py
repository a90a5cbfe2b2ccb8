"""The life of a sequence: one response, from admission to training.

    WAITING(rollout) ▶ RUNNING(rollout) ▶ WAITING(reward) ▶ RUNNING(reward) ▶ SCORED ▶ BATCHED ▶ TRAINED
    SCORED ▶ DROPPED(reason); an abort takes RUNNING to the front of WAITING of the same role.

Invariants: a sequence is in one place; its turn only grows; its tokens only grow; the versions of its segments
never decrease.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pipeline.core.events import INFERENCE, Finish, RestoredSequence, Role, SegmentInfo, VerdictInfo
from pipeline.core.scheduler import WaitingQueue


class SequenceState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    SCORED = "scored"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"


class Place(NamedTuple):
    """Where a sequence is; `role` serves it while it is WAITING or RUNNING."""

    state: SequenceState
    role: Role | None = None

    def __str__(self) -> str:
        return f"{self.state.upper()}({self.role})" if self.role else self.state.upper()


class SequenceChange(StrEnum):
    """What happens to a sequence."""

    DISPATCHED = "dispatched"
    FLUSHED = "flushed"
    GENERATED = "generated"
    JUDGED = "judged"
    ABORTED = "aborted"
    RELEASED = "released"
    BATCHED = "batched"
    DROPPED = "dropped"
    TRAINED = "trained"


WAITING = {role: Place(SequenceState.WAITING, role) for role in INFERENCE}
RUNNING = {role: Place(SequenceState.RUNNING, role) for role in INFERENCE}
SCORED, BATCHED = Place(SequenceState.SCORED), Place(SequenceState.BATCHED)
TRAINED, DROPPED = Place(SequenceState.TRAINED), Place(SequenceState.DROPPED)
PLACES = (*WAITING.values(), *RUNNING.values(), SCORED, BATCHED, TRAINED, DROPPED)

LIFE: Mapping[tuple[Place, SequenceChange], Place] = {
    (WAITING[Role.ROLLOUT], SequenceChange.DISPATCHED): RUNNING[Role.ROLLOUT],
    (RUNNING[Role.ROLLOUT], SequenceChange.FLUSHED): RUNNING[Role.ROLLOUT],
    (RUNNING[Role.ROLLOUT], SequenceChange.ABORTED): WAITING[Role.ROLLOUT],
    (RUNNING[Role.ROLLOUT], SequenceChange.RELEASED): WAITING[Role.ROLLOUT],
    (RUNNING[Role.ROLLOUT], SequenceChange.GENERATED): WAITING[Role.REWARD],
    (WAITING[Role.REWARD], SequenceChange.DISPATCHED): RUNNING[Role.REWARD],
    (RUNNING[Role.REWARD], SequenceChange.ABORTED): WAITING[Role.REWARD],
    (RUNNING[Role.REWARD], SequenceChange.RELEASED): WAITING[Role.REWARD],
    (RUNNING[Role.REWARD], SequenceChange.JUDGED): SCORED,
    (SCORED, SequenceChange.BATCHED): BATCHED,
    (SCORED, SequenceChange.DROPPED): DROPPED,
    (BATCHED, SequenceChange.TRAINED): TRAINED,
}
"""The life of a sequence; what is not in it is illegal. Nothing leads out of TRAINED and DROPPED."""

CHANGE_OF = {
    Finish.FLUSH: SequenceChange.FLUSHED,
    Finish.ABORT: SequenceChange.ABORTED,
    Finish.STOP: SequenceChange.GENERATED,
    Finish.LENGTH: SequenceChange.GENERATED,
}
"""What the end of a segment does to its sequence."""

RESTORED_TO = {
    "admitted": WAITING[Role.ROLLOUT],
    "generated": WAITING[Role.REWARD],
    "scored": SCORED,
    "batched": BATCHED,
    "dropped": DROPPED,
}
"""Where a sequence goes on that the queue's index holds in this state."""


@dataclass(slots=True)
class Sequence:
    """`task` owns it while it is RUNNING; `turn` counts its dispatches in this attempt.

    What a task put and could not report before it died is not known here: `num_tokens` and `num_segments` may be too
    small, and `max_version` is only known to be no older than that (`suspect`).
    """

    id: str
    step: int
    group: str
    place: Place = WAITING[Role.ROLLOUT]
    task: str = ""
    turn: int = 0
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_segments: int = 0
    min_version: int | None = None
    max_version: int | None = None
    score: float | None = None
    failure: str = ""
    reason: str = ""

    @property
    def context(self) -> int:
        """Tokens that whoever serves it has to read, as far as they are known."""
        return self.num_prompt_tokens + self.num_tokens

    @property
    def state(self) -> SequenceState:
        return self.place.state

    @property
    def generated(self) -> int:
        """Tokens that are known of the role which serves it. A judge's are not known before its verdict."""
        return self.num_tokens if self.place.role is Role.ROLLOUT else 0


def group_of(seq_id: str) -> str:
    """The responses to one prompt in one step share this."""
    return seq_id.rsplit("-", 1)[0]


class Sequences:
    """All sequences of the open steps, and the two queues in which they wait."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._by_step: dict[int, list[str]] = {}
        self._running: dict[str, dict[str, None]] = {}  # by task
        self._context: Counter[str] = Counter()  # of these, in sum
        self._num_at: Counter[Place] = Counter()
        self._num_of: dict[int, Counter[Place]] = {}
        self._queues: dict[Place, WaitingQueue[Sequence]] = {place: WaitingQueue() for place in WAITING.values()}
        self.newest_version = 0
        """No sequence has a token of a newer one, or may have."""
        self.waiting: dict[Place, deque[str]] = {place: deque() for place in WAITING.values()}

    def __getitem__(self, seq_id: str) -> Sequence:
        return self._by_id[seq_id]

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._by_id

    def of_step(self, step: int) -> list[Sequence]:
        """In submission order."""
        return [self._by_id[i] for i in self._by_step.get(step, ())]

    def num_running(self, task: str) -> int:
        return len(self._running.get(task, ()))

    def running(self, task: str) -> list[Sequence]:
        return [self._by_id[i] for i in self._running.get(task, ())]

    def context(self, task: str) -> int:
        """Tokens of all that it runs."""
        return self._context[task]

    def num_at(self, place: Place) -> int:
        return self._num_at[place]

    def num_of(self, step: int, *places: Place) -> int:
        """How many sequences of the step are at one of these."""
        num = self._num_of.get(step)
        return 0 if num is None else sum(num[place] for place in places)

    def size(self, step: int) -> int:
        return len(self._by_step.get(step, ()))

    def queue(self, role: Role) -> WaitingQueue[Sequence]:
        """All that wait for it, in their turn. Who takes one out of it dispatches it, or puts it back."""
        place = WAITING[role]
        if len(self._queues[place]) != len(self.waiting[place]):
            self._queues[place] = WaitingQueue(self._by_id[i] for i in self.waiting[place])
        return self._queues[place]

    def admit(self, step: int, ids: Listed[str], num_prompt_tokens: Listed[int] = ()) -> None:
        """Known ids are left as they are, but for the length of their prompts: admission is repeated after a crash."""
        for seq_id, num in zip(ids, num_prompt_tokens or [0] * len(ids), strict=True):
            if seq_id not in self._by_id:
                self._insert(Sequence(id=seq_id, step=step, group=group_of(seq_id), num_prompt_tokens=num))
            elif self._by_id[seq_id].state is SequenceState.WAITING:
                self._by_id[seq_id].num_prompt_tokens = num
        self._by_step.get(step, []).sort()

    def restore(self, step: int, stored: RestoredSequence) -> None:
        """Take over what the queue's index holds after a crash. Raises ValueError for a state that it cannot hold."""
        if stored.state not in RESTORED_TO:
            raise ValueError(f"sequence {stored.id} restored in unknown state {stored.state!r}")
        self._insert(
            Sequence(
                id=stored.id,
                step=step,
                group=group_of(stored.id),
                place=RESTORED_TO[stored.state],
                num_tokens=stored.num_tokens,
                num_segments=stored.num_segments,
                min_version=stored.min_version,
                max_version=stored.max_version,
                score=stored.score,
                failure=stored.failure,
            )
        )

    def dispatch(self, seq_id: str, task: str) -> int:
        """WAITING ▶ RUNNING; returns the turn."""
        seq = self._by_id[seq_id]
        self._must_move(seq, SequenceChange.DISPATCHED)
        seq.task, seq.turn = task, seq.turn + 1
        self._running.setdefault(task, {})[seq_id] = None
        self._context[task] += seq.context
        return seq.turn

    def close(self, task: str, segment: SegmentInfo) -> bool:
        """A segment of a RUNNING sequence was closed. False, and nothing changes, for what was reported before, by
        another task than its owner, or of a sequence that has no such segments."""
        seq = self._owned(task, segment.id)
        if seq is None or (segment.num_tokens and segment.idx < seq.num_segments):
            return False
        change = CHANGE_OF[segment.finish]
        if (seq.place, change) not in LIFE:
            return False
        if segment.num_tokens:
            assert seq.max_version is None or segment.version >= seq.max_version, (seq, segment)
            seq.num_tokens += segment.num_tokens
            self._context[task] += segment.num_tokens
            seq.num_segments = segment.idx + 1
            seq.min_version = segment.version if seq.min_version is None else seq.min_version
            seq.max_version = segment.version
            self.newest_version = max(self.newest_version, segment.version)
        self._must_move(seq, change)  # when its tokens are counted: its turn depends on them
        return True

    def judge(self, task: str, verdict: VerdictInfo) -> bool:
        """RUNNING(reward) ▶ SCORED, with a score or a failure. False if `task` does not own it."""
        seq = self._owned(task, verdict.id)
        if seq is None or not self._move(seq, SequenceChange.JUDGED):
            return False
        seq.score, seq.failure = verdict.score, verdict.failure
        return True

    def release(self, task: str) -> None:
        """The task is gone: what it ran waits again, in front, in submission order."""
        for seq_id in sorted(self._running.get(task, ()), reverse=True):
            self._must_move(self._by_id[seq_id], SequenceChange.RELEASED)
        self._running.pop(task, None)
        del self._context[task]

    def suspect(self, version: int) -> None:
        """What was lost may have put segments of versions up to this one, and not said so: those who were dispatched
        before go on under no older one."""
        self.newest_version = max(self.newest_version, version)
        for seq_id in self.waiting[WAITING[Role.ROLLOUT]]:
            seq = self._by_id[seq_id]
            if seq.turn:
                seq.max_version = max(version, seq.max_version or 0)

    def refuse(self, step: int, drops: Iterable[tuple[str, str]]) -> None:
        """These are dropped when the batch of the step is made. What is no sequence of it changes nothing."""
        for seq_id, reason in drops:
            seq = self._by_id.get(seq_id)
            if seq is not None and seq.step == step and seq.state is not SequenceState.BATCHED:
                seq.reason = reason

    def batch(self, step: int, ids: Iterable[str], dropped: Iterable[tuple[str, str]]) -> None:
        for seq_id in ids:
            seq = self._by_id[seq_id]
            assert seq.score is not None and seq.step == step, seq
            self._must_move(seq, SequenceChange.BATCHED)
        for seq_id, reason in dropped:
            self._must_move(self._by_id[seq_id], SequenceChange.DROPPED)
            self._by_id[seq_id].reason = reason

    def trained(self, step: int) -> None:
        """Those that were trained before (the trainer was lost since) stay so."""
        for seq in self.of_step(step):
            self._move(seq, SequenceChange.TRAINED)

    def forget(self, step: int) -> None:
        """The step is recorded: its sequences have ended their lives."""
        for seq_id in self._by_step.pop(step, ()):
            seq = self._by_id.pop(seq_id)
            self._num_at[seq.place] -= 1
            assert seq.place in (TRAINED, DROPPED), seq
        self._num_of.pop(step, None)

    def _insert(self, seq: Sequence) -> None:
        self._by_id[seq.id] = seq
        self._by_step.setdefault(seq.step, []).append(seq.id)
        self._num_at[seq.place] += 1
        self._num_of.setdefault(seq.step, Counter())[seq.place] += 1
        self.newest_version = max(self.newest_version, seq.max_version or 0)
        if seq.place in self.waiting:
            self.waiting[seq.place].append(seq.id)
            self._line_up(seq)

    def _line_up(self, seq: Sequence) -> None:
        """It waits now. A queue that lacks some, or has too many, is made again when it is asked for."""
        queue = self._queues[seq.place]
        if len(queue) + 1 == len(self.waiting[seq.place]):
            queue.put([seq])
        else:
            queue.heap.clear()

    def _owned(self, task: str, seq_id: str) -> Sequence | None:
        seq = self._by_id.get(seq_id)
        return seq if seq is not None and seq.task and seq.task == task else None

    def _must_move(self, seq: Sequence, change: SequenceChange) -> None:
        moved = self._move(seq, change)
        assert moved, (change, seq)

    def _move(self, seq: Sequence, change: SequenceChange) -> bool:
        """Take the change if it is legal, and keep the two queues in step with it. Else False: nothing changes."""
        after = LIFE.get((seq.place, change))
        if after is None:
            return False
        before, seq.place = seq.place, after
        for num in (self._num_at, self._num_of[seq.step]):
            num[before] -= 1
            num[after] += 1
        if before in self.waiting:
            self.waiting[before].remove(seq.id)
        if after in self.waiting:
            queue = self.waiting[after]
            (queue.append if change is SequenceChange.GENERATED else queue.appendleft)(seq.id)
            self._line_up(seq)
        if seq.task and after.state is not SequenceState.RUNNING:
            del self._running[seq.task][seq.id]
            self._context[seq.task] -= seq.context
            seq.task = ""
        return True


def plan_batch(sequences: Iterable[Sequence]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The step's batch in submission order, and who is dropped why.

    A member whose judge failed has no reward and is masked from its group, and so is one that a user's stage refused; a
    group that keeps fewer than two members says nothing about which response is better, so it is dropped whole.
    """
    groups: dict[str, list[Sequence]] = {}
    for seq in sequences:
        groups.setdefault(seq.group, []).append(seq)
    ids: list[str] = []
    dropped: list[tuple[str, str]] = []
    for members in groups.values():
        valid = [s for s in members if s.score is not None and not s.reason]
        dropped += [(s.id, s.reason or f"judge:{s.failure}") for s in members if s.score is None or s.reason]
        if len(valid) >= 2:
            ids += [s.id for s in valid]
        else:
            dropped += [(s.id, "group_too_small") for s in valid]
    return tuple(sorted(ids)), tuple(sorted(dropped))
