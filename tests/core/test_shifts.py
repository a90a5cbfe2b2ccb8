"""Blocks that change hands: who goes down and comes up when, in each mode, and what follows when it fails."""

import random

import pytest

from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.events import INFERENCE, Role
from pipeline.core.fleet import Replicas
from pipeline.core.modes import ModeName, fill
from pipeline.core.worker import WorkerState
from tests.core.test_core import new_world, until
from tests.core.test_nodes import DONE, of, replicas
from tests.fakes.plan import Odds
from tests.fakes.world import World

MODES = [mode for mode in ModeName if mode is not ModeName.DISAGGREGATED]
PLAN = {"total_steps": 4, "sequences_per_step": 8, "evaluate_freq": 2, "save_freq": 2}


def shared(
    mode: ModeName, *nodes: int, rollout: int = 1, reward: int = 1, ranks: int = 1, train: int = 1, **changes: object
) -> World:
    """A run on nodes of so many slots; `rollout`, `reward`, `train`: slots of a replica, or of a rank."""
    wanted = (
        Replicas(role=Role.ROLLOUT, replicas=1, slots=rollout),
        Replicas(role=Role.REWARD, replicas=1, slots=reward),
        Replicas(role=Role.TRAIN, replicas=ranks, slots=train),
    )
    plan = {
        "mode": mode,
        "block_slots": max(rollout, reward),
        "replicas": fill(mode, wanted, nodes),
        "num_nodes": len(nodes),
        "min_nodes": len(nodes),
    }
    return new_world(**(PLAN | plan | changes)).start(*nodes)


def states(world: World) -> dict[str, WorkerState]:
    return {worker.name: worker.state for worker in world.core.fleet.workers.values()}


def wanted(world: World) -> list[Role | None]:
    return [block.wanted for block in world.core.blocks.all]


def roles_up(world: World, since: int = 0) -> list[Role]:
    """Whose workers were called, each run of the same role once."""
    called = [Role(d.worker.partition("-")[0]) for d in of(world, de.ShiftUp, since)]
    return [role for i, role in enumerate(called) if i == 0 or called[i - 1] is not role]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(3))
def test_each_mode_trains_to_the_end(mode: ModeName, seed: int) -> None:
    world = shared(mode, 4, has_planner=True, staleness=0 if mode is ModeName.COLOCATED else 1)
    world.rng = random.Random(seed)
    assert world.run().core.ended == DONE
    assert world.durable.recorded == [0, 1, 2, 3, 4]


def test_who_lives_on_the_same_slots_starts_one_after_the_other_the_trainer_last() -> None:
    world = shared(ModeName.SHIFTABLE, 2, 2, ranks=2)
    world.run()
    starts = of(world, de.StartWorker)
    for node in ("n0", "n1"):
        for slot in (0, 1):
            mine = [d.role for d in starts if d.node == node and slot in d.slots]
            assert mine[:2] == [Role.ROLLOUT, Role.REWARD] and mine[2:] in ([], [Role.TRAIN])
    ranks = [d for d in starts if d.role is Role.TRAIN]
    assert len(ranks) == 2 and len({d.life for d in ranks}) == 1, "ranks start all at once"
    assert all(d.is_shared for d in starts)


def test_colocated_goes_round_in_phases() -> None:
    world = shared(ModeName.COLOCATED, 2, ranks=2, total_steps=2, evaluate_freq=0)
    world.run()
    assert roles_up(world) == [Role.ROLLOUT, Role.REWARD, Role.TRAIN] * 2
    trained = [d for d in world.log if isinstance(d, de.StartTask) and d.stage == "train"]
    assert len(trained) == 4, "both ranks, twice"


def test_a_checkpoint_and_prompts_need_no_slots() -> None:
    world = shared(ModeName.COLOCATED, 2, save_freq=1, evaluate_freq=0)
    world.run()
    assert roles_up(world) == [Role.ROLLOUT, Role.REWARD, Role.TRAIN] * 4, "nobody came up for them alone"
    assert world.durable.newest_checkpoint == 4


def test_rollout_and_reward_take_turns_and_training_keeps_its_slots() -> None:
    world = shared(ModeName.ROLLOUT_REWARD_COLOCATED, 3, total_steps=3, evaluate_freq=0)
    world.run()
    assert roles_up(world) == [Role.ROLLOUT, Role.REWARD] * 3
    assert states(world)["train-0"] is WorkerState.READY and not of(world, de.AskPlanner)


