"""Which node holds which tensors of a model, and how many times there is room for it."""

import math
from collections.abc import Iterable

from pipeline.gps.layout import Layout, Shapes, stored


def replicas_that_fit(model_bytes: int, budget_bytes: int, num_nodes: int, slots: int) -> int:
    """How many copies of the model all nodes together have room for, at most one on each; 0 if not even one."""
    return min(num_nodes, num_nodes * budget_bytes // (model_bytes * slots))


def place(shapes: Shapes, num_nodes: int, replication: int) -> Layout:
    """Whole tensors, each on `replication` nodes that follow each other, all nodes with about as many bytes.

    The tensors are dealt into as many piles as there are nodes, largest first to the smallest pile. When a node is
    lost, its piles are on its neighbours; what those give instead, their other neighbours take over from them.
    """
    if not 1 <= replication <= num_nodes:
        raise ValueError(f"a tensor cannot be on {replication} of {num_nodes} nodes")
    if replication == num_nodes:
        return stored(shapes, [shapes] * num_nodes)
    piles: list[list[str]] = [[] for _ in range(num_nodes)]
    sizes = [0] * num_nodes
    for name in sorted(shapes, key=lambda name: -math.prod(shapes[name])):
        least = sizes.index(min(sizes))
        piles[least].append(name)
        sizes[least] += math.prod(shapes[name])
    return stored(shapes, (_names(piles, node, replication) for node in range(num_nodes)))


def _names(piles: list[list[str]], node: int, replication: int) -> Iterable[str]:
    return (name for back in range(replication) for name in piles[node - back])
