"""What is said of a placement that cannot be, and what fits."""

from pathlib import Path

import pytest

from pipeline.config import Config, load_files
from pipeline.config_room import block_slots, replicas_of
from pipeline.core.errors import ConfigError
from pipeline.core.events import Role

SHARED = ("shiftable", "colocated", "rollout_reward_colocated", "trainer_pool")


def load(*overrides: str) -> Config:
    return load_files([Path("configs/emulated.yaml")], overrides)


def problem(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    (found,) = str(caught.value).split("\n  ")[1:]
    return found


def test_colocated_is_synchronous() -> None:
    said = problem("placement.mode=colocated", "algorithm.staleness=1")
    assert "placement.mode colocated is synchronous: algorithm.staleness is 1, must be 0" in said
    assert load("placement.mode=colocated").algorithm.staleness == 0
    for mode in set(SHARED) - {"colocated"}:
        assert load(f"placement.mode={mode}", "algorithm.staleness=1").placement.mode == mode


@pytest.mark.parametrize("mode", SHARED)
def test_workers_that_are_steps_do_not_share_slots(mode: str) -> None:
    in_job = (f"placement.mode={mode}", "cluster.kind=slurm")
    said = problem(*in_job, "cluster.slurm.launcher=step")
    assert f"placement.mode {mode} needs cluster.slurm.launcher: agent" in said
    assert load(*in_job, "cluster.slurm.launcher=agent").placement.mode == mode
    assert load("cluster.kind=slurm", "cluster.slurm.launcher=step").placement.mode == "disaggregated"


def test_slots_that_do_not_nest_are_refused() -> None:
    shiftable = ("placement.mode=shiftable", "cluster.slots_per_node=6", "placement.roles.rollout.slots=3")
    said = problem(*shiftable, "placement.roles.reward.slots=2")
    assert "placement.roles.reward.slots is 2, but slots change hands in blocks of 3" in said
    said = problem(*shiftable, "placement.roles.train.slots=2")
    assert "placement.roles.train.slots is 2" in said and "valid is 1 or 3" in said
    assert block_slots(load(*shiftable, "placement.roles.train.slots=3")) == 3
    assert "valid is 1 or 3" in problem(*shiftable, "placement.roles.train.slots=6"), "of two blocks"


def test_a_block_lies_within_a_node() -> None:
    shiftable = ("placement.mode=shiftable", "placement.roles.reward.slots=2")
    said = problem(*shiftable, "cluster.slots_per_node=5")
    assert "cluster.slots_per_node 5 is no multiple of 2, the slots that change hands together" in said
    assert block_slots(load(*shiftable, "cluster.slots_per_node=4")) == 2


def test_each_role_needs_room() -> None:
    said = problem("placement.mode=shiftable", "cluster.slots_per_node=1", "trainer.ranks=2")
    assert "placement.mode shiftable on cluster.nodes 1 x cluster.slots_per_node 1 has no room for train-1" in said
    assert load("placement.mode=shiftable", "cluster.slots_per_node=1").placement.mode == "shiftable"

    said = problem("placement.mode=rollout_reward_colocated", "cluster.slots_per_node=1")
    assert "has no room for" in said and "rollout" in said, "what trains has its own slots there"
    said = problem("placement.mode=trainer_pool", "cluster.slots_per_node=1")
    assert "has no room for" in said, "who judges has its own slots there"

    two = ("placement.mode=shiftable", "cluster.nodes=2", "cluster.slots_per_node=1", "trainer.ranks=2")
    assert load(*two).cluster.nodes == 2
    assert "on cluster.min_nodes 1 x cluster.slots_per_node 1 has no room for" in problem(*two, "cluster.min_nodes=1")


BY_HAND = (
    "placement.mode=shiftable",
    "placement.planner.enabled=false",
    "placement.planner.schedule=[{step: 1, at: rolled_out, blocks: [1, 5], role: reward}]",
)


def test_a_schedule_names_blocks_that_are_there() -> None:
    said = problem(*BY_HAND, "cluster.slots_per_node=4")
    assert "placement.planner.schedule.0.blocks names 5; valid: 0 to 3, 4 blocks of slots" in said
    two_nodes = (*BY_HAND, "cluster.slots_per_node=4", "cluster.nodes=2")
    assert load(*two_nodes).placement.planner.schedule[0].blocks == [1, 5]
    assert load(*two_nodes, "cluster.min_nodes=1").placement.planner.schedule[0].blocks == [1, 5], (
        "what is on a lost node is done when it is back"
    )


def test_a_schedule_that_nobody_would_follow_is_refused() -> None:
    said = problem(*BY_HAND, "cluster.slots_per_node=6", "placement.planner.enabled=true")
    assert "placement.planner.schedule needs placement.planner.enabled: false" in said
    said = problem(*BY_HAND, "cluster.slots_per_node=6", "placement.mode=trainer_pool")
    assert "placement.planner.schedule is only for placement.mode shiftable, not trainer_pool" in said
    assert "not disaggregated" in problem(*BY_HAND, "cluster.slots_per_node=6", "placement.mode=disaggregated")


def test_strict_has_one_replica_of_each_engine() -> None:
    strict = ("run.determinism=strict", "placement.mode=shiftable")
    said = problem(*strict, "cluster.slots_per_node=2")
    assert "placement.mode shiftable gives rollout 2 replicas, must be 1" in said
    for mode in ("shiftable", "colocated"):
        assert load("run.determinism=strict", f"placement.mode={mode}", "cluster.slots_per_node=1").is_strict


@pytest.mark.parametrize(
    ("mode", "rollout", "reward"),
    [
        ("disaggregated", 1, 1),
        ("colocated", 4, 4),
        ("shiftable", 4, 4),
        ("rollout_reward_colocated", 3, 3),
        ("trainer_pool", 3, 1),
    ],
)
def test_who_shares_slots_gets_as_many_replicas_as_there_is_room_for(mode: str, rollout: int, reward: int) -> None:
    placed = {w.role: w.replicas for w in replicas_of(load(f"placement.mode={mode}", "cluster.slots_per_node=4"))}
    assert placed == {Role.ROLLOUT: rollout, Role.REWARD: reward, Role.TRAIN: 1}
