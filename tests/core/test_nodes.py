"""Several nodes and several ranks: copies, seals, what a loss moves where, and what a group does together."""

from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.events import Role
from pipeline.core.fleet import Replicas
from tests.core.test_core import is_start, new_world, stages, until
from tests.fakes.memory import NodeMemory
from tests.fakes.plan import Odds
from tests.fakes.world import World

TWO_NODES = {"num_nodes": 2, "min_nodes": 2, "evaluate_freq": 0}
DONE = de.EndRun(status="done")


def replicas(rollout: int = 1, reward: int = 1, ranks: int = 1, slots: int = 1) -> tuple[Replicas, ...]:
    nums = {Role.ROLLOUT: rollout, Role.REWARD: reward, Role.TRAIN: ranks}
    return tuple(Replicas(role=role, replicas=num, slots=slots) for role, num in nums.items())


def places(world: World) -> dict[str, str]:
    return {worker.name: worker.node for worker in world.core.fleet.workers.values()}


def of(world: World, kind: type, since: int = 0) -> list:
    return [d for d in world.log[since:] if isinstance(d, kind)]


def until_joined(world: World, num: int) -> World:
    while len(world.core.fleet.nodes) < num:
        assert world.tick()
    return world


# --- copies and seals -----------------------------------------------------------------------------------------------


def test_a_version_is_copied_to_the_other_nodes_and_sealed_when_all_hold_it() -> None:
    world = new_world(**TWO_NODES, total_steps=1).start(3, 1)
    world.run()
    node = places(world)["train-0"]
    other = ({"n0", "n1"} - {node}).pop()
    copy, *more = of(world, de.CopyVersion)
    assert (copy.version, copy.source, copy.node, copy.is_first, more) == (1, node, other, False, [])
    sealed = {(d.version, d.node) for d in of(world, de.SealVersion)}
    assert sealed == {(1, "n0"), (1, "n1")} and world.core.ended == DONE


def test_nothing_is_sealed_while_one_node_lacks_the_version() -> None:
    world = new_world(**TWO_NODES).start(3, 1)
    until(world, lambda d: isinstance(d, de.CopyVersion))
    world.copies.clear()
    while world.tick():
        pass
    assert not of(world, de.SealVersion) and world.core.versions.current == 0


def test_holders_multiply_and_each_sends_one_copy_at_a_time() -> None:
    world = new_world(num_nodes=8, min_nodes=8, evaluate_freq=0, total_steps=1).start(3, *[1] * 7)
    until_joined(world, 8)
    rounds = []
    until(world, lambda d: isinstance(d, de.CopyVersion))
    while world.copies:
        rounds.append(len(world.copies))
        now, world.copies = world.copies, []
        for copy in now:
            world._copy(copy)
            world.give(world.channels[copy.node].pop())
    assert rounds == [1, 2, 4]
    assert world.run().core.ended == DONE


def test_a_late_node_gets_the_current_version_before_it_gets_workers() -> None:
    world = new_world(**TWO_NODES, replicas=replicas(rollout=2), total_steps=6, save_freq=6).start(3, 1)
    late = world.channels.pop("n1")
    until(world, is_start("rollout", 3))
    assert set(places(world).values()) == {"n0"} and "rollout-1" not in places(world)
    mark = len(world.log)
    world.channels["n1"] = late
    until_joined(world, 2)
    first, *_ = of(world, de.CopyVersion, mark)
    assert first.is_first and first.node == "n1" and first.version >= 2
    assert places(world)["rollout-1"] == "n1" and world.run().core.ended == DONE


def test_a_failed_copy_is_tried_again_and_a_node_where_all_fail_is_ended() -> None:
    world = new_world(**TWO_NODES, restarts=2, odds=Odds(copy_fails=1.0)).start(3, 1)
    world.run()
    assert len(of(world, de.CopyVersion)) == 3 * len(of(world, de.EndNode))
    cause = "node n1 was lost 3 times without progress: 3 copies of weights into its memory failed: closed by peer"
    assert world.core.ended == de.EndRun(status="failed", reason=cause)


def test_reports_of_older_copies_change_nothing() -> None:
    world = new_world(**TWO_NODES).start(3, 1)
    copy = until(world, lambda d: isinstance(d, de.CopyVersion))
    assert isinstance(copy, de.CopyVersion)
    for number in (copy.number - 1, copy.number + 1):
        assert world.give(ev.VersionCopied(number=number, node=copy.node)) == []
        assert world.give(ev.CopyFailed(number=number, node=copy.node, reason="late")) == []
    assert world.give(ev.VersionSealed(version=1, node=copy.node)) == []


# --- losses ---------------------------------------------------------------------------------------------------------


