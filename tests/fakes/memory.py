"""A node's shared memory, as far as versions go."""

from collections.abc import Collection
from dataclasses import dataclass, field

from pipeline.core.decisions import CopyVersion, SealVersion
from pipeline.gps.placement import deal_out


@dataclass(slots=True)
class NodeMemory:
    """`slots`: of each of the two the version, and which piles of it are there; `shown`: the visible one, -1 if none
    is; `piles`: what the node is to hold."""

    shown: int
    piles: frozenset[int]
    slots: list[tuple[int, set[int]]] = field(default_factory=lambda: [(-1, set()), (-1, set())])

    @classmethod
    def of(cls, version: int, piles: Collection[int] = (0,)) -> "NodeMemory":
        memory = cls(version, frozenset(piles))
        memory.slots[version % 2] = (version, set(piles))
        return memory

    def has(self, version: int) -> set[int]:
        found, piles = self.slots[version % 2]
        return piles if found == version else set()

    def holds(self, version: int) -> bool:
        """All that it is to hold of it."""
        return self.piles <= self.has(version)

    def begin(self, version: int, *, is_first: bool = False) -> None:
        """What is written over is gone, and must not be visible; `is_first`: nobody looks."""
        self.shown = -1 if is_first else self.shown
        assert self.shown < 0 or self.shown % 2 != version % 2, (self, version)
        if self.slots[version % 2][0] != version:
            self.slots[version % 2] = (version, set())

    def write(self, version: int, piles: Collection[int]) -> None:
        self.begin(version)
        self.slots[version % 2][1].update(piles)

    def seal(self, version: int, piles: Collection[int]) -> None:
        assert self.holds(version) and version > self.shown and self.has(version) == set(piles), (self, version, piles)
        self.shown = version

    def shows(self, version: int) -> bool:
        return self.holds(version) and version <= self.shown


def dealt_to(node: str, nodes: list[str], there: Collection[str], num_piles: int, replication: int) -> tuple[int, ...]:
    """The piles of one of the nodes that are there."""
    return deal_out({name: nodes.index(name) for name in there}, num_piles, replication)[node]


def piles_in(order: CopyVersion | SealVersion, num_piles: int) -> set[int]:
    return set(order.piles or range(num_piles))
