"""A snapshot as arrays: what of which step is where, what it costs, and how long a cycle must take.

Steps are counted from A, the oldest that is neither judged nor trained: step A + k is *class* k. While a version is
trained, A is the one after it.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.core.events import INFERENCE, Role
from pipeline.core.iteration import IterationCost
from pipeline.core.planner.bindings import ANY, Bindings
from pipeline.core.planner.settings import PlannerSettings
from pipeline.core.snapshot import BlockView, RoleView, Snapshot

Array = NDArray[np.float64]

NUM_CLASSES = 3
_SATURATED = 0.95  # of the KV cache
_FEW = 24  # sequences on a replica when the tail is reached: assumed
_NEVER = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleData:
    """One inference role. Bins of ages as in the snapshot."""

    role: Role
    ages: Array  # [classes, bins]
    waiting: Array  # [classes]
    survival: Array  # [bins + 1]
    residual: Array  # [bins], mean tokens to go
    mean: float
    longest: float
    bin_tokens: int
    cost: IterationCost
    per_block: int
    """Replicas."""
    max_num_seqs: int
    kv_tokens: float
    prompt_tokens: float
    prefill_s: float
    """Of one request, on one replica."""
    slot_s: float
    """Slot-seconds of a whole sequence at a full batch."""
    shift_s: float

    def few_s(self) -> float:
        """An iteration when a step comes to its end."""
        return self.cost.iteration_s(_FEW, _FEW * (self.prompt_tokens + self.mean))


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Blocks that inference may have."""

    num: int
    least: int
    most: int
    """How many of them may roll out."""

    @staticmethod
    def of(blocks: Iterable[BlockView], bindings: Bindings) -> "Room":
        roles = [bindings.of(b.index) for b in blocks if bindings.of(b.index) and not b.is_silent]
        return Room(
            num=len(roles),
            least=sum(Role.REWARD not in allowed for allowed in roles),
            most=sum(Role.ROLLOUT in allowed for allowed in roles),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    rollout: RoleData
    reward: RoleData
    num_blocks: int
    block_slots: int
    num_train_blocks: int
    free: tuple[int, ...]
    """Indices of the blocks that may be given to inference now."""
    room: Room
    """Of these."""
    room_idle: Room
    """When nobody trains."""
    room_training: Room
    """While the training blocks train."""
    now: tuple[int, int]
    """How many of these serve rollout and reward."""
    train_s: float
    training_left_s: float
    """0: nobody trains."""
    is_training: bool
    enters: tuple[float | None, ...]  # [classes]
    """Seconds until a class that is not there yet may enter; inf: when A is trained; None: it is there, or never
    comes."""
    waits: tuple[bool, ...]  # [classes]
    """Whether it also waits for the class before it to be judged."""
    num_sequences: int
    staleness: int
    cycle_s: float
    """What a cycle takes at least, by work, by training and by latency."""
    step_slot_s: float
    """Slot-seconds of a step in both inference roles."""

    def role(self, role: Role) -> RoleData:
        return self.rollout if role is Role.ROLLOUT else self.reward


def preprocess(snapshot: Snapshot, bindings: Bindings = ANY) -> Picture:
    train = snapshot.train
    is_training = train.left_s is not None or train.is_waiting
    locked = set(train.block_indices) if is_training else set()
    free = [b for b in snapshot.blocks if b.index not in locked and not b.is_silent and bindings.of(b.index)]
    first = snapshot.version + (1 if is_training else 0)
    left_s = train.left_s if train.left_s is not None else 0.0
    if train.is_waiting and train.left_s is None:
        left_s = snapshot.shift_s[Role.TRAIN] + train.step_s
    roles = {role: _role(snapshot, role, first) for role in INFERENCE}
    step_slot_s = snapshot.num_sequences * sum(data.slot_s for data in roles.values())
    num_slots, num_train_slots = (
        len(snapshot.blocks) * snapshot.block_slots,
        len(train.block_indices) * snapshot.block_slots,
    )
    rollout, reward = roles[Role.ROLLOUT], roles[Role.REWARD]
    latency_s = rollout.longest * rollout.few_s() + reward.mean * reward.few_s() + train.step_s
    return Picture(
        rollout=rollout,
        reward=reward,
        num_blocks=len(snapshot.blocks),
        block_slots=snapshot.block_slots,
        num_train_blocks=len(train.block_indices),
        free=tuple(b.index for b in free),
        room=Room.of(free, bindings),
        room_idle=Room.of(snapshot.blocks, bindings),
        room_training=Room.of((b for b in snapshot.blocks if b.index not in train.block_indices), bindings),
        now=(sum(b.role is Role.ROLLOUT for b in free), sum(b.role is Role.REWARD for b in free)),
        train_s=train.step_s,
        training_left_s=left_s,
        is_training=is_training,
        enters=tuple(_enters(snapshot, first, k, left_s) for k in range(NUM_CLASSES)),
        waits=tuple(snapshot.in_pairs and k > 0 and (first + k) % 2 == 0 for k in range(NUM_CLASSES)),
        num_sequences=snapshot.num_sequences,
        staleness=snapshot.staleness,
        cycle_s=max(
            train.step_s,
            (step_slot_s + train.step_s * num_train_slots) / num_slots,
            latency_s / (snapshot.staleness + 1),
        ),
        step_slot_s=step_slot_s,
    )


def _enters(snapshot: Snapshot, first: int, k: int, left_s: float) -> float | None:
    step = first + k
    if step < snapshot.num_admitted or step >= snapshot.num_steps or k > snapshot.staleness + 1:
        return None
    return left_s if k <= snapshot.staleness else np.inf


def _role(snapshot: Snapshot, role: Role, first: int) -> RoleData:
    view = snapshot.role(role)
    num_bins = len(view.survival) - 1
    ages, waiting = np.zeros((NUM_CLASSES, num_bins)), np.zeros(NUM_CLASSES)
    for crowd in view.crowds:
        k = min(max(crowd.step - first, 0), NUM_CLASSES - 1)
        ages[k] += crowd.ages
        waiting[k] += crowd.num_waiting
    survival = np.asarray(view.survival)
    beyond = np.cumsum(survival[::-1])[::-1] * view.bin_tokens
    residual = np.where(
        survival[:-1] > 1e-6,
        np.maximum(1.0, beyond[:-1] / np.maximum(survival[:-1], 1e-9) - view.bin_tokens / 2),
        1.0,
    )
    mean = float(residual[0])
    prefill_s = view.prefill_tokens * view.cost.prefill_s
    return RoleData(
        role=role,
        ages=ages,
        waiting=waiting,
        survival=np.maximum(survival, 1e-7),
        residual=residual,
        mean=mean,
        longest=float(num_bins * view.bin_tokens),
        bin_tokens=view.bin_tokens,
        cost=view.cost,
        per_block=snapshot.block_slots // view.num_slots,
        max_num_seqs=view.max_num_seqs,
        kv_tokens=view.kv_tokens,
        prompt_tokens=view.prompt_tokens,
        prefill_s=prefill_s,
        slot_s=view.num_slots * (_saturated_s(view, mean) + prefill_s),
        shift_s=snapshot.shift_s[role],
    )


def _saturated_s(view: RoleView, mean: float) -> float:
    """Of a replica, for the tokens of one sequence in a full batch."""
    context = view.prompt_tokens + mean / 2
    batch = max(1.0, min(view.max_num_seqs, view.kv_tokens * _SATURATED / context))
    return view.cost.iteration_s(batch, batch * context) / batch * mean


def splits(picture: Picture, settings: PlannerSettings) -> NDArray[np.int64]:
    """Numbers of rollout blocks to try, ascending: the whole range coarsely, and what is near the present one.

    Blocks of a role are alike and a shift costs by the number moved, so counts stand for all assignments: of those with
    the same counts, one with the fewest moves is best.
    """
    least, most = picture.room.least, picture.room.most
    num = min(most - least + 1, settings.num_coarse)
    coarse = np.unique(np.round(np.linspace(least, most, num)).astype(int)).tolist()
    near = range(picture.now[0] - settings.num_near, picture.now[0] + settings.num_near + 1)
    return np.asarray(sorted({*coarse, *(k for k in near if least <= k <= most)}), dtype=np.int64)
