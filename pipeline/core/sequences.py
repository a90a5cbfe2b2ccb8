"""The life of a sequence: one response, from admission to training.

    WAITING(rollout) ▶ RUNNING(rollout) ▶ WAITING(reward) ▶ RUNNING(reward) ▶ SCORED ▶ BATCHED ▶ TRAINED
    DROPPED(reason) from any of them; an abort takes RUNNING to the front of WAITING of the same role.

Invariants: a sequence is in one place; its turn only grows; its tokens only grow; the versions of its segments
never decrease.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from pipeline.core.events import Finish, RestoredSequence, Role, SegmentInfo, VerdictInfo


class SequenceState(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    SCORED = "scored"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(slots=True)
class Sequence:
    """`task` owns it while it is RUNNING; `turn` counts its dispatches in this attempt."""

    id: str
    step: int
    group: str
    role: Role = Role.ROLLOUT
    state: SequenceState = SequenceState.WAITING
    task: str = ""
    turn: int = 0
    num_tokens: int = 0
    min_version: int | None = None
    max_version: int | None = None
    score: float | None = None
    failure: str = ""
    reason: str = ""


def group_of(seq_id: str) -> str:
    """The responses to one prompt in one step share this."""
    return seq_id.rsplit("-", 1)[0]


class Sequences:
    """All sequences of the open steps, and the two queues in which they wait."""

    def __init__(self) -> None:
        self._by_id: dict[str, Sequence] = {}
        self._by_step: dict[int, list[str]] = {}
        self.waiting: dict[Role, deque[str]] = {Role.ROLLOUT: deque(), Role.REWARD: deque()}

    def __getitem__(self, seq_id: str) -> Sequence:
        return self._by_id[seq_id]

    def __contains__(self, seq_id: str) -> bool:
        return seq_id in self._by_id

    def of_step(self, step: int) -> list[Sequence]:
        """In submission order."""
        return [self._by_id[i] for i in self._by_step.get(step, ())]

    def running_on(self, task: str) -> Iterator[Sequence]:
        return (s for s in self._by_id.values() if s.state is SequenceState.RUNNING and s.task == task)

    def admit(self, step: int, ids: Iterable[str]) -> None:
        """Known ids are left as they are: admission is repeated after a crash."""
        for seq_id in ids:
            if seq_id not in self._by_id:
                self._insert(Sequence(id=seq_id, step=step, group=group_of(seq_id)))
                self.waiting[Role.ROLLOUT].append(seq_id)
        self._by_step.get(step, []).sort()

    def restore(self, step: int, stored: RestoredSequence) -> None:
        """Take over what the queue's index holds after a crash."""
        seq = Sequence(
            id=stored.id,
            step=step,
            group=group_of(stored.id),
            num_tokens=stored.num_tokens,
            min_version=stored.min_version,
            max_version=stored.max_version,
            score=stored.score,
            failure=stored.failure,
        )
        self._insert(seq)
        match stored.state:
            case "admitted":
                self.waiting[Role.ROLLOUT].append(seq.id)
            case "generated":
                seq.role = Role.REWARD
                self.waiting[Role.REWARD].append(seq.id)
            case "scored" | "batched" | "trained" | "dropped":
                seq.role = Role.REWARD
                seq.state = SequenceState(stored.state)
            case other:
                raise ValueError(f"sequence {stored.id} restored in unknown state {other!r}")

    def dispatch(self, seq_id: str, task: str) -> int:
        """WAITING ▶ RUNNING; returns the turn."""
        seq = self._by_id[seq_id]
        assert seq.state is SequenceState.WAITING, seq
        self.waiting[seq.role].remove(seq_id)
        seq.state, seq.task, seq.turn = SequenceState.RUNNING, task, seq.turn + 1
        return seq.turn

    def close(self, task: str, segment: SegmentInfo) -> bool:
        """A segment of a RUNNING rollout was closed. False, and nothing changes, if `task` does not own it."""
        seq = self._by_id.get(segment.id)
        if seq is None or seq.state is not SequenceState.RUNNING or seq.task != task or seq.role is not Role.ROLLOUT:
            return False
        if segment.num_tokens:
            assert seq.max_version is None or segment.version >= seq.max_version, (seq, segment)
            seq.num_tokens += segment.num_tokens
            seq.min_version = segment.version if seq.min_version is None else seq.min_version
            seq.max_version = segment.version
        match segment.finish:
            case Finish.FLUSH:
                pass
            case Finish.ABORT:
                self._wait_in_front(seq)
            case Finish.STOP | Finish.LENGTH:
                seq.role, seq.state, seq.task = Role.REWARD, SequenceState.WAITING, ""
                self.waiting[Role.REWARD].append(seq.id)
        return True

    def judge(self, task: str, verdict: VerdictInfo) -> bool:
        """RUNNING(reward) ▶ SCORED, with a score or a failure. False if `task` does not own it."""
        seq = self._by_id.get(verdict.id)
        if seq is None or seq.state is not SequenceState.RUNNING or seq.task != task or seq.role is not Role.REWARD:
            return False
        seq.state, seq.task = SequenceState.SCORED, ""
        seq.score, seq.failure = verdict.score, verdict.failure
        return True

    def release(self, task: str) -> None:
        """The task is gone: what it ran waits again, in front, in submission order."""
        for seq in sorted(self.running_on(task), key=lambda s: s.id, reverse=True):
            self._wait_in_front(seq)

    def batch(self, step: int, ids: Iterable[str], dropped: Iterable[tuple[str, str]]) -> None:
        for seq_id in ids:
            seq = self._by_id[seq_id]
            assert seq.state is SequenceState.SCORED and seq.score is not None and seq.step == step, seq
            seq.state = SequenceState.BATCHED
        for seq_id, reason in dropped:
            self._by_id[seq_id].state = SequenceState.DROPPED
            self._by_id[seq_id].reason = reason

    def trained(self, step: int) -> None:
        for seq in self.of_step(step):
            if seq.state is SequenceState.BATCHED:
                seq.state = SequenceState.TRAINED

    def forget(self, step: int) -> None:
        """The step is recorded: its sequences have ended their lives."""
        for seq_id in self._by_step.pop(step, ()):
            seq = self._by_id.pop(seq_id)
            assert seq.state in (SequenceState.TRAINED, SequenceState.DROPPED), seq

    def _insert(self, seq: Sequence) -> None:
        self._by_id[seq.id] = seq
        self._by_step.setdefault(seq.step, []).append(seq.id)

    def _wait_in_front(self, seq: Sequence) -> None:
        seq.state, seq.task = SequenceState.WAITING, ""
        self.waiting[seq.role].appendleft(seq.id)


def plan_batch(sequences: Iterable[Sequence]) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """The step's batch in submission order, and who is dropped why.

    A member whose judge failed has no reward and is masked from its group; a group that keeps fewer than two
    members says nothing about which response is better, so it is dropped whole.
    """
    groups: dict[str, list[Sequence]] = {}
    for seq in sequences:
        groups.setdefault(seq.group, []).append(seq)
    ids: list[str] = []
    dropped: list[tuple[str, str]] = []
    for members in groups.values():
        valid = [s for s in members if s.score is not None]
        dropped += [(s.id, f"judge:{s.failure}") for s in members if s.score is None]
        if len(valid) >= 2:
            ids += [s.id for s in valid]
        else:
            dropped += [(s.id, "group_too_small") for s in valid]
    return tuple(sorted(ids)), tuple(sorted(dropped))
