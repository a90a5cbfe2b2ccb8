"""The life of a weight version.

    UNWRITTEN ⇄ WRITTEN ▶ SEALED ▶ RETIRED when the next one is sealed

A written version is in the shared memory of some nodes but invisible; when all hold it, sealing makes it the current
one, and rollout replicas load it. If those that hold it are lost before, it is unwritten again. Versions only grow.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class VersionState(StrEnum):
    UNWRITTEN = "unwritten"
    WRITTEN = "written"
    SEALED = "sealed"
    RETIRED = "retired"


class VersionChange(StrEnum):
    """What happens to a version."""

    WRITTEN = "written"
    LOST = "lost"
    SEALED = "sealed"
    SUPERSEDED = "superseded"


LIFE: Mapping[tuple[VersionState, VersionChange], VersionState] = {
    (VersionState.UNWRITTEN, VersionChange.WRITTEN): VersionState.WRITTEN,
    (VersionState.WRITTEN, VersionChange.LOST): VersionState.UNWRITTEN,
    (VersionState.WRITTEN, VersionChange.SEALED): VersionState.SEALED,
    (VersionState.SEALED, VersionChange.SUPERSEDED): VersionState.RETIRED,
}
"""The life of a weight version; what is not in it is illegal."""


@dataclass(slots=True)
class Versions:
    """`current` is the newest sealed version. It and the one being published are in shared memory."""

    current: int = 0
    _states: dict[int, VersionState] = field(init=False)

    def __post_init__(self) -> None:
        self.reset(self.current)

    def state(self, version: int) -> VersionState:
        return self._states.get(version, VersionState.RETIRED if version < self.current else VersionState.UNWRITTEN)

    def write(self, version: int) -> None:
        """Only the version after the current one can be written, and only once."""
        moved = version == self.current + 1 and self._move(version, VersionChange.WRITTEN)
        assert moved, (version, self)

    @property
    def written(self) -> int | None:
        """The version that waits to be sealed."""
        following = self.current + 1
        return following if self.state(following) is VersionState.WRITTEN else None

    def lose(self, version: int) -> bool:
        """No memory holds the whole of the written version any more. False, and nothing changes, if it is not one."""
        return self._move(version, VersionChange.LOST)

    def reset(self, version: int) -> None:
        """The only memory there is shows `version`: a life of versions begins anew."""
        self.current = version
        self._states = {version: VersionState.SEALED}

    def seal(self, version: int) -> bool:
        """Make the written version the current one. False, and nothing changes, if it does not wait for that."""
        if not self._move(version, VersionChange.SEALED):
            return False
        self._move(self.current, VersionChange.SUPERSEDED)
        self.current = version
        return True

    def _move(self, version: int, change: VersionChange) -> bool:
        after = LIFE.get((self.state(version), change))
        if after is None:
            return False
        self._states[version] = after
        return True
