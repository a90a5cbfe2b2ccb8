"""A node's shared memory, as far as versions go."""

from dataclasses import dataclass


@dataclass(slots=True)
class NodeMemory:
    """`slots`: the version of which each of the two holds the whole; `shown`: the visible one, -1 if there is none."""

    slots: list[int | None]
    shown: int

    @classmethod
    def of(cls, version: int) -> "NodeMemory":
        slots: list[int | None] = [None, None]
        slots[version % 2] = version
        return cls(slots, version)

    def holds(self, version: int) -> bool:
        return self.slots[version % 2] == version

    def begin(self, version: int) -> None:
        """What is written over is gone, and must not be visible."""
        assert self.shown < 0 or self.shown % 2 != version % 2, (self, version)
        self.slots[version % 2] = None

    def write(self, version: int) -> None:
        self.begin(version)
        self.slots[version % 2] = version