def test_slots_that_train_roll_out_meanwhile() -> None:
    world = shared(ModeName.TRAINER_POOL, 3, staleness=1)
    world.run()
    block = world.core.blocks.all[-1]
    assert block.trains and {w.role for w in block.workers} == {Role.ROLLOUT, Role.TRAIN}
    own = [d.worker for d in of(world, de.ShiftUp) if d.worker not in {w.name for w in block.workers}]
    assert own == ["rollout-0"], "what never trains is called once"
    assert len([d for d in of(world, de.ShiftUp) if d.worker == "train-0"]) > 1


def test_a_block_of_two_slots_has_two_small_replicas_or_a_large_one() -> None:
    world = shared(ModeName.SHIFTABLE, 4, rollout=2, train=2)
    until(world, lambda d: isinstance(d, de.ShiftUp))
    assert [sorted(w.name for w in b.workers if w.role is Role.REWARD) for b in world.core.blocks.all] == [
        ["reward-0", "reward-1"],
        ["reward-2", "reward-3"],
    ]
    assert world.run().core.ended == DONE


def test_a_shift_takes_the_sequences_back_before_anybody_else_has_the_slots() -> None:
    world = shared(ModeName.SHIFTABLE, 2, has_planner=True, sequences_per_step=8)
    world._plan = lambda number: ev.PlanMade(number=number, again_s=5.0)  # type: ignore[method-assign]
    first = until(world, lambda d: isinstance(d, de.Dispatch) and d.task.startswith("rollout"))
    assert isinstance(first, de.Dispatch)
    block = world.core.blocks.of(world.core.fleet.workers[first.worker])
    while world.core._placement._asked is None:
        assert world.tick()
    number = max(d.number for d in of(world, de.AskPlanner))
    world.channels.pop("planner", None)
    mark = len(world.log)
    assert block is not None
    world.give(ev.PlanMade(number=number, moves=((block.index, Role.REWARD),)))
    down = of(world, de.ShiftDown, mark)[0]
    assert down.following and all(name.startswith("reward") for name in down.following)
    assert not [d for d in of(world, de.ShiftUp, mark) if d.worker in down.following], "the slots are not free"
    running = {i for t in world.core._tasks.of(down.worker) for i in world.core.sequences._running.get(t.id, ())}
    until(world, lambda d: isinstance(d, de.ShiftUp) and d.worker in down.following)
    assert not world.core._tasks.of(down.worker)
    assert all(world.core.sequences[i].task != down.worker for i in running if i in world.core.sequences)


def test_two_blocks_that_change_places_do_not_wait_for_each_other() -> None:
    """While a training is called: the cycle of three roles on overlapping slots."""
    world = shared(ModeName.SHIFTABLE, 2, 2, ranks=2, has_planner=True, evaluate_freq=1)
    for _ in range(4000):
        if world.core.ended:
            break
        if asked := of(world, de.AskPlanner):
            world.channels.pop("planner", None)
            blocks = world.core.blocks.all
            swap = {Role.ROLLOUT: Role.REWARD, Role.REWARD: Role.ROLLOUT}
            moves = tuple((b.index, swap.get(b.wanted, Role.ROLLOUT)) for b in blocks if b.wanted in (None, *INFERENCE))
            world.give(ev.PlanMade(number=asked[-1].number, moves=moves))
        if not world.core.ended and not world.tick():
            world.let_time_pass()
    assert world.core.ended == DONE


def test_a_failed_waking_leaves_the_slots_idle_until_it_is_started_afresh() -> None:
    world = shared(ModeName.SHIFTABLE, 2, evaluate_freq=0)
    until(world, lambda d: isinstance(d, de.ShiftUp))
    worker = of(world, de.ShiftUp)[0].worker
    world.processes[worker].orders.clear()
    mark = len(world.log)
    world.give(ev.WakeFailed(worker=worker, reason="no such version"))
    assert of(world, de.FenceReplica, mark) == [de.FenceReplica(worker=worker, reason="no such version")]
    block = world.core.blocks.of(world.core.fleet.workers[worker])
    assert block is not None and world.core.blocks.held_by(block) is None
    assert not of(world, de.ShiftUp, mark), "nobody else is called onto them"
    until(world, lambda d: isinstance(d, de.StartWorker) and d.worker == worker)
    assert world.run().core.ended == DONE


