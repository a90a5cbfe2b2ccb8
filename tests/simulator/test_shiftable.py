"""Whole runs that the planner drives: they end, whatever their shape, and what is taken from the planner shows."""

import itertools
import random
from collections.abc import Iterable
from dataclasses import replace

import pytest

from pipeline.core.events import INFERENCE, Role
from pipeline.core.planner.bindings import ANY, Bindings, rollout_reward_only, training_only
from pipeline.core.planner.settings import DEFAULT, PlannerSettings
from pipeline.core.scheduler import Abort, Scheduler
from pipeline.simulator.admission import Admission
from pipeline.simulator.cluster import LostNode, Shift
from pipeline.simulator.engine import Replica, Sequence
from pipeline.simulator.lengths import Lengths, lognormal_mixture, measured_lengths
from pipeline.simulator.setup import Beliefs, Setup, Workload, paper_setup
from pipeline.simulator.shiftable import Shiftable
from pipeline.simulator.simulation import Simulation
from tests.simulator.test_simulation import SMALL, small


def run(
    setup: Setup,
    *,
    train_gpus: int,
    steps: int = 4,
    seed: int = 0,
    beliefs: Beliefs | None = None,
    scenarios: Iterable[LostNode] = (),
    scheduler: type[Scheduler[Sequence, Replica]] = Scheduler,
    **more: object,
) -> Simulation:
    believed = setup.believed(beliefs) if beliefs else setup
    mode = Shiftable(believed, train_gpus=train_gpus, **more)  # type: ignore[arg-type]
    sim = Simulation(setup, mode, seed=seed, num_steps=steps, scenarios=list(scenarios), scheduler=scheduler)
    sim.run_until(steps)
    return sim


def inference_shifts(sim: Simulation) -> list[Shift]:
    return [shift for shift in sim.usage.shifts if shift.old in INFERENCE and shift.new in INFERENCE]


def odd_lengths(rng: random.Random) -> Lengths:
    kind = rng.randrange(5)
    if kind == 0:
        return lognormal_mixture([(1.0, rng.choice((50.0, 500.0, 3000.0)), rng.choice((0.2, 1.2)))], 8192)
    if kind == 1:
        return measured_lengths([rng.randint(1, 16)], 16)
    if kind == 2:
        return measured_lengths([rng.choice((64, 1000, 8000))] * 2, 8000)
    return measured_lengths([100] * 9 + [16_000], 16_384) if kind == 3 else measured_lengths([5] * 50 + [4000], 4096)


def odd_run(seed: int) -> Simulation:
    rng = random.Random(seed)
    num_blocks = rng.randint(2, 8)
    base = paper_setup(rng.choice((1, 2, 3)), rng.choice(("h800", "h20")))
    work = Workload(
        num_prompts=rng.choice((1, 2, 5)),
        num_each=rng.choice((1, 3, 8)),
        rollout=odd_lengths(rng),
        verdict=odd_lengths(rng),
        shares_prefix=rng.random() < 0.5,
        prompt_tokens=rng.choice((10, 3000)),
    )
    setup = replace(
        base,
        num_gpus=num_blocks * base.block,
        workload=work,
        max_num_seqs=rng.choice((1, 4, 256)),
        shift_scale=rng.choice((0.0, 1.0, 4.0)),
        max_prefill_backlog_s=rng.choice((0.05, 1.0)),
    )
    wrong = (0.3, 1.0, 3.0)
    beliefs = Beliefs(
        rollout=rng.choice(wrong),
        reward=rng.choice(wrong),
        train=rng.choice(wrong),
        rollout_lengths=rng.choice((0.2, 1.0, 3.0)),
        verdict_lengths=rng.choice((0.2, 1.0, 3.0)),
    )
    return run(
        setup,
        train_gpus=rng.randint(1, num_blocks) * setup.block,
        steps=3,
        seed=seed,
        beliefs=beliefs,
        staleness=rng.choice((0, 1, 1, 2)),
        admission=rng.choice(list(Admission)),
        judges_together=rng.random() < 0.3,
    )


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_a_run_of_any_shape_ends(first: int) -> None:
    """A few sequences or none of a kind on 2 to 8 blocks, lengths of one token or all at the limit, shifts that cost
    nothing or minutes, and beliefs that are far off."""
    for seed in range(first, first + 8):
        sim = odd_run(seed)
        assert [step.num_scored for step in sim.steps[:3]] == [sim.setup.workload.num_sequences] * 3
        assert sim.now < 20 * alone_s(sim.setup)


def alone_s(setup: Setup) -> float:
    """Generous: of three steps, each sequence in its turn on one replica, and shifts between all."""
    work, total = setup.workload, 0.0
    for role in INFERENCE:
        lengths, cost, prompt = work.lengths(role), setup.role(role).iteration, work.mean_prompt_tokens(role)
        total += lengths.longest * cost.iteration_s(1, prompt + lengths.longest) + prompt * cost.prefill_s
        total += 2 * setup.shift_s(Role.TRAIN, role, setup.block)
    return 3 * (work.num_sequences * total + setup.train_s(setup.block) + 2 * setup.shift_s(Role.REWARD, Role.TRAIN, 8))


