"""Which node holds which tensors of a model, and how many times there is room for it.

Tensors are dealt into as many *piles* as there are nodes. Node n holds pile n and those of the nodes before it, as many
as copies are wanted. When a node is lost, its piles are on its neighbours; what those give instead, their other
neighbours take over from them.
"""

import math
from collections.abc import Collection, Iterable, Mapping

from pipeline.gps.layout import Layout, Shapes, stored

MOST_PILES = 63
"""A store says in one word which of them it holds."""


def replicas_that_fit(model_bytes: int, budget_bytes: int, num_nodes: int, slots: int) -> int:
    """How many copies of the model all nodes together have room for, at most one on each; 0 if not even one."""
    return min(num_nodes, num_nodes * budget_bytes // (model_bytes * slots))


def num_piles(num_nodes: int, replication: int) -> int:
    """One, if each node holds everything; `replication` 0 says so, too."""
    return num_nodes if 0 < replication < num_nodes else 1


def piles_of(node: int, num: int, replication: int) -> tuple[int, ...]:
    """What node number `node` holds of `num` piles; of one pile, that."""
    return tuple(sorted((node - back) % num for back in range(max(1, replication)))) if num > 1 else (0,)


def deal_out(numbers: Mapping[str, int], num: int, replication: int) -> dict[str, tuple[int, ...]]:
    """What each of these nodes holds. Of nodes that are not there any more, the one with the smallest number takes over
    what none of them would hold."""
    found = {node: piles_of(number, num, replication) for node, number in numbers.items()}
    if found:
        first = min(numbers, key=lambda node: numbers[node])
        orphans = set(range(num)).difference(*found.values())
        found[first] = tuple(sorted({*found[first], *orphans}))
    return found


def deal(sizes: Mapping[str, int], num: int) -> dict[str, int]:
    """The pile of each tensor: all piles about equally large. Largest first, each to the smallest pile."""
    total = [0] * num
    found = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        least = total.index(min(total))
        found[name] = least
        total[least] += sizes[name]
    return found


def place(shapes: Shapes, num_nodes: int, replication: int) -> Layout:
    """Whole tensors, each on `replication` nodes that follow each other, all nodes with about as many elements."""
    if not 1 <= replication <= num_nodes:
        raise ValueError(f"a tensor cannot be on {replication} of {num_nodes} nodes")
    num = num_piles(num_nodes, replication)
    pile = deal({name: math.prod(shape) for name, shape in shapes.items()}, num)
    return held_by(shapes, pile, (piles_of(node, num, replication) for node in range(num_nodes)))


def held_by(shapes: Shapes, pile_of: Mapping[str, int], nodes: Iterable[Collection[int]]) -> Layout:
    """Of nodes that hold these piles."""
    return stored(shapes, ([name for name in shapes if pile_of[name] in own] for own in nodes))
