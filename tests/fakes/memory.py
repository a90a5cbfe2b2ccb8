"""A node's shared memory, as far as versions go."""

from collections.abc import Collection
from dataclasses import dataclass, field


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

    def begin(self, version: int) -> None:
        """What is written over is gone, and must not be visible."""
        assert self.shown < 0 or self.shown % 2 != version % 2, (self, version)
        if self.slots[version % 2][0] != version:
            self.slots[version % 2] = (version, set())

    def write(self, version: int, piles: Collection[int]) -> None:
        self.begin(version)
        self.slots[version % 2][1].update(piles)
