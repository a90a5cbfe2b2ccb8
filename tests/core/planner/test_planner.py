"""When the planner shifts, and when it leaves things as they are."""

from dataclasses import replace

import pytest

from pipeline.core.planner.planner import Plan, decide
from pipeline.core.planner.preprocess import preprocess
from pipeline.core.planner.settings import DEFAULT, PlannerSettings
from pipeline.core.snapshot import BlockView, Snapshot, TrainView
from tests.core.planner.cases import REWARD, ROLLOUT, TRAIN, random_snapshot, snapshot

LOPSIDED = snapshot(
    [ROLLOUT] * 6 + [REWARD] * 2,
    rollout=((0, [0.0] * 30 + [3.0]), (0, [])),
    reward=((400, [30.0] * 8), (0, [])),
    train=(6, 7),
)
"""Almost all that is to be done is to judge, and almost all blocks roll out."""


def num_after(seen: Snapshot, plan: Plan, role: object) -> int:
    return sum(plan.moves.get(block.index, block.role) is role for block in seen.blocks)


def with_blocks(seen: Snapshot, **changes: object) -> Snapshot:
    """`changes` of the first block."""
    first: BlockView = replace(seen.blocks[0], **changes)  # type: ignore[arg-type]
    return replace(seen, blocks=(first, *seen.blocks[1:]))


def test_blocks_go_where_the_work_is() -> None:
    plan = decide(LOPSIDED, DEFAULT)
    assert num_after(LOPSIDED, plan, REWARD) >= 6
    chosen = plan.candidates[plan.chosen]
    assert chosen.gain_s > DEFAULT.epsilon * plan.cycle_s and chosen.penalty_s > 0
    assert chosen.num_rollout == num_after(LOPSIDED, plan, ROLLOUT) and chosen.num_rollout + chosen.num_reward == 8


def test_what_is_done_is_best_for_the_next_plan() -> None:
    """Nothing to be gained is left: asked again with its own choice in place, the planner stays, or gains more than
    the threshold again."""
    for seed in range(30):
        seen = random_snapshot(seed)
        plan = decide(seen, DEFAULT)
        blocks = tuple(replace(b, role=plan.moves.get(b.index, b.role)) for b in seen.blocks)
        again = decide(replace(seen, blocks=blocks), DEFAULT)
        if again.moves:
            assert again.candidates[again.chosen].gain_s >= DEFAULT.epsilon * again.cycle_s


def test_without_a_threshold_nothing_is_shifted_for_no_gain() -> None:
    done = decide(LOPSIDED, DEFAULT).moves
    blocks = tuple(replace(b, role=done.get(b.index, b.role)) for b in LOPSIDED.blocks)
    stays = decide(replace(LOPSIDED, blocks=blocks), replace(DEFAULT, epsilon=0.0))
    assert stays.candidates[stays.chosen].gain_s == 0
    assert not stays.moves and stays.reason == "no candidate gains enough"


def test_a_gain_below_the_threshold_is_left() -> None:
    plan = decide(LOPSIDED, DEFAULT)
    needed = plan.candidates[plan.chosen].gain_s / plan.cycle_s
    assert decide(LOPSIDED, replace(DEFAULT, epsilon=needed * 0.99)).moves == plan.moves
    stays = decide(LOPSIDED, replace(DEFAULT, epsilon=needed * 1.01))
    assert not stays.moves and stays.reason == "no candidate gains enough"
    assert stays.candidates[stays.chosen].num_rollout == 6 and stays.candidates[stays.chosen].gain_s == 0


def test_after_a_shift_there_is_none_for_the_dwell_time() -> None:
    dwell_s = DEFAULT.dwell_s(preprocess(LOPSIDED).cycle_s)
    assert dwell_s >= DEFAULT.min_dwell_s
    early, late = (replace(LOPSIDED, last_shift_s=LOPSIDED.at_s - s) for s in (dwell_s - 0.1, dwell_s + 0.1))
    assert decide(early, DEFAULT).reason == "too soon after the last shift"
    assert decide(late, DEFAULT).moves == decide(LOPSIDED, DEFAULT).moves != {}


def test_blocks_without_a_role_get_one_at_once() -> None:
    """After a training, or a lost node that came back. Also within the dwell time and with little to gain."""
    for role in (None, TRAIN):
        seen = replace(with_blocks(LOPSIDED, role=role), last_shift_s=LOPSIDED.at_s)
        plan = decide(seen, replace(DEFAULT, epsilon=9.0))
        assert plan.reason == "blocks have no role" and 0 in plan.moves


