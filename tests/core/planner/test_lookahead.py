"""The fluid against the engines it stands for, and what must hold of any look-ahead."""

from dataclasses import replace

import numpy as np
import pytest

from pipeline.core.iteration import IterationCost
from pipeline.core.modes import ModeName
from pipeline.core.planner.bindings import Bindings
from pipeline.core.planner.lookahead import Outcome, _Costs, look_ahead
from pipeline.core.planner.planner import decide
from pipeline.core.planner.preprocess import preprocess
from pipeline.core.planner.settings import DEFAULT
from pipeline.core.snapshot import Snapshot
from pipeline.simulator.modes import Schedule
from pipeline.simulator.observe import Observer
from pipeline.simulator.priors import monitor_of
from pipeline.simulator.setup import Setup, paper_setup
from pipeline.simulator.simulation import Simulation
from tests.core.planner.cases import COST, REWARD, ROLLOUT, TRAIN, random_snapshot, snapshot


def outcome(seen: Snapshot, *num_rollout: int, num_new: object = None, settings: object = DEFAULT) -> Outcome:
    new = None if num_new is None else np.asarray(num_new, dtype=float)
    return look_ahead(preprocess(seen), np.asarray(num_rollout), settings, new)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_iterations_take_as_long_as_the_cost_model_says(group: int) -> None:
    setup = paper_setup(group, "h800")
    models: list[IterationCost] = [setup.rollout.iteration, setup.reward.iteration]
    batch = np.asarray([[1.0, 3.5, 64.0, 256.0]] * 2)
    found = _Costs(models).iteration_s(batch, batch * 5000)
    for r, model in enumerate(models):
        expected = [model.iteration_s(b, b * 5000) for b in batch[r].tolist()]
        assert found[r] == pytest.approx(expected, rel=1e-12)


