"""Whether what a configuration asks for fits into its cluster: ranks, replicas, slots, nodes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config import Config


def room_faults(config: "Config") -> Iterator[str]:
    """What does not fit, the most telling first."""
    trainer, cluster, roles = config.trainer, config.cluster, config.placement.roles
    if trainer.ranks > 1 and trainer.strategy == "single":
        yield f"trainer.ranks {trainer.ranks} needs trainer.strategy ddp or fsdp2, not single"
    if roles.train.replicas != 1:
        yield (
            f"placement.roles.train.replicas is {roles.train.replicas}, must be 1: trainer.ranks says how many "
            "processes train, placement.roles.train.slots how many slots each of them has"
        )
    train = trainer.ranks * roles.train.slots
    wanted = train + sum(role.replicas * role.slots for role in (roles.rollout, roles.reward))
    have = cluster.nodes * cluster.slots_per_node
    if wanted > have:
        yield (
            f"placement.roles and trainer.ranks want {wanted} slots, the cluster has {have} "
            f"(cluster.nodes {cluster.nodes} x cluster.slots_per_node {cluster.slots_per_node})"
        )
    if cluster.min_nodes > cluster.nodes:
        yield f"cluster.min_nodes {cluster.min_nodes} exceeds cluster.nodes {cluster.nodes}"
    wanted = train + roles.rollout.slots + roles.reward.slots
    have = cluster.min_nodes * cluster.slots_per_node
    if cluster.min_nodes and wanted > have:
        yield (
            f"cluster.min_nodes {cluster.min_nodes} x cluster.slots_per_node {cluster.slots_per_node} are {have} "
            f"slots, but one rollout replica, one reward replica and all trainer.ranks want {wanted}"
        )
