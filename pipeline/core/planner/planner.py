"""Shift now, or stay: the split of the free blocks with which the step after the next one can be trained earliest.

What trains is not decided here: a step that is judged trains at once, on the blocks chosen at submit.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.core.events import INFERENCE, Role
from pipeline.core.planner.bindings import ANY, Bindings
from pipeline.core.planner.lookahead import look_ahead
from pipeline.core.planner.preprocess import Picture, preprocess, splits
from pipeline.core.planner.settings import PlannerSettings
from pipeline.core.snapshot import BlockView, Snapshot

GAINS = "the gain exceeds the threshold"
"""The reason of a plan that shifts though all could stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    num_rollout: int
    num_reward: int
    """Blocks."""
    value_s: float
    """From now until the step after the next one can be trained."""
    gain_s: float
    """Against staying; against the worst, where nothing can stay."""
    penalty_s: float
    """Of that value, what the shift itself costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`moves`: block index to its new role; empty: stay."""

    reason: str
    moves: dict[int, Role]
    candidates: tuple[Candidate, ...] = ()
    chosen: int = -1
    """Index of a candidate; -1: none was looked at."""
    cycle_s: float = 0.0


def decide(snapshot: Snapshot, settings: PlannerSettings, bindings: Bindings = ANY) -> Plan:
    """Pure: the same snapshot gives the same plan."""
    why_not = _why_not(snapshot, bindings)
    if why_not:
        return Plan(reason=why_not, moves={})
    picture = preprocess(snapshot, bindings)
    if not picture.free:
        return Plan(reason="all blocks train", moves={}, cycle_s=picture.cycle_s)
    is_forced = any(b.index in picture.free and b.role not in bindings.of(b.index) for b in snapshot.blocks)
    since_s = math.inf if snapshot.last_shift_s is None else snapshot.at_s - snapshot.last_shift_s
    is_early = since_s < settings.dwell_s(picture.cycle_s) - 1e-6
    if is_early and not is_forced:
        return Plan(reason="too soon after the last shift", moves={}, cycle_s=picture.cycle_s)
    is_moving = any(b.ready_in_s > 0 and b.index in picture.free for b in snapshot.blocks)
    tried = _tried(picture, settings, only_new=is_early or is_moving)
    is_stuck = picture.now[0] not in tried
    outcome = look_ahead(picture, tried, settings)
    stay = -1 if is_forced or is_stuck else tried.tolist().index(picture.now[0])
    best = int(np.argmin(outcome.value_s))
    against = outcome.value_s[stay] if stay >= 0 else outcome.value_s.max()
    candidates = tuple(
        Candidate(
            num_rollout=num,
            num_reward=len(picture.free) - num,
            value_s=float(value),
            gain_s=float(against - value),
            penalty_s=float(penalty),
        )
        for num, value, penalty in zip(tried.tolist(), outcome.value_s, outcome.penalty_s, strict=True)
    )
    reason = "blocks have no role" if is_forced else GAINS
    if is_stuck and not is_forced:
        reason = "what waits has no block"
    if stay >= 0 and outcome.value_s[best] >= against - settings.epsilon * picture.cycle_s:
        best, reason = stay, "no candidate gains enough"
    moves = assign(snapshot, picture.free, candidates[best].num_rollout, bindings)
    return Plan(reason=reason, moves=moves, candidates=candidates, chosen=best, cycle_s=picture.cycle_s)


def _why_not(snapshot: Snapshot, bindings: Bindings = ANY) -> str:
    trains = set(snapshot.train.block_indices)
    if any(b.ready_in_s > 0 and b.role is not Role.TRAIN for b in snapshot.blocks):
        is_idle = any(b.index in trains and b.role is Role.TRAIN and bindings.of(b.index) for b in snapshot.blocks)
        if snapshot.train.left_s is not None or snapshot.train.is_waiting or not is_idle:
            return "a shift is in flight"
    return ""


def _tried(picture: Picture, settings: PlannerSettings, *, only_new: bool) -> NDArray[np.int64]:
    """`only_new`: only blocks without a role get one."""
    tried = splits(picture, settings)
    if only_new:
        stays = (tried >= picture.now[0]) & (len(picture.free) - tried >= picture.now[1])
        tried = tried[stays] if stays.any() else tried
    goes_on = _goes_on(picture, tried)
    return tried[goes_on] if goes_on.any() else tried


def _goes_on(picture: Picture, num_rollout: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether anything does: not if all that is to be done waits for a role that has no block. The look-ahead would
    move blocks later, but each plan could say so again. What each role can do without the other is finite, so a run
    whose planner never stays like this comes to its end.

    Responses may have to wait for the rest of their step (`placement.admission`), so those whose step is not rolled out
    do not count as work of the judge, unless it judges already.
    """
    rollout, reward = picture.rollout, picture.reward
    left = rollout.ages.sum(1) + rollout.waiting
    can_roll_out = bool(left.any())
    can_judge = bool(reward.ages.any() or (reward.waiting * (left == 0)).any())
    found: NDArray[np.bool_] = can_roll_out & (num_rollout > 0) | can_judge & (num_rollout < len(picture.free))
    return found


def assign(snapshot: Snapshot, free: tuple[int, ...], num_rollout: int, bindings: Bindings = ANY) -> dict[int, Role]:
    """Which blocks change, so that the free ones serve these numbers: the fewest moves, and of these the fewest running
    sequences. Rollout prefers the blocks that train: the next training aborts what runs there, and a verdict that is
    aborted delays it."""
    trains = set(snapshot.train.block_indices)
    wanted = {Role.ROLLOUT: num_rollout, Role.REWARD: len(free) - num_rollout}
    blocks, moves = [], {}
    for block in (b for b in snapshot.blocks if b.index in free):
        allowed = bindings.of(block.index)
        if len(allowed) > 1:
            blocks.append(block)
            continue
        wanted[allowed[0]] -= 1
        if block.role is not allowed[0]:
            moves[block.index] = allowed[0]

    def misplaced(block: BlockView, role: Role) -> bool:
        return (block.index in trains) != (role is Role.ROLLOUT)

    keep: set[int] = set()
    for role, num in wanted.items():
        have = sorted(
            (b for b in blocks if b.role is role), key=lambda b: (misplaced(b, role), -b.num_running, b.index)
        )
        keep.update(b.index for b in have[:num])
    pool = sorted((b for b in blocks if b.index not in keep), key=lambda b: (b.index in trains, b.index))
    for role in INFERENCE:
        missing = wanted[role] - sum(b.role is role and b.index in keep for b in blocks)
        for _ in range(missing):
            block = pool.pop(-1 if role is Role.ROLLOUT else 0)
            moves[block.index] = role
    return moves
