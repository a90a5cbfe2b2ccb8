"""What follows from a split of the blocks: a fluid of the next steps, run for all candidates at once.

Sequences are counted by step and age. In each time step of the fluid a role first prefills what may enter, older steps
first, as far as batch, cache and time allow; in the rest of the time all running ones age by what an iteration at this
batch takes, and those end that the survival curve says. Rollouts that end wait for the judge. So the long tail is seen,
not a mean rate.

The first split is held, then a rule goes on: GPUs in proportion to the work that is there. Each move costs the time of
its shift, later ones too: else *later* would always beat *now*. When step A is judged its training takes its blocks.

The value is when B, the step after A, can be trained, and what is then left to do of the one after B. Of A alone it
would let B starve; without the last term it would not care what is done beside B (docs/policies/planner.md).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.core.iteration import IterationCost
from pipeline.core.planner.crowds import Crowds
from pipeline.core.planner.preprocess import Array, Picture
from pipeline.core.planner.settings import PlannerSettings

_LEFT = 0.6  # a step is done when fewer are expected: the median of when the last one ends
_EARLIEST, _LATEST = 0.4, 1.6  # relative lengths of the first and the last time step
_FULL = 0.95  # of the KV cache
EARLY = 0.02  # weight of A's own end: of two splits with one value the one that trains A earlier
SLACK = 0.05  # weight of when B is judged, even if its turn comes later: what lasts longer than expected delays less
_A_LITTLE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """[candidates], seconds from now."""

    value_s: Array
    train_start_s: Array
    """When A can be trained."""
    next_start_s: Array
    """When the step after it can be trained."""
    is_reached: NDArray[np.bool_]
    """Whether the fluid got there; if not, the rest is estimated from the work left."""
    penalty_s: Array
    """Cycle time that the first shift costs by itself: slots in transit, and prefill of what it aborts."""


def look_ahead(
    picture: Picture, num_rollout: NDArray[np.int64], settings: PlannerSettings, num_new: Array | None = None
) -> Outcome:
    """`num_new`: of each candidate, the blocks that come new to rollout and to reward, [2, candidates]; None: the
    fewest."""
    return _Fluid(picture, num_rollout, settings, num_new).run()


class _Fluid:
    """Axes: r roles, c candidates, k classes."""

    def __init__(
        self, picture: Picture, num_rollout: NDArray[np.int64], settings: PlannerSettings, num_new: Array | None
    ) -> None:
        self.picture, self.settings, self.num_new = picture, settings, num_new
        self.first = num_rollout.astype(float)
        self.num = len(num_rollout)
        roles = (picture.rollout, picture.reward)
        self.crowds = Crowds(roles, self.num)
        self.waiting = np.repeat(np.stack([data.waiting for data in roles])[:, None], self.num, 1)  # rck
        now = np.asarray(picture.now, dtype=float)[:, None]
        self.blocks = np.repeat(now, self.num, 1)  # rc, bound
        self.kept = self.blocks.copy()  # rc, of these, those that serve without a pause
        self.debt = np.zeros((2, self.num))  # rc, block-seconds of shifts that are not over
        self.backlog = np.zeros((2, self.num))  # rc, replica-seconds of prefill of what was aborted
        self.entered = np.array([[enter is None for enter in picture.enters]] * self.num)  # ck
        # When A, and the step after it, are judged; when A can be trained.
        self.judged = [np.full(self.num, np.inf), np.full(self.num, np.inf)]
        self.start = np.full(self.num, np.inf)
        self.has_next = self._has_next()
        self.beyond = np.full(self.num, np.nan)  # slot-seconds to do for the step after that, when it is its turn

        def column(values: list[float]) -> Array:
            return np.asarray(values, dtype=float)[:, None]

        self.cost = _Costs([data.cost for data in roles])
        self.per_block = column([data.per_block for data in roles])
        self.max_num_seqs = column([data.max_num_seqs for data in roles])
        self.kv_tokens = column([data.kv_tokens * _FULL for data in roles])
        self.prompt_tokens = column([data.prompt_tokens for data in roles])
        self.prefill_s = column([max(data.prefill_s, 1e-12) for data in roles])
        self.shift_s = column([data.shift_s for data in roles])
        self.slot_s = [data.slot_s for data in roles]

    def run(self) -> Outcome:
        t, penalty = 0.0, np.zeros(self.num)
        before = self._left()
        for k in (0, 1):
            self.judged[k] = np.where((before[:, k] < _LEFT) & self.entered[:, k], 0.0, np.inf)
        self._note_start(0.0)
        for dt in self._time_steps():
            self._enter(t)
            self._bind(t)
            if t == 0.0:
                penalty = self._penalty()
            work = self._work_beyond()
            self._serve(dt)
            after = self._left()
            self._note(before, after, t, dt)
            self._note_beyond(work, t, dt)
            before, t = after, t + dt
            if np.isfinite(self.beyond).all():
                break
        is_reached = np.isfinite(self._next_start())
        self.start = np.where(np.isfinite(self.start), self.start, t + self._rest_s(0))
        rest_s = np.maximum(t, self.start) + self._rest_s(1)
        self.judged[1] = np.where(np.isfinite(self.judged[1]), self.judged[1], rest_s)
        next_start, value = self._next_start(), EARLY * self.start
        if self.has_next:
            value = value + SLACK * self.judged[1]
        return Outcome(
            value_s=value + next_start + self._beyond_s(),
            train_start_s=self.start,
            next_start_s=next_start,
            is_reached=is_reached,
            penalty_s=penalty,
        )

    # --- the time step

    def _enter(self, t: float) -> None:
        for k, enter in enumerate(self.picture.enters):
            if enter is None:
                continue
            when = self.start + self.picture.train_s if np.isinf(enter) else enter
            if self.picture.waits[k]:
                when = np.maximum(when, self.judged[k - 1])
            new = ~self.entered[:, k] & (t >= when - 1e-9)
            self.waiting[0, :, k] += np.where(new, self.picture.num_sequences, 0.0)
            self.entered[:, k] |= new

    def _bind(self, t: float) -> None:
        picture, trains = self.picture, self.picture.room_training
        room = picture.room_idle if picture.is_training and t >= picture.training_left_s - 1e-9 else picture.room
        is_on = (t > 0.0) & (t >= self.start) & (t < self.start + picture.train_s)
        free = np.where(is_on, float(trains.num), float(room.num))
        rollout = self.first
        if t > 0.0:
            is_held = (free == len(picture.free)) & (t < self.settings.hold_s(picture.cycle_s))
            least, most = np.where(is_on, trains.least, room.least), np.where(is_on, trains.most, room.most)
            rollout = np.where(is_held, self.first, np.clip(self._by_work(free), least, most))
        blocks = np.stack([rollout, free - rollout])
        new = np.maximum(0.0, blocks - self.blocks)
        if t == 0.0 and self.num_new is not None:
            new = self.num_new
        if t > 0.0 or self.settings.is_penalized:
            self.debt += new * self.shift_s
        self.blocks = blocks
        self.kept = np.minimum(self.kept, blocks - new)

    def _by_work(self, free: Array) -> Array:
        """Rollout blocks, fractions too: by what is to be done for A and the step after it."""
        work = (self.crowds.work_rck + self.waiting)[:, :, :2].sum(2)
        rollout = work[0] * self.slot_s[0]
        coming = self.crowds.running_rck[0, :, 0] + self.waiting[0, :, 0]
        reward = (work[1] + coming) * self.slot_s[1]
        share = np.where(rollout < _A_LITTLE, 1.0, reward / np.maximum(reward + rollout, 1e-9))
        least = np.where(work[1] > _A_LITTLE, np.minimum(1.0, free / 2), 0.0)
        most = free - np.where(rollout > _A_LITTLE, np.minimum(1.0, free / 2), 0.0)
        judges: Array = np.clip(share * free, least, most)
        return free - judges

    def _penalty(self) -> Array:
        """Of the first split. Those on blocks that are given up are prefilled again on the others."""
        now = np.asarray(self.picture.now, dtype=float)[:, None]
        context = (self.crowds.running_rck * self.prompt_tokens[..., None] + self.crowds.tokens_rck).sum(2)
        lost = np.maximum(0.0, now - self.kept) / np.maximum(now, 1.0)
        if self.settings.is_penalized:
            self.backlog = lost * context * self.cost.prefill_s
        cost: Array = (self.debt + self.backlog / self.per_block).sum(0) / self.picture.num_blocks
        return cost

    def _serve(self, dt: float) -> None:
        replicas = self._serving(dt) * self.per_block
        is_on, safe = replicas > 1e-6, np.maximum(replicas, 1e-9)
        running = self.crowds.running_rck
        total = running.sum(2)
        context = self.prompt_tokens + self.crowds.tokens_rck.sum(2) / np.maximum(total, 1e-9)
        room = np.where(is_on, replicas * np.minimum(self.max_num_seqs, self.kv_tokens / context), 0.0)
        spent = np.minimum(dt * replicas, self.backlog)
        self.backlog = self.backlog - spent
        left_s = dt - spent / safe
        may = np.minimum(np.maximum(0.0, room - total), left_s / self.prefill_s * replicas)
        admitted = _in_order(may, self.waiting)
        self.waiting = self.waiting - admitted
        self.crowds.start(admitted)
        running = self.crowds.running_rck
        left_s = np.maximum(0.0, left_s - admitted.sum(2) * self.prefill_s / safe)
        active = _in_order(room, running)
        batch = np.maximum(1.0, active.sum(2) / safe)
        iteration_s = self.cost.iteration_s(batch, batch * context)
        tokens = np.where(is_on, left_s / np.maximum(iteration_s, 1e-12), 0.0)
        ended = self.crowds.grow(tokens[..., None] * active / np.maximum(running, 1e-9))
        self.waiting[1] += ended[0]

    def _serving(self, dt: float) -> Array:
        """Blocks, on average over the time step."""
        serving: Array = np.maximum(self.kept, self.blocks - self.debt / dt)
        self.debt = np.maximum(0.0, self.debt - (self.blocks - serving) * dt)
        self.kept = np.where(self.debt <= 1e-9, self.blocks, self.kept)
        return serving

    # --- when steps are done

    def _has_next(self) -> bool:
        """Whether the step after A is under way before A is trained."""
        num = self.crowds.running_rck[:, 0, 1].sum() + self.waiting[:, 0, 1].sum()
        enter = self.picture.enters[1]
        return bool(num > 0 or (enter is not None and np.isfinite(enter)))

    def _left(self) -> Array:  # ck
        left: Array = (self.crowds.running_rck + self.waiting).sum(0)
        return left

    def _note(self, before: Array, after: Array, t: float, dt: float) -> None:
        """Between two looks the number left falls about exponentially."""
        for k in (0, 1):
            is_new = np.isinf(self.judged[k]) & (after[:, k] < _LEFT) & self.entered[:, k]
            if is_new.any():
                low, high = np.log(np.maximum(after[:, k], 1e-3)), np.log(np.maximum(before[:, k], _LEFT))
                share = np.clip((high - np.log(_LEFT)) / np.maximum(high - low, 1e-6), 0.0, 1.0)
                self.judged[k] = np.where(is_new, t + dt * share, self.judged[k])
        self._note_start(t + dt)

    def _note_start(self, t: float) -> None:
        left_s = self.picture.training_left_s
        ready = np.isinf(self.start) & np.isfinite(self.judged[0]) & (t >= left_s - 1e-9)
        self.start = np.where(ready, np.maximum(self.judged[0], left_s), self.start)

    def _work_beyond(self) -> Array:
        work = (self.crowds.work_rck + self.waiting)[:, :, 2]
        left: Array = work[0] * (self.slot_s[0] + self.slot_s[1]) + work[1] * self.slot_s[1]
        return np.where(self.entered[:, 2], left, self.picture.step_slot_s)

    def _note_beyond(self, before: Array, t: float, dt: float) -> None:
        when = self._next_start()
        is_new = np.isnan(self.beyond) & (when <= t + dt)
        if is_new.any():
            share = np.clip((np.where(is_new, when, t) - t) / dt, 0.0, 1.0)
            self.beyond = np.where(is_new, before + share * (self._work_beyond() - before), self.beyond)

    def _beyond_s(self) -> Array:
        left = np.where(np.isnan(self.beyond), self.picture.step_slot_s, self.beyond)
        return left / (self.picture.num_blocks * self.picture.block_slots)

    def _next_start(self) -> Array:
        follows = self.start + self.picture.train_s
        return np.maximum(follows, self.judged[1]) if self.has_next else follows

    def _rest_s(self, k: int) -> Array:
        """Beyond the horizon: the work left at half of the slots, and something for a tail."""
        picture = self.picture
        work = (self.crowds.work_rck + self.waiting)[:, :, : k + 1].sum(2)
        left = work[0] * self.slot_s[0] + (work[0] + work[1]) * self.slot_s[1]
        tail = np.minimum(self._left()[:, : k + 1].sum(1), 30.0) / 30.0 * 0.1 * picture.cycle_s
        rest: Array = 2 * left / (picture.num_blocks * picture.block_slots) + tail
        return rest

    def _time_steps(self) -> list[float]:
        """Until the step after A can be trained, generously, and a shift or two; the first are shorter."""
        num, fixed_s = self.settings.num_steps, self.settings.horizon_s
        steps = np.linspace(_EARLIEST, _LATEST, num)
        steps *= (fixed_s or self._horizon_s()) / steps.sum()
        if fixed_s:
            return [float(step) for step in steps]
        beyond = max(float(steps[-1]), 4 * float(self.shift_s.max()) / num)
        return [*steps.tolist(), *([beyond] * num)]

    def _horizon_s(self) -> float:
        picture = self.picture
        rollout, reward, slots = picture.rollout, picture.reward, picture.block_slots
        work = (self.crowds.work_rck + self.waiting)[:, 0]  # rk
        verdicts = work[1] + (self.crowds.running_rck + self.waiting)[0, 0]
        to_do = work[0] * rollout.slot_s + verdicts * reward.slot_s
        if picture.enters[1] is not None:
            to_do[1] += picture.step_slot_s
        ages = rollout.ages[0].nonzero()[0]
        youngest = 0.0 if rollout.waiting[0] else (ages[0] * rollout.bin_tokens if len(ages) else np.inf)
        tail_s = 0.9 * max(0.0, rollout.longest - youngest) * rollout.few_s() + reward.mean * reward.few_s()
        first = self.settings.horizon * max(to_do[0] / (len(picture.free) * slots), tail_s)
        second = max(to_do[1] / (0.8 * picture.num_blocks * slots), 0.5 * rollout.longest * rollout.few_s())
        first = max(first, picture.training_left_s * 1.02, 0.25 * picture.cycle_s)
        return float(first + picture.train_s + self.settings.horizon * second)


def _in_order(limit_rc: Array, num_rck: Array) -> Array:
    """How many of each class are within the limit, older classes first."""
    before = np.cumsum(num_rck, 2) - num_rck
    within: Array = np.clip(limit_rc[..., None] - before, 0.0, num_rck)
    return within


class _Costs:
    """`IterationCost` of both roles, for arrays [r, c]."""

    def __init__(self, costs: list[IterationCost]) -> None:
        def column(name: str) -> Array:
            return np.asarray([getattr(cost, name) for cost in costs], dtype=float)[:, None]

        self.weights_s, self.experts_s, self.miss, self.kv_s = map(column, ("weights_s", "experts_s", "miss", "kv_s"))
        self.compute_s, self.prefill_s = column("compute_s"), column("prefill_s")
        self.overhead_s, self.per_sequence_s = column("overhead_s"), column("per_sequence_s")
        self.has_experts = bool(self.experts_s.any())

    def iteration_s(self, batch: Array, context: Array) -> Array:
        read = self.weights_s + context * self.kv_s
        if self.has_experts:
            read = read + self.experts_s * (1 - self.miss**batch)
        seconds: Array = np.maximum(read, batch * self.compute_s) + self.overhead_s + batch * self.per_sequence_s
        return seconds