def test_a_lost_nodes_work_moves_to_free_slots_at_once_and_no_version_is_lost() -> None:
    world = new_world(**TWO_NODES, total_steps=6, save_freq=6).start(2, 4)
    until(world, is_start("rollout", 3))
    node = places(world)["rollout-0"]
    other = ({"n0", "n1"} - {node}).pop()
    world.num_slots[other] = 4
    mark, current = len(world.log), world.core.versions.current
    world.lose_node(node)
    if node == "n0":
        assert places(world)["rollout-0"] == "n1"
    assert world.core.versions.current == current >= 2
    assert world.run().core.ended == DONE
    assert world.durable.recorded == [1, 2, 3, 4, 5, 6]
    assert [d.node for d in of(world, de.StartNode, mark)] == [node]


def test_a_version_that_only_the_lost_node_held_is_published_again() -> None:
    world = new_world(**TWO_NODES, total_steps=3, save_freq=1).start(1, 3)
    until_joined(world, 2)
    until(world, lambda d: isinstance(d, de.CopyVersion) and d.version == 2)
    source = of(world, de.CopyVersion)[-1].source
    world.copies.clear()
    mark = len(world.log)
    world.lose_node(source)
    assert world.core.versions.current == 1 and world.core.versions.written is None
    assert world.run().core.ended == DONE
    assert (2, "publish") in stages(world.log[mark:])


def test_a_version_that_another_node_holds_survives_its_source() -> None:
    world = new_world(num_nodes=3, min_nodes=3, evaluate_freq=0, total_steps=3, save_freq=1).start(1, 1, 3)
    until_joined(world, 3)
    until(world, lambda d: isinstance(d, de.CopyVersion) and d.version == 2)
    source = of(world, de.CopyVersion)[-1].source
    world._copy(world.copies.pop())
    while world.core.crew.memories.holders(2) == [source]:
        assert world.tick()
    world.copies.clear()
    mark = len(world.log)
    world.lose_node(source)
    assert world.core.versions.written == 2
    assert world.run().core.ended == DONE
    assert (2, "publish") not in stages(world.log[mark:])


def test_when_all_nodes_are_lost_the_run_goes_back_to_the_checkpoint() -> None:
    world = new_world(**TWO_NODES, total_steps=4, save_freq=2).start(2, 2)
    until(world, is_start("train", 4))
    mark = len(world.log)
    world.lose_node("n0")
    world.lose_node("n1")
    assert world.run().core.ended == DONE
    assert [s for s, stage in stages(world.log[mark:]) if stage == "train"] == [3, 4]


def test_a_cold_node_that_nobody_can_warm_begins_anew() -> None:
    world = new_world(**TWO_NODES, total_steps=4, save_freq=4).start(3, 1)
    late = world.channels.pop("n1")
    until(world, is_start("rollout", 3))
    world.channels["n1"] = late
    until(world, lambda d: isinstance(d, de.CopyVersion) and d.is_first)
    mark = len(world.log)
    world.lose_node("n0")
    assert {d.node for d in of(world, de.StartNode, mark)} == {"n0", "n1"}
    assert world.run().core.ended == DONE


def test_memories_that_began_anew_with_an_older_version_than_the_checkpoint_begin_once_more() -> None:
    world = new_world(total_steps=4, save_freq=1, evaluate_freq=0).start()
    until(world, is_start("train", 4))
    world.give(ev.NodeLost(node="n0", reason="silent"))
    world._end_node("n0")
    world.memories["n0"] = NodeMemory.of(0)  # it was filled before version 1 was saved
    mark = len(world.log)
    world.give(ev.NodeJoined(node="n0", num_slots=3, version=0))
    assert world.run().core.ended == DONE
    (end,) = of(world, de.EndNode, mark)
    assert end.reason == "its memory shows version 0, and the newest checkpoint is 3"
    assert world.durable.recorded == [1, 2, 3, 4]


# --- nodes that stay away -------------------------------------------------------------------------------------------


def test_a_run_begins_and_goes_on_with_the_fewest_nodes_that_it_needs() -> None:
    world = new_world(num_nodes=2, min_nodes=1, replicas=replicas(rollout=3), total_steps=2, evaluate_freq=0)
    world.start(3, 2)
    del world.channels["n1"]
    world.run()
    assert world.core.ended == DONE and set(places(world)) == {"rollout-0", "reward-0", "train-0"}


def test_when_a_node_is_given_up_extra_replicas_yield_to_what_no_step_can_do_without() -> None:
    plan = {"num_nodes": 2, "min_nodes": 1, "restarts": 0, "evaluate_freq": 0, "total_steps": 4}
    world = new_world(**plan, replicas=replicas(rollout=3, reward=2)).start(3, 3)
    until(world, is_start("rollout", 2))
    (lost,) = {places(world)["train-0"]}
    world.lose_node(lost)
    fenced = [d.reason for d in of(world, de.FenceReplica)]
    assert world.run().core.ended == DONE
    assert not fenced or all(reason.startswith("its slots are needed for ") for reason in fenced)
    assert {"rollout-0", "reward-0", "train-0"} <= set(places(world)) and lost not in places(world).values()
    assert world.durable.recorded == [1, 2, 3, 4]


