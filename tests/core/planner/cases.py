"""Snapshots to plan on, by hand and at random."""

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pipeline.core.events import Role
from pipeline.core.iteration import IterationCost
from pipeline.core.snapshot import BlockView, Crowd, RoleView, Snapshot, TrainView

COST = IterationCost(weights_s=0.008, kv_s=3e-8, compute_s=2e-5, prefill_s=4e-5, overhead_s=0.0025, per_sequence_s=1e-5)
ROLLOUT, REWARD, TRAIN = Role.ROLLOUT, Role.REWARD, Role.TRAIN


def survival(num_bins: int, scale: float = 0.35) -> tuple[float, ...]:
    """Long-tailed, 0 in the end. `scale`: the mean, as a share of the range, about."""
    edges = np.arange(num_bins) / num_bins
    return (*np.exp(-((edges / scale) ** 0.9)).tolist(), 0.0)


def role_view(num_bins: int, bin_tokens: int, crowds: Sequence[Crowd], **changes: object) -> RoleView:
    view = RoleView(
        num_slots=1,
        cost=COST,
        kv_tokens=1e6,
        max_num_seqs=64,
        prompt_tokens=300.0,
        prefill_tokens=300.0,
        bin_tokens=bin_tokens,
        survival=survival(num_bins),
        crowds=tuple(crowds),
    )
    return replace(view, **changes)  # type: ignore[arg-type]


def crowd(step: int, num_waiting: float = 0.0, ages: Sequence[float] = (), *, num_bins: int) -> Crowd:
    """`ages`: of the first bins; the rest are empty."""
    return Crowd(step=step, num_waiting=num_waiting, ages=(*ages, *[0.0] * (num_bins - len(ages))))


def snapshot(
    roles: Sequence[Role | None],
    *,
    rollout: Sequence[tuple[float, Sequence[float]]] = ((256, ()),),
    reward: Sequence[tuple[float, Sequence[float]]] = ((0, ()),),
    train: Sequence[int] = (),
    train_view: TrainView | None = None,
    num_bins: tuple[int, int] = (32, 16),
    bin_tokens: tuple[int, int] = (256, 128),
    rollout_view: dict[str, object] | None = None,
    reward_view: dict[str, object] | None = None,
    **changes: object,
) -> Snapshot:
    """`rollout`, `reward`: of step 0, 1, ... how many wait, and how many are how old."""
    waiting = max((int(sum(num) + sum(ages)) for num, ages in [((n,), a) for n, a in rollout]), default=0)
    crowds = [
        [crowd(step, num, ages, num_bins=bins) for step, (num, ages) in enumerate(steps)]
        for steps, bins in ((rollout, num_bins[0]), (reward, num_bins[1]))
    ]
    made = Snapshot(
        at_s=100.0,
        version=0,
        staleness=1,
        num_sequences=max(waiting, 64),
        num_admitted=len(rollout),
        num_steps=100,
        blocks=tuple(BlockView(index=i, node=i // 8, role=role) for i, role in enumerate(roles)),
        block_slots=1,
        rollout=role_view(num_bins[0], bin_tokens[0], crowds[0], **(rollout_view or {})),
        reward=role_view(num_bins[1], bin_tokens[1], crowds[1], prompt_tokens=3000.0, **(reward_view or {})),
        train=train_view or TrainView(block_indices=tuple(train), step_s=20.0),
        shift_s={ROLLOUT: 2.0, REWARD: 3.0, TRAIN: 6.0},
        release_s=2.0,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def random_snapshot(seed: int, *, most_blocks: int = 6) -> Snapshot:
    """Any moment of a run; also odd ones: roles without blocks, a step that is not there, a training that waits."""
    rng = random.Random(seed)
    num = rng.randint(2, most_blocks)
    num_train = rng.randint(1, num)
    trains = tuple(range(num - num_train, num))
    is_training = num_train < num and rng.random() < 0.4
    roles: list[Role | None] = [rng.choice((ROLLOUT, REWARD)) for _ in range(num)]
    if is_training:
        roles[num - num_train :] = [TRAIN] * num_train
    elif rng.random() < 0.3:
        roles[num - num_train :] = [rng.choice((TRAIN, None)) for _ in trains]
    bins = (rng.choice((6, 32)), rng.choice((5, 16)))

    def steps(num_bins: int) -> list[tuple[float, list[float]]]:
        found = []
        for _ in range(2):
            ages = [rng.choice((0.0, rng.uniform(0, 30))) for _ in range(num_bins)]
            found.append((rng.choice((0.0, float(rng.randint(0, 200)))), rng.choice((ages, []))))
        return found

    made = snapshot(
        roles,
        rollout=steps(bins[0]),
        reward=steps(bins[1]),
        num_bins=bins,
        bin_tokens=(8192 // bins[0], 2048 // bins[1]),
        train_view=TrainView(
            block_indices=trains, step_s=rng.uniform(2, 60), left_s=rng.uniform(0.5, 40) if is_training else None
        ),
        rollout_view={"survival": survival(bins[0], rng.uniform(0.1, 0.8)), "cost": COST.slower(rng.uniform(0.3, 3))},
        reward_view={"survival": survival(bins[1], rng.uniform(0.1, 0.8)), "cost": COST.slower(rng.uniform(0.3, 3))},
        staleness=rng.choice((0, 1, 1)),
        num_sequences=rng.choice((16, 256)),
        shift_s={ROLLOUT: rng.uniform(0, 8), REWARD: rng.uniform(0, 8), TRAIN: rng.uniform(0, 8)},
    )
    if is_training:  # the steps are those after the one that trains
        crowds = {
            role: tuple(replace(c, step=c.step + 1) for c in made.role(role).crowds) for role in (ROLLOUT, REWARD)
        }
        made = replace(
            made,
            num_admitted=made.num_admitted + 1,
            rollout=replace(made.rollout, crowds=crowds[ROLLOUT]),
            reward=replace(made.reward, crowds=crowds[REWARD]),
        )
    return made
