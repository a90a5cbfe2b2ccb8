"""Whether what a configuration asks for fits into its cluster: ranks, replicas, slots, nodes, blocks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.config_ranks import rank_faults
from pipeline.core.events import Role
from pipeline.core.fleet import Fleet, Replicas
from pipeline.core.modes import SHARED, ModeName, fill, shared_roles
from pipeline.gps.placement import MOST_PILES

if TYPE_CHECKING:
    from pipeline.config import Config


def replicas_of(config: "Config", num_nodes: int = 0) -> tuple[Replicas, ...]:
    """What is placed, on all nodes or on so many."""
    roles, cluster = config.placement.roles, config.cluster
    wanted = (
        Replicas(role=Role.ROLLOUT, replicas=roles.rollout.replicas, slots=roles.rollout.slots),
        Replicas(role=Role.REWARD, replicas=roles.reward.replicas, slots=reward_slots(config)),
        Replicas(role=Role.TRAIN, replicas=config.trainer.ranks, slots=roles.train.slots),
    )
    return fill(ModeName(config.placement.mode), wanted, [cluster.slots_per_node] * (num_nodes or cluster.nodes))


def reward_slots(config: "Config") -> int:
    """Of a reward replica."""
    return config.placement.roles.reward.slots if config.judge_engine is not None else 0


def block_slots(config: "Config") -> int:
    """Slots that change hands together."""
    return max(config.placement.roles.rollout.slots, reward_slots(config))


def room_faults(config: "Config") -> Iterator[str]:
    """What does not fit, the most telling first."""
    yield from rank_faults(config)
    trainer, cluster, roles = config.trainer, config.cluster, config.placement.roles
    if trainer.ranks > 1 and trainer.strategy == "single":
        yield f"trainer.ranks {trainer.ranks} needs trainer.strategy ddp or fsdp2, not single"
    if trainer.lora is not None and trainer.strategy == "emulated":
        yield "trainer.lora needs a real trainer: trainer.strategy is emulated; valid: single, ddp, fsdp2"
    if roles.train.replicas != 1:
        yield (
            f"placement.roles.train.replicas is {roles.train.replicas}, must be 1: trainer.ranks says how many "
            "processes train, placement.roles.train.slots how many slots each of them has"
        )
    if cluster.min_nodes > cluster.nodes:
        yield f"cluster.min_nodes {cluster.min_nodes} exceeds cluster.nodes {cluster.nodes}"
    if config.gps.replication > cluster.nodes:
        yield f"gps.replication {config.gps.replication} exceeds cluster.nodes {cluster.nodes}; 0: each node holds all"
    if config.num_piles > MOST_PILES:
        yield f"gps.replication needs at most {MOST_PILES} nodes, cluster.nodes is {cluster.nodes}; 0: each holds all"
    yield from _of_own_slots(config) if config.placement.mode == "disaggregated" else _of_shared_slots(config)
    yield from _of_schedule(config)


def _of_own_slots(config: "Config") -> Iterator[str]:
    cluster, roles = config.cluster, config.placement.roles
    train, reward = config.trainer.ranks * roles.train.slots, reward_slots(config)
    wanted = train + roles.rollout.replicas * roles.rollout.slots + roles.reward.replicas * reward
    have = cluster.nodes * cluster.slots_per_node
    if wanted > have:
        yield (
            f"placement.roles and trainer.ranks want {wanted} slots, the cluster has {have} "
            f"(cluster.nodes {cluster.nodes} x cluster.slots_per_node {cluster.slots_per_node})"
        )
    elif missing := _placed(config, cluster.nodes).missing(essential=False):
        yield (
            f"there are slots enough, but each replica needs its own on one node, and cluster.nodes {cluster.nodes} x "
            f"cluster.slots_per_node {cluster.slots_per_node} leave no such room for {', '.join(missing)}"
        )
    wanted = train + roles.rollout.slots + reward
    have = cluster.min_nodes * cluster.slots_per_node
    if cluster.min_nodes and wanted > have:
        yield (
            f"cluster.min_nodes {cluster.min_nodes} x cluster.slots_per_node {cluster.slots_per_node} are {have} "
            f"slots, but one rollout replica, one reward replica and all trainer.ranks want {wanted}"
        )


def _of_shared_slots(config: "Config") -> Iterator[str]:
    cluster, roles, mode = config.cluster, config.placement.roles, config.placement.mode
    if mode == "colocated" and config.algorithm.staleness:
        yield f"placement.mode colocated is synchronous: algorithm.staleness is {config.algorithm.staleness}, must be 0"
    if config.by_steps:
        yield (
            f"placement.mode {mode} needs cluster.slurm.launcher: agent; workers that are steps of their own do not "
            "share their slots"
        )
    if config.judge_engine is None and Role.REWARD in SHARED[ModeName(mode)] and mode != "colocated":
        yield (
            f"placement.mode {mode} gives slots to the judge by turns, and it has none here: valid are disaggregated, "
            "colocated and trainer_pool"
        )
        return
    size, sizes = block_slots(config), {name: getattr(roles, name).slots for name in ("rollout", "reward", "train")}
    if config.judge_engine is None:
        del sizes["reward"]
    trains_there = Role.TRAIN in SHARED[ModeName(mode)]
    for name, num in sizes.items():
        if size % num and (num % size or (name == "train" and trains_there)):
            valid = " or ".join(str(part) for part in range(1, size + 1) if size % part == 0)
            yield (
                f"placement.roles.{name}.slots is {num}, but slots change hands in blocks of {size} (the larger of "
                f"rollout's and reward's): valid is {valid}"
            )
            return
    if cluster.slots_per_node % size:
        yield (
            f"cluster.slots_per_node {cluster.slots_per_node} is no multiple of {size}, the slots that change hands "
            "together (the larger of placement.roles.rollout.slots and placement.roles.reward.slots)"
        )
        return
    yield from _of_blocks(config, cluster.nodes, f"cluster.nodes {cluster.nodes}")
    if cluster.min_nodes:
        yield from _of_blocks(config, cluster.min_nodes, f"cluster.min_nodes {cluster.min_nodes}")


def _of_blocks(config: "Config", num_nodes: int, where: str) -> Iterator[str]:
    """Everything is placed as the run would do it."""
    cluster, wanted = config.cluster, replicas_of(config, num_nodes)
    missing = [f"{w.role}" for w in wanted if not w.replicas] + _placed(config, num_nodes).missing(essential=True)
    if missing:
        yield (
            f"placement.mode {config.placement.mode} on {where} x cluster.slots_per_node {cluster.slots_per_node} has "
            f"no room for {', '.join(missing)}"
        )


def _placed(config: "Config", num_nodes: int) -> Fleet:
    wanted = replicas_of(config, num_nodes)
    fleet = Fleet(wanted, shared_roles(ModeName(config.placement.mode), wanted))
    for number in range(num_nodes):
        fleet.join(str(number), config.cluster.slots_per_node)
    fleet.place()
    return fleet


def _of_schedule(config: "Config") -> Iterator[str]:
    """A shift by hand that nobody would make."""
    planner, cluster, last = config.placement.planner, config.cluster, config.trainer.total_training_steps
    if not planner.schedule:
        return
    if config.placement.mode != "shiftable":
        yield f"placement.planner.schedule is only for placement.mode shiftable, not {config.placement.mode}"
    elif planner.enabled:
        yield "placement.planner.schedule needs placement.planner.enabled: false, else the planner says what is shifted"
    num_blocks = cluster.nodes * cluster.slots_per_node // block_slots(config)
    for number, shift in enumerate(planner.schedule):
        where = f"placement.planner.schedule.{number}"
        if wrong := [block for block in shift.blocks if not 0 <= block < num_blocks]:
            yield f"{where}.blocks names {wrong[0]}; valid: 0 to {num_blocks - 1}, {num_blocks} blocks of slots"
        if shift.step > last:
            yield f"{where}.step is {shift.step}; valid: 1 to {last}, trainer.total_training_steps"
        for earlier, other in enumerate(planner.schedule[:number]):
            both = sorted({*shift.blocks} & {*other.blocks}) if (other.step, other.at) == (shift.step, shift.at) else []
            if both and other.role != shift.role:
                yield f"{where} gives block {both[0]} to {shift.role}, {earlier} to {other.role} at the same moment"