def test_extra_replicas_yield_on_the_node_that_is_left() -> None:
    plan = {"num_nodes": 2, "min_nodes": 1, "restarts": 0, "evaluate_freq": 0, "total_steps": 3}
    world = new_world(**plan, replicas=replicas(rollout=2, reward=2, ranks=2)).start(2, 4)
    n0 = world.channels.pop("n0")
    while "rollout-1" not in places(world) and "reward-0" not in places(world):
        assert world.tick()
    world.channels["n0"] = n0
    until(world, is_start("rollout", 2))
    extra = {name for name, node in places(world).items() if node == "n1" and name in ("rollout-1", "reward-1")}
    essential = {name for name, node in places(world).items() if node == "n0"} & {"rollout-0", "reward-0", "train-0"}
    world.lose_node("n0")
    assert world.run().core.ended == DONE
    assert bool(of(world, de.FenceReplica)) == bool(extra and essential)
    assert set(places(world).values()) == {"n1"}


def test_fewer_nodes_than_the_minimum_end_the_run() -> None:
    world = new_world(**TWO_NODES, restarts=0).start(2, 1)
    until(world, is_start("rollout", 1))
    world.lose_node("n1")
    assert world.core.ended == de.EndRun(status="failed", reason="node n1 was lost 1 times without progress: silent")


# --- ranks ----------------------------------------------------------------------------------------------------------


def test_every_rank_has_its_task_and_the_stage_ends_when_all_have() -> None:
    world = new_world(replicas=replicas(ranks=3), total_steps=1, evaluate_freq=0).start(5)
    world.run()
    for stage in ("train", "publish", "checkpoint"):
        tasks = [d for d in of(world, de.StartTask) if d.stage == stage]
        assert sorted(d.worker for d in tasks) == ["train-0", "train-1", "train-2"]
    assert len(of(world, de.CommitTrained)) == 1 and world.core.ended == DONE


def test_ranks_live_and_die_together() -> None:
    world = new_world(replicas=replicas(ranks=2), total_steps=3, save_freq=3, evaluate_freq=0).start(4)
    until(world, is_start("train", 2))
    mark = len(world.log)
    world.kill("train-1")
    until(world, lambda d: isinstance(d, de.FenceReplica))
    assert [d.worker for d in of(world, de.FenceReplica)] == ["train-0"]
    assert world.run().core.ended == DONE
    started = of(world, de.StartWorker, mark)
    assert sorted(d.worker for d in started) == ["train-0", "train-1"] and len({d.life for d in started}) == 1
    assert [s for s, stage in stages(world.log[mark:]) if stage == "train"].count(1) == 2, "trained again by both"


def test_only_the_rank_that_died_by_itself_counts_as_dead() -> None:
    world = new_world(replicas=replicas(ranks=2), restarts=1, evaluate_freq=0).start(4)
    until(world, is_start("rollout", 1))
    world.kill("train-0")
    until(world, lambda d: isinstance(d, de.StartWorker) and d.worker == "train-1" and d.life > 1)
    assert [world.core.fleet.workers[f"train-{rank}"].deaths for rank in (0, 1)] == [1, 0]
    assert world.run().core.ended == DONE


def test_a_group_whose_ranks_are_on_two_nodes_outlives_either() -> None:
    for lost in ("n0", "n1"):
        world = new_world(**TWO_NODES, replicas=replicas(ranks=2), total_steps=4, save_freq=2).start(3, 1)
        until_joined(world, 2)
        until(world, is_start("train", 3))
        world.lose_node(lost)
        assert world.run().core.ended == DONE
        assert world.durable.recorded == [1, 2, 3, 4]


def test_a_node_that_does_not_come_back_is_given_up_at_once() -> None:
    world = new_world(num_nodes=2, min_nodes=1, replicas=replicas(rollout=2), total_steps=3, evaluate_freq=0).start(
        3, 1
    )
    until_joined(world, 2)
    mark = len(world.log)
    world._end_node("n1")
    world.give(ev.NodeLost(node="n1", reason="Slurm took it", is_gone=True))
    assert not of(world, de.StartNode, mark) and world.run().core.ended == DONE


def test_a_run_that_cannot_do_without_a_node_that_is_gone_asks_for_others() -> None:
    world = new_world(**TWO_NODES).start(3, 1)
    until_joined(world, 2)
    world._end_node("n1")
    world.give(ev.NodeLost(node="n1", reason="Slurm took it", is_gone=True))
    assert world.core.ended == de.EndRun(status="requeued", reason="node n1 is gone: Slurm took it")