def test_soon_after_a_shift_only_those_without_a_role_get_one() -> None:
    seen = replace(with_blocks(LOPSIDED, role=None), last_shift_s=LOPSIDED.at_s - 1)
    assert decide(seen, DEFAULT).moves == {0: REWARD}
    assert len(decide(replace(seen, last_shift_s=None), DEFAULT).moves) > 3
    moving = replace(seen, last_shift_s=None, blocks=(*seen.blocks[:7], replace(seen.blocks[7], ready_in_s=2.0)))
    idle = replace(moving, blocks=tuple(replace(b, role=TRAIN) if b.index == 6 else b for b in moving.blocks))
    assert decide(moving, DEFAULT).reason == "a shift is in flight"
    assert decide(idle, DEFAULT).moves.keys() == {0, 6}


def test_nothing_is_planned_while_a_shift_is_in_flight() -> None:
    plan = decide(with_blocks(LOPSIDED, ready_in_s=1.5), DEFAULT)
    assert plan.reason == "a shift is in flight" and not plan.moves
    # A block on its way to the training is no reason to wait.
    blocks = tuple(replace(b, role=TRAIN, ready_in_s=2.0) if b.index > 5 else b for b in LOPSIDED.blocks)
    train = TrainView(block_indices=(6, 7), step_s=20.0, left_s=22.0)
    assert decide(replace(LOPSIDED, blocks=blocks, train=train), DEFAULT).candidates


def test_silent_blocks_are_neither_counted_on_nor_shifted() -> None:
    blocks = tuple(replace(b, is_silent=b.index in (0, 1, 2, 6)) for b in LOPSIDED.blocks)
    plan = decide(replace(LOPSIDED, blocks=blocks), DEFAULT)
    assert {c.num_rollout + c.num_reward for c in plan.candidates} == {4}
    assert plan.moves and not plan.moves.keys() & {0, 1, 2, 6}
    gone = replace(
        LOPSIDED,
        blocks=tuple(b for b in blocks if not b.is_silent),
        train=replace(LOPSIDED.train, block_indices=(7,)),
    )
    assert decide(gone, DEFAULT).moves == plan.moves
    all_silent = replace(LOPSIDED, blocks=tuple(replace(b, is_silent=True) for b in LOPSIDED.blocks))
    assert not decide(all_silent, DEFAULT).moves


@pytest.mark.parametrize("is_waiting", [False, True])
def test_blocks_that_train_are_not_touched(is_waiting: bool) -> None:
    train = TrainView(block_indices=(6, 7), step_s=20.0, left_s=None if is_waiting else 7.0, is_waiting=is_waiting)
    blocks = tuple(replace(b, role=TRAIN) if b.index > 5 else b for b in LOPSIDED.blocks)
    seen = replace(LOPSIDED, train=train, blocks=blocks)
    plan = decide(seen, DEFAULT)
    assert {c.num_rollout + c.num_reward for c in plan.candidates} == {6} and not plan.moves.keys() & {6, 7}
    everyone = replace(seen, train=replace(train, block_indices=tuple(range(8))))
    assert decide(everyone, DEFAULT) == Plan(
        reason="all blocks train", moves={}, cycle_s=decide(everyone, DEFAULT).cycle_s
    )


def test_with_nothing_to_do_nothing_moves() -> None:
    idle = snapshot([ROLLOUT, ROLLOUT, REWARD], rollout=(), reward=(), train=(2,), num_steps=0)
    assert not decide(idle, DEFAULT).moves
    before = snapshot([ROLLOUT, ROLLOUT, REWARD], rollout=(), reward=(), train=(2,), num_admitted=0)
    assert not decide(before, DEFAULT).moves


def test_at_the_end_of_a_run_no_step_is_waited_for() -> None:
    """The last step is judged: no other enters, and there is nothing for rollout to do."""
    last = replace(LOPSIDED, version=8, num_admitted=10, num_steps=10)
    crowds = {r: tuple(replace(c, step=c.step + 8) for c in last.role(r).crowds) for r in (ROLLOUT, REWARD)}
    last = replace(
        last,
        rollout=replace(last.rollout, crowds=crowds[ROLLOUT]),
        reward=replace(last.reward, crowds=crowds[REWARD]),
    )
    assert preprocess(last).enters == (None, None, None)
    assert preprocess(replace(last, num_steps=11)).enters == (None, None, float("inf"))
    assert num_after(last, decide(last, DEFAULT), REWARD) >= num_after(LOPSIDED, decide(LOPSIDED, DEFAULT), REWARD)