def test_believed_to_be_short_and_long_verdicts() -> None:
    """What was once left for ever: cycles much shorter than a shift, and a role with work and no block."""
    short = measured_lengths([64], 64)
    work = replace(SMALL, num_prompts=5, num_each=1, rollout=short, verdict=measured_lengths([14], 16))
    setup = replace(small(1, 7, workload=work), gpus_per_node=8, shift_scale=4.0)
    wrong = Beliefs(reward=3, train=0.5, rollout_lengths=0.2, verdict_lengths=0.2)
    run(setup, train_gpus=5, beliefs=wrong)


@pytest.mark.parametrize("back_after_s", [30.0, None])
def test_a_node_is_lost_and_the_run_goes_on(back_after_s: float | None) -> None:
    sim = run(small(1), train_gpus=4, scenarios=[LostNode(node=0, at_s=15.0, back_after_s=back_after_s)])
    assert sim.version == 4


def test_no_two_shifts_within_the_dwell_time() -> None:
    for group, train in ((1, 4), (2, 8), (3, 8)):
        setup = small(group, workload=replace(SMALL, num_prompts=16))
        sim = run(setup, train_gpus=train, steps=5)
        assert isinstance(sim.mode, Shiftable)
        cycles = dict(sim.mode.plans)
        times = sorted({shift.at_s for shift in inference_shifts(sim)})
        for before, after in itertools.pairwise(times):
            assert after - before >= DEFAULT.dwell_s(cycles[after].cycle_s) - 1e-3


@pytest.mark.parametrize("shift_scale", [1.0, 4.0])
def test_a_shift_that_pays_is_not_put_off(shift_scale: float) -> None:
    """Rollouts all end at once and verdicts take long: all blocks that rolled out judge from the first plan after that
    which may shift, not from a later one."""
    work = replace(SMALL, num_prompts=160, rollout=measured_lengths([500], 500), verdict=measured_lengths([2000], 2048))
    sim = run(small(3, 32, workload=work, shift_scale=shift_scale), train_gpus=8, steps=2, staleness=0)
    assert isinstance(sim.mode, Shiftable)
    for step in sim.steps[:2]:
        assert step.rolled_out_s is not None and step.scored_s is not None
        shifts = [shift for shift in inference_shifts(sim) if step.rolled_out_s <= shift.at_s < step.scored_s]
        first_s = next(t for t, plan in sim.mode.plans if t >= step.rolled_out_s and "too soon" not in plan.reason)
        assert {(shift.at_s, shift.new) for shift in shifts} == {(first_s, Role.REWARD)}
    scored_s = sim.steps[0].scored_s or 0.0
    first = [shift.new for shift in inference_shifts(sim) if shift.at_s < scored_s]
    assert first.count(Role.REWARD) - first.count(Role.ROLLOUT) == len(sim.blocks), "all began as rollout, all judge"


# --- ablations


class Stays(Scheduler[Sequence, Replica]):
    """Without migration."""

    def migrations(self, replicas: Iterable[Replica], now: float) -> list[Abort[Replica]]:
        return []


def ablated(settings: PlannerSettings = DEFAULT, bindings: Bindings = ANY, **more: object) -> Simulation:
    work = replace(SMALL, num_prompts=96, rollout=lognormal_mixture([(1.0, 3000.0, 0.8)], 8192))
    setup = small(1, 16, workload=work)
    return run(setup, train_gpus=4, settings=settings, bindings=bindings, **more)  # type: ignore[arg-type]


TRAIN, SERVES = tuple(range(12, 16)), tuple(range(12))


@pytest.fixture(scope="module")
def full() -> Simulation:
    return ablated()


def test_a_horizon_that_is_too_short_is_slow(full: Simulation) -> None:
    assert ablated(replace(DEFAULT, horizon_s=2.0)).now > 1.1 * full.now


def test_without_migration_no_sequence_leaves_a_crowd(full: Simulation) -> None:
    stays = ablated(scheduler=Stays)
    assert full.usage.num_migrated > 0 == stays.usage.num_migrated
    assert stays.now != full.now


def test_rollout_and_reward_only(full: Simulation) -> None:
    sim = ablated(bindings=rollout_reward_only(TRAIN))
    assert {shift.block for shift in sim.usage.shifts} <= set(SERVES) and inference_shifts(sim)
    assert all(sim.blocks[index].role is Role.TRAIN for index in TRAIN)
    assert {shift.block for shift in full.usage.shifts} & set(TRAIN)


def test_training_only() -> None:
    sim = ablated(bindings=training_only(rollout=SERVES[:6], reward=SERVES[6:], train=TRAIN))
    moves = {(shift.old, shift.new) for shift in sim.usage.shifts}
    assert moves == {(Role.ROLLOUT, Role.TRAIN), (Role.TRAIN, Role.ROLLOUT)}
    assert {shift.block for shift in sim.usage.shifts} == set(TRAIN)
    assert [block.role for block in sim.blocks[:12]] == [Role.ROLLOUT] * 6 + [Role.REWARD] * 6