def test_a_worker_that_never_wakes_ends_the_run_with_its_reason() -> None:
    world = shared(ModeName.COLOCATED, 1, restarts=1)
    world.odds = Odds(wake_fails=1.0)
    end = world.run().core.ended
    assert end is not None and end.status == "failed" and "no memory" in end.reason


def test_a_sleeper_that_dies_is_started_again_when_its_role_has_the_slots() -> None:
    world = shared(ModeName.COLOCATED, 1, total_steps=2, evaluate_freq=0)
    until(world, lambda d: isinstance(d, de.Dispatch) and d.task.startswith("rollout"))
    assert states(world)["reward-0"] is WorkerState.ASLEEP
    mark = len(world.log)
    world.kill("reward-0")
    until(world, lambda d: isinstance(d, de.StartWorker) and d.worker == "reward-0" and d in world.log[mark:])
    slept = [d for d in of(world, de.ShiftDown, mark) if d.worker == "rollout-0"]
    assert slept, "what rolls out was not disturbed for it"
    assert world.run().core.ended == DONE


def test_a_trainer_that_dies_asleep_is_started_at_once_and_trains_what_it_lost_again() -> None:
    world = shared(ModeName.SHIFTABLE, 2, total_steps=3, save_freq=3, evaluate_freq=0)
    until(world, lambda d: isinstance(d, de.Dispatch) and d.task.startswith("rollout-3"))
    mark = len(world.log)
    world.kill("train-0")
    until(world, lambda d: isinstance(d, de.StartWorker) and d.role is Role.TRAIN)
    world.run()
    again = [d.step for d in world.log[mark:] if isinstance(d, de.StartTask) and d.stage == "train"]
    assert again == [1, 2, 3] and world.core.ended == DONE


def test_steps_begin_in_pairs_where_blocks_shift_and_one_by_one_where_phases_rule() -> None:
    def begun_before(mode: ModeName, step: int, stage: str, other: int) -> bool:
        """Whether the prompts of `step` were begun before `stage` of `other` had ended."""
        world = shared(mode, 4, staleness=1, evaluate_freq=0, total_steps=5)
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        world.watch = lambda event, decisions: (
            starts.update({d.step: len(world.events) for d in decisions if getattr(d, "stage", "") == "prompts"}),
            ends.update(
                {
                    s.step: len(world.events)
                    for s in world.core.steps.values()
                    if s.is_over(stage) and s.step not in ends
                }
            ),
        )[0]
        world.run()
        return starts[step] < ends[other]

    assert begun_before(ModeName.SHIFTABLE, 2, "reward", 1) and begun_before(ModeName.SHIFTABLE, 4, "reward", 3)
    assert not begun_before(ModeName.SHIFTABLE, 3, "reward", 2) and not begun_before(ModeName.SHIFTABLE, 5, "reward", 4)
    assert not begun_before(ModeName.ROLLOUT_REWARD_COLOCATED, 2, "reward", 1)


def test_the_planner_is_asked_once_at_a_time_and_what_it_says_late_changes_nothing() -> None:
    world = shared(ModeName.SHIFTABLE, 4, has_planner=True)
    until(world, lambda d: isinstance(d, de.AskPlanner))
    first = of(world, de.AskPlanner)[0].number
    world.channels.pop("planner", None)
    for _ in range(200):
        world.tick()
        world.channels.pop("planner", None)
    assert [d.number for d in of(world, de.AskPlanner)] == [first], "it thinks"
    before = wanted(world)
    world.give(ev.PlanMade(number=first - 1, moves=((0, Role.REWARD),)))
    assert wanted(world) == before


def test_a_plan_cannot_take_slots_that_train_nor_give_what_is_not_there() -> None:
    world = shared(ModeName.SHIFTABLE, 2, has_planner=True)
    until(world, lambda d: isinstance(d, de.StartTask) and d.stage == "train")
    asked = of(world, de.AskPlanner)[-1].number
    world.channels.pop("planner", None)
    mark = len(world.log)
    train = world.core.blocks.train[0]
    moves = ((train, Role.ROLLOUT), (99, Role.REWARD), (1 - train, Role.TRAIN))
    world.give(ev.PlanMade(number=asked, moves=moves))
    assert wanted(world)[train] is Role.TRAIN and wanted(world)[1 - train] in (*INFERENCE, None)
    assert not of(world, de.ShiftDown, mark)