def first_step(setup: Setup, rollout: int, reward: int, seed: int, at_s: float) -> tuple[float, float]:
    """When the first step of a disaggregated run is judged, and what is predicted of it at `at_s` by one who knows
    costs and distributions, and not the lengths that were drawn."""
    train = setup.num_gpus - rollout - reward
    schedule = Schedule(mode=ModeName.DISAGGREGATED, rollout=rollout, reward=reward, train=train, staleness=0)
    sim = Simulation(setup, schedule.policy(setup), seed=seed, num_steps=1)
    trains = range((rollout + reward) // setup.block, setup.num_blocks)
    observer = Observer(monitor_of(setup, train_blocks=trains, staleness=0, num_steps=1))
    seen: list[Snapshot] = []
    sim.at(at_s, lambda: seen.append(observer.snapshot(sim)))
    sim.run_until(1)
    assert sim.steps[0].scored_s is not None
    # Each block keeps its role, later in the look-ahead too.
    roles = {block.index: (block.role,) if block.role in (ROLLOUT, REWARD) else () for block in seen[0].blocks}
    picture = preprocess(seen[0], Bindings(roles=roles))  # type: ignore[arg-type]
    predicted = look_ahead(picture, np.asarray(picture.now[:1]), DEFAULT)
    assert predicted.is_reached.all() and predicted.penalty_s == pytest.approx(0)
    return at_s + float(predicted.train_start_s[0]), sim.steps[0].scored_s


@pytest.mark.parametrize(("group", "rollout", "reward"), [(1, 16, 8), (1, 8, 16), (2, 16, 8), (3, 16, 8)])
@pytest.mark.parametrize("at_s", [0.0, 40.0])
def test_a_step_without_shifts_ends_when_it_was_predicted(group: int, rollout: int, reward: int, at_s: float) -> None:
    setup = paper_setup(group, "h800", num_sequences=512)
    errors = []
    for seed in (0, 1):
        predicted, actual = first_step(setup, rollout, reward, seed, at_s)
        errors.append(predicted / actual - 1)
    assert abs(sum(errors) / len(errors)) < 0.12


@pytest.mark.parametrize("serves", [ROLLOUT, REWARD])
def test_more_blocks_never_make_a_lone_step_slower(serves: object) -> None:
    """One role has work, and the other one block."""
    other = REWARD if serves is ROLLOUT else ROLLOUT
    works, rests = ((200.0, [30.0, 0.0, 12.0]),), ((0.0, []),)
    ends = []
    for num in (1, 2, 3, 5, 8, 13, 21, 34):
        seen = snapshot(
            [other, *[serves] * num],  # type: ignore[list-item]
            rollout=works if serves is ROLLOUT else rests,
            reward=works if serves is REWARD else rests,
            staleness=0,
            reward_view={"cost": IterationCost()} if serves is ROLLOUT else {},
        )
        ends.append(float(outcome(seen, preprocess(seen).now[0]).train_start_s[0]))
    assert ends == sorted(ends, reverse=True)
    assert ends[-1] < ends[0] / 2


def test_moves_cost() -> None:
    seen = snapshot(
        [ROLLOUT] * 4 + [REWARD] * 4,
        rollout=((100, [20.0] * 10), (256, [])),
        reward=((60, [10.0] * 5), (0, [])),
        train=(0, 1),
    )
    stay, move = outcome(seen, 4, 6).penalty_s
    assert stay == 0 < move
    dear = replace(seen, shift_s={role: 4 * seconds for role, seconds in seen.shift_s.items()})
    assert outcome(dear, 6).penalty_s[0] > move
    assert outcome(dear, 6).value_s[0] > outcome(seen, 6).value_s[0]
    needless = outcome(seen, 4, 4, num_new=[[0, 2], [0, 2]])
    assert needless.value_s[1] > needless.value_s[0] and needless.penalty_s[1] > needless.penalty_s[0] == 0
    free = replace(DEFAULT, is_penalized=False)
    assert (outcome(seen, 4, 6, settings=free).penalty_s == 0).all()


def test_what_a_shift_costs_by_hand() -> None:
    """Two of four rollout blocks go: half of what runs is prefilled again by those that stay; two shifts."""
    seen = snapshot([ROLLOUT] * 4 + [REWARD] * 4, rollout=((0, [0.0, 0.0, 40.0]), (0, [])), reward=((9, []), (0, [])))
    tokens = 40 * (300 + 2 * 256)
    expected = (2 * seen.shift_s[REWARD] + tokens / 2 * COST.prefill_s) / 8
    assert outcome(seen, 2).penalty_s[0] == pytest.approx(expected)


def test_a_candidate_is_valued_alone_as_among_others() -> None:
    for seed in range(12):
        seen = random_snapshot(seed)
        num = len(preprocess(seen).free)
        together = outcome(seen, *range(num + 1)).value_s
        assert together == pytest.approx([outcome(seen, k).value_s[0] for k in range(num + 1)], rel=1e-9)


def test_a_picture_that_went_through_json_gives_the_same_plan() -> None:
    for seed in range(40):
        seen = random_snapshot(seed)
        plan = decide(seen, DEFAULT)
        assert decide(Snapshot.from_json(seen.to_json()), DEFAULT) == plan == decide(seen, DEFAULT)


def test_it_does_not_change_what_it_is_given() -> None:
    seen = random_snapshot(2)
    picture = preprocess(seen)
    before = [picture.role(role).ages.copy() for role in (ROLLOUT, REWARD)]
    first = look_ahead(picture, np.asarray([0, 1]), DEFAULT)
    second = look_ahead(picture, np.asarray([0, 1]), DEFAULT)
    assert (first.value_s == second.value_s).all()
    assert all((picture.role(r).ages == a).all() for r, a in zip((ROLLOUT, REWARD), before, strict=True))


def test_silent_blocks_are_not_counted_on_later_either() -> None:
    """Those that train come back after the training, unless nothing is heard of them."""
    roles = [ROLLOUT, ROLLOUT, REWARD, TRAIN, TRAIN, TRAIN]
    view = replace(snapshot(roles, train=(3, 4, 5)).train, left_s=5.0)
    seen = snapshot(roles, rollout=((0, []), (300, [])), reward=((0, []), (0, [])), train_view=view)
    silent = replace(seen, blocks=tuple(replace(b, is_silent=b.index > 3) for b in seen.blocks))
    gone = replace(seen, blocks=seen.blocks[:4], train=replace(view, block_indices=(3,)))
    starts = [float(outcome(s, 2).train_start_s[0]) for s in (seen, silent, gone)]
    assert starts[0] < starts[1] == pytest.approx(starts[2], rel=0.02)
