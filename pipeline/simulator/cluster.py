"""Blocks of GPUs, what can go wrong with them, and what is counted of a simulated run."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.core.events import Role
from pipeline.simulator.engine import Replica
from pipeline.simulator.lengths import Array
from pipeline.simulator.setup import Setup


@dataclass(frozen=True, slots=True, kw_only=True)
class LostNode:
    """Dies at `at_s`; a replacement comes `back_after_s` later, or never."""

    node: int
    at_s: float
    back_after_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowGpu:
    """Works `factor` times as slowly from the start, and so does each replica and training that it is part of."""

    gpu: int
    factor: float


@dataclass(slots=True, kw_only=True, eq=False)
class Block:
    """GPUs that change hands together."""

    index: int
    node: int
    slowness: float = 1.0
    role: Role | None = None
    """Given or promised."""
    ready_at: float = 0.0
    is_lost: bool = False
    replicas: list[Replica] = field(default_factory=list)


def make_blocks(setup: Setup, slow: Sequence[SlowGpu]) -> list[Block]:
    def slowness(index: int) -> float:
        return max([s.factor for s in slow if s.gpu // setup.block == index], default=1.0)

    return [
        Block(index=i, node=i * setup.block // setup.gpus_per_node, slowness=slowness(i))
        for i in range(setup.num_blocks)
    ]


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """Seconds of the virtual clock; None: not yet."""

    step: int
    num_sequences: int
    train_tokens: float
    mean_context: float
    admitted_s: float
    rolled_out_s: float | None = None
    scored_s: float | None = None
    train_started_s: float | None = None
    trained_s: float | None = None
    num_rolled_out: int = 0
    num_scored: int = 0

    @staticmethod
    def of(step: int, now: float, responses: Array, num_sequences: int, prompt_tokens: int) -> "StepTimes":
        total = float(responses.sum())
        return StepTimes(
            step=step,
            num_sequences=num_sequences,
            train_tokens=total + num_sequences * prompt_tokens,
            mean_context=float((responses**2).sum()) / (2 * total),
            admitted_s=now,
        )

    def count_rolled_out(self, now: float) -> bool:
        """Whether this was the last."""
        self.num_rolled_out += 1
        if self.num_rolled_out == self.num_sequences:
            self.rolled_out_s = now
        return self.rolled_out_s is not None

    def count_scored(self, now: float) -> bool:
        self.num_scored += 1
        if self.num_scored == self.num_sequences:
            self.scored_s = now
        return self.scored_s is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    at_s: float
    block: int
    old: Role | None
    new: Role
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Binding:
    """From `at_s` a block is of the role, and ready for it at `ready_s`; None: it is lost."""

    at_s: float
    block: int
    role: Role | None
    ready_s: float


SHIFT, LOST = "shift", "lost"
"""States of a block beside the names of the roles: on its way to a role, and dead with its node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stay:
    """A block in one state: ready for a role of that name, SHIFT or LOST."""

    block: int
    state: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A stretch in which a replica gave `num_tokens`, or a training took `num_sequences`."""

    start_s: float
    end_s: float
    role: Role
    num_gpus: int
    amount: float


@dataclass(slots=True, kw_only=True)
class Usage:
    """GPU-seconds and counts. With `is_traced` also each stretch of work, for plots."""

    is_traced: bool = False
    decode_gpu_s: dict[Role, float] = field(default_factory=lambda: {Role.ROLLOUT: 0.0, Role.REWARD: 0.0})
    prefill_gpu_s: dict[Role, float] = field(default_factory=lambda: {Role.ROLLOUT: 0.0, Role.REWARD: 0.0})
    num_tokens: dict[Role, float] = field(default_factory=lambda: {Role.ROLLOUT: 0.0, Role.REWARD: 0.0})
    train_gpu_s: float = 0.0
    num_preempted: int = 0
    num_migrated: int = 0
    shifts: list[Shift] = field(default_factory=list)
    bindings: list[Binding] = field(default_factory=list)
    trace: list[Work] = field(default_factory=list)

    def add(self, replica: Replica) -> None:
        """When its life ends, or the run."""
        self.note_work(replica)
        self.decode_gpu_s[replica.role] += replica.decode_s * replica.num_gpus
        undone_s = min(max(0.0, replica.prefilled_at - replica.at), replica.prefill_s)  # of prefill that was taken
        self.prefill_gpu_s[replica.role] += (replica.prefill_s - undone_s) * replica.num_gpus
        self.num_tokens[replica.role] += replica.num_tokens
        self.num_preempted += replica.num_preempted

    def note_shift(self, now: float, block: Block, old: Role | None, new: Role, seconds: float) -> None:
        self.shifts.append(Shift(at_s=now, block=block.index, old=old, new=new, seconds=seconds))

    def note_binding(self, now: float, block: Block, role: Role | None, ready_s: float) -> None:
        self.bindings.append(Binding(at_s=now, block=block.index, role=role, ready_s=ready_s))

    def stays(self, end_s: float) -> list[Stay]:
        """What each block was, block by block and in time, up to `end_s`. None of them is empty."""
        found: list[Stay] = []

        def stay(binding: Binding, state: str, start_s: float, end_s: float) -> None:
            if end_s > start_s:
                found.append(Stay(block=binding.block, state=state, start_s=start_s, end_s=end_s))

        by_block = sorted(self.bindings, key=lambda binding: binding.block)
        for binding, after in zip(by_block, [*by_block[1:], None], strict=True):
            until = after.at_s if after and after.block == binding.block else end_s
            if binding.role is None:
                stay(binding, LOST, binding.at_s, until)
            else:
                ready = min(binding.ready_s, until)
                stay(binding, SHIFT, binding.at_s, ready)
                stay(binding, binding.role.value, ready, until)
        return found

    def note_cut(self, seconds: float, num_gpus: int) -> None:
        """A training ends so much before its time."""
        self.train_gpu_s -= seconds * num_gpus

    def note_training(self, now: float, seconds: float, num_gpus: int, num_sequences: int) -> None:
        self.train_gpu_s += seconds * num_gpus
        if self.is_traced:
            self.trace.append(
                Work(start_s=now, end_s=now + seconds, role=Role.TRAIN, num_gpus=num_gpus, amount=num_sequences)
            )

    def note_work(self, replica: Replica) -> None:
        """What it did since it was last noted."""
        done = replica.num_tokens - replica.noted_tokens
        if self.is_traced and done > 0:
            self.trace.append(
                Work(
                    start_s=replica.noted_at,
                    end_s=replica.at,
                    role=replica.role,
                    num_gpus=replica.num_gpus,
                    amount=done,
                )
            )
        replica.noted_at, replica.noted_tokens = replica.at, replica.num_tokens