def test_without_a_planner_a_step_still_goes_on() -> None:
    """A role that something waits for, and that nobody serves, gets a block."""
    world = shared(ModeName.SHIFTABLE, 1, has_planner=False)
    assert world.run().core.ended == DONE
    assert set(roles_up(world)) == set(Role)


def test_a_planner_that_never_answers_does_not_stop_the_run() -> None:
    world = shared(ModeName.SHIFTABLE, 2, has_planner=True, shift_s=50.0)
    say = world.say
    world.say = lambda who, event: None if who == "planner" else say(who, event)  # type: ignore[method-assign]
    assert world.run(20_000).core.ended == DONE


@pytest.mark.parametrize("may_move", [True, False])
def test_a_new_replica_takes_from_a_crowded_one_what_pays(may_move: bool) -> None:
    """All run on one; another comes up: half of them go."""
    plan = {"replicas": replicas(rollout=2), "num_nodes": 2, "min_nodes": 2, "evaluate_freq": 0}
    world = new_world(**(PLAN | plan), is_strict=not may_move).start(3, 1)
    late = world.channels.pop("n1")
    first = until(world, lambda d: isinstance(d, de.Dispatch) and d.task.startswith("rollout"))
    assert isinstance(first, de.Dispatch) and len(first.ids) == 8, "all of them"
    world.processes["rollout-0"].is_hung = True
    world.channels["n1"] = late
    while states(world).get("rollout-1") is not WorkerState.READY:
        assert world.tick()
    moved = [i for d in of(world, de.Abort) for i in d.ids]
    assert len(moved) == len(set(moved)) == (4 if may_move else 0)
    world.processes["rollout-0"].is_hung = False
    assert world.run().core.ended == DONE
    began = {d.worker for d in of(world, de.Dispatch) if set(d.ids) & set(moved) and d.task.startswith("rollout")}
    assert began == ({"rollout-0", "rollout-1"} if may_move else set())


def test_what_a_waking_replica_is_to_have_is_kept_for_it() -> None:
    world = shared(ModeName.COLOCATED, 2, evaluate_freq=0)
    until(world, lambda d: isinstance(d, de.ShiftUp) and d.worker == "rollout-1")
    while states(world)["rollout-0"] is not WorkerState.READY or not of(world, de.Dispatch):
        assert world.tick()
    if states(world)["rollout-1"] is WorkerState.WAKING:
        assert len(of(world, de.Dispatch)[0].ids) == 4
    world.run()
    given = [d for d in of(world, de.Dispatch) if d.task.startswith("rollout-1-")]
    assert sorted((d.worker, len(d.ids)) for d in given) == [("rollout-0", 4), ("rollout-1", 4)]


def test_a_lost_nodes_blocks_come_back_with_it() -> None:
    world = shared(ModeName.SHIFTABLE, 2, 2, has_planner=True, total_steps=6, evaluate_freq=0)
    until(world, lambda d: isinstance(d, de.Dispatch))
    train_node = world.core.fleet.workers["train-0"].node
    other = ({"n0", "n1"} - {train_node}).pop()
    indices = {block.index: (block.node, block.slots) for block in world.core.blocks.all}
    world.lose_node(other)
    assert [b.index for b in world.core.blocks.all if world.core.blocks.is_lost(b)] == [
        i for i, (node, _) in indices.items() if node == other
    ]
    assert world.run().core.ended == DONE
    assert {block.index: (block.node, block.slots) for block in world.core.blocks.all} == indices


def test_a_training_group_moves_to_other_blocks_when_its_node_is_gone() -> None:
    world = shared(ModeName.SHIFTABLE, 2, 2, min_nodes=1, total_steps=6, evaluate_freq=0)
    until(world, lambda d: isinstance(d, de.StartTask) and d.stage == "train")
    node = world.core.fleet.workers["train-0"].node
    world._end_node(node)
    world.give(ev.NodeLost(node=node, reason="taken", is_gone=True))
    assert world.run().core.ended == DONE
    assert world.core.fleet.workers["train-0"].node != node
