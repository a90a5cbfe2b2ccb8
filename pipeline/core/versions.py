"""The life of a weight version.

    WRITTEN ▶ SEALED ▶ (loaded by each rollout replica) ▶ RETIRED when a newer one is sealed

A written version is in shared memory but invisible; sealing makes it the current one on every node. Versions only
grow.
"""

from dataclasses import dataclass
from enum import StrEnum


class VersionState(StrEnum):
    WRITTEN = "written"
    SEALED = "sealed"
    RETIRED = "retired"


@dataclass(slots=True)
class Versions:
    """`current` is the newest sealed version; `written` waits to be sealed (None: nothing does)."""

    current: int = 0
    written: int | None = None

    def state(self, version: int) -> VersionState:
        if version == self.written:
            return VersionState.WRITTEN
        if version == self.current:
            return VersionState.SEALED
        assert version < self.current, f"version {version} does not exist; current is {self.current}"
        return VersionState.RETIRED

    def write(self, version: int) -> None:
        assert version == self.current + 1 and self.written is None, (version, self)
        self.written = version

    def seal(self, version: int) -> bool:
        """False if it was sealed before (the report came twice)."""
        if version <= self.current:
            return False
        assert version == self.written, (version, self)
        self.current, self.written = version, None
        return True