@pytest.mark.parametrize(("staleness", "enters"), [(0, (None, float("inf"), None)), (1, (None, 0.0, float("inf")))])
def test_when_steps_enter(staleness: int, enters: tuple[float | None, ...]) -> None:
    """One step is there; with staleness 0 the next enters when it is trained."""
    seen = snapshot([ROLLOUT, REWARD], staleness=staleness)
    assert preprocess(seen).enters == enters


def test_during_a_training_the_next_step_is_first() -> None:
    train = TrainView(block_indices=(1,), step_s=20.0, left_s=8.0)
    seen = snapshot([ROLLOUT, TRAIN], rollout=(), reward=(), train_view=train, staleness=0, num_admitted=1)
    picture = preprocess(seen)
    assert picture.enters == (8.0, float("inf"), None) and picture.training_left_s == 8.0 and picture.free == (0,)
    waits = preprocess(replace(seen, train=replace(train, left_s=None, is_waiting=True)))
    assert waits.training_left_s == seen.shift_s[TRAIN] + 20.0 and waits.free == (0,)


@pytest.mark.parametrize("now", [ROLLOUT, REWARD])
def test_work_that_no_block_serves_is_not_left(now: object) -> None:
    """However dear a shift is, and however much it must gain: else a run would never end."""
    crowds = ((9, []),), ((0, []),)
    rollout, reward = crowds if now is REWARD else crowds[::-1]
    seen = snapshot([now] * 3, rollout=rollout, reward=reward, train=(2,), staleness=0)  # type: ignore[list-item]
    seen = replace(seen, shift_s=dict.fromkeys(seen.shift_s, 1e4))
    plan = decide(seen, PlannerSettings(epsilon=1e3))
    assert plan.reason == "what waits has no block" and plan.moves


def test_what_waits_for_the_rest_of_its_step_is_no_work_of_the_judge() -> None:
    """All of a step are judged together: 39 wait for the last one, which was aborted and waits for a block."""
    seen = snapshot([REWARD] * 3, rollout=((0, [1.0]),), reward=((39, []),), train=(2,), staleness=0)
    plan = decide(replace(seen, shift_s=dict.fromkeys(seen.shift_s, 1e4)), PlannerSettings(epsilon=1e3))
    assert plan.reason == "what waits has no block" and ROLLOUT in plan.moves.values()
    judges = replace(seen, reward=replace(seen.reward, crowds=(replace(seen.reward.crowds[0], ages=(1.0,) * 16),)))
    assert decide(judges, PlannerSettings(epsilon=1e3)).reason == "no candidate gains enough"


@pytest.mark.parametrize("shift_costs", [1.0, 4.0])
def test_a_shift_that_pays_is_made_at_the_first_opportunity(shift_costs: float) -> None:
    """Plans that are made again and again must not all say *later*. Waiting never becomes the better choice while the
    picture stays the same, whatever the time, and a shift is made although the look-ahead knows of later ones."""
    seen = replace(LOPSIDED, shift_s={role: shift_costs * s for role, s in LOPSIDED.shift_s.items()})
    plan = decide(seen, DEFAULT)
    assert len(plan.moves) >= 3
    stay = next(c for c in plan.candidates if c.num_rollout == 6)
    assert plan.candidates[plan.chosen].value_s < stay.value_s - DEFAULT.epsilon * plan.cycle_s
    assert decide(replace(seen, at_s=seen.at_s + 1e4), DEFAULT).moves == plan.moves


def test_without_a_penalty_more_blocks_move() -> None:
    """Where shifts are dear. Of blocks that have a role: the others must get one."""
    nums = []
    for is_penalized in (True, False):
        settings, num = replace(DEFAULT, is_penalized=is_penalized), 0
        for seen in map(random_snapshot, range(60)):
            plan = decide(replace(seen, shift_s={role: 4 * s for role, s in seen.shift_s.items()}), settings)
            num += len(plan.moves) if plan.reason == "the gain exceeds the threshold" else 0
        nums.append(num)
    assert nums[1] > 1.2 * nums[0]
