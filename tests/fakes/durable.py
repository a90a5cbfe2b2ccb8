"""What survives the controller and every worker: the queue's index and the checkpoints, in memory.

The rules are those of pipeline/queue: a write is refused unless it comes from the owner, (attempt, turn), of the
sequence; what is there already is answered like the first time.
"""

from dataclasses import dataclass, field

from pipeline.core.events import (
    Finish,
    RestoredSequence,
    RestoredStep,
    Role,
    RunRestored,
    SegmentInfo,
    VerdictInfo,
)


@dataclass(slots=True)
class Row:
    """One sequence in the index. `segments`: (number of tokens, version) of each."""

    id: str
    step: int
    state: str = "admitted"
    owner: tuple[int, int] = (0, 0)
    segments: list[tuple[int, int]] = field(default_factory=list)
    score: float | None = None
    failure: str = ""


@dataclass(slots=True)
class Durable:
    attempts: int = 0
    """How many controllers have begun."""
    rows: dict[str, Row] = field(default_factory=dict)
    batches: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """The recorded batch of each step, in its order."""
    recorded: list[int] = field(default_factory=list)
    """Steps in the order in which their metric rows became durable."""
    checkpoints: dict[int, tuple[int, ...]] = field(default_factory=lambda: {0: ()})
    """Version to the steps that were trained into it, in order; 0 is the base model."""

    @property
    def newest_checkpoint(self) -> int:
        return max(self.checkpoints)

    def of_step(self, step: int) -> list[Row]:
        return [row for row in self.rows.values() if row.step == step]

    def admit(self, step: int, ids: tuple[str, ...]) -> None:
        for seq_id in ids:
            self.rows.setdefault(seq_id, Row(seq_id, step))

    def claim(self, seq_id: str, owner: tuple[int, int]) -> Row:
        row = self.rows[seq_id]
        assert row.state in ("admitted", "generated", "scored"), row
        assert owner > row.owner, (owner, row)
        row.owner = owner
        return row

    def put_segment(self, segment: SegmentInfo, owner: tuple[int, int]) -> None:
        row = self.rows[segment.id]
        assert row.owner == owner and row.state == "admitted" and segment.idx == len(row.segments), (segment, row)
        assert not row.segments or segment.version >= row.segments[-1][1], (segment, row)
        row.segments.append((segment.num_tokens, segment.version))
        if segment.finish in (Finish.STOP, Finish.LENGTH):
            row.state = "generated"

    def put_verdict(self, verdict: VerdictInfo, owner: tuple[int, int]) -> None:
        row = self.rows[verdict.id]
        assert row.owner == owner and row.state == "generated", (verdict, row)
        row.state, row.score, row.failure = "scored", verdict.score, verdict.failure

    def commit_batch(self, step: int, ids: tuple[str, ...], dropped: tuple[tuple[str, str], ...]) -> None:
        """Together they are all sequences of the step, each once; a batch recorded before is the same."""
        assert sorted([*ids, *(i for i, _ in dropped)]) == sorted(row.id for row in self.of_step(step)), step
        assert self.batches.setdefault(step, ids) == ids, step
        for seq_id in ids:
            assert self.rows[seq_id].state in ("scored", "batched"), self.rows[seq_id]
            self.rows[seq_id].state = "batched"
        for seq_id, _ in dropped:
            self.rows[seq_id].state = "dropped"

    def commit_trained(self, step: int) -> tuple[int, int]:
        for seq_id in self.batches[step]:
            assert self.rows[seq_id].state in ("batched", "trained"), self.rows[seq_id]
            self.rows[seq_id].state = "trained"
        num_trained = len(self.batches[step])
        return num_trained, len(self.of_step(step)) - num_trained

    def record_step(self, step: int) -> None:
        if step not in self.recorded:
            self.recorded.append(step)

    def save(self, steps: tuple[int, ...]) -> None:
        assert steps == tuple(range(1, len(steps) + 1)), "steps are trained in order"
        self.checkpoints[len(steps)] = steps

    def restore(self, strict: bool = False) -> RunRestored:
        """The newest checkpoint, and what is known of the steps above it; `strict`: only what has a batch."""
        version = self.newest_checkpoint
        if strict:
            kept = {i: row for i, row in self.rows.items() if row.step <= version or row.step in self.batches}
            self.rows = kept
        steps = sorted({row.step for row in self.rows.values() if row.step > version})
        restored = tuple(self._restored(step) for step in steps)
        return RunRestored(version=version, steps=restored, recorded=tuple(self.recorded))

    def _restored(self, step: int) -> RestoredStep:
        sequences = []
        for row in sorted(self.of_step(step), key=lambda row: row.id):
            if row.state == "trained":
                row.state = "batched"
            versions = [version for _, version in row.segments]
            sequences.append(
                RestoredSequence(
                    id=row.id,
                    state=row.state,
                    num_tokens=sum(num for num, _ in row.segments),
                    num_segments=len(row.segments),
                    min_version=min(versions, default=None),
                    max_version=max(versions, default=None),
                    score=row.score,
                    failure=row.failure,
                )
            )
        return RestoredStep(step=step, batched=step in self.batches, sequences=tuple(sequences))


SERVED = {Role.ROLLOUT: "admitted", Role.REWARD: "generated"}
"""The state of a sequence on which a role has something to do."""
