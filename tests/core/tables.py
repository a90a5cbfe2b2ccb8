"""The tables of the three lives, and a count of which of their changes were met."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.core import sequences, versions
from pipeline.core import worker as workers
from pipeline.core.sequences import Place, SequenceChange
from pipeline.core.versions import VersionChange, VersionState
from pipeline.core.worker import WorkerChange, WorkerState

Pair = tuple[object, object]
LIVES: Mapping[str, Mapping[Pair, object]] = {
    "sequence": sequences.LIFE,  # type: ignore[dict-item]
    "version": versions.LIFE,  # type: ignore[dict-item]
    "worker": workers.LIFE,  # type: ignore[dict-item]
}
STATES: Mapping[str, tuple[object, ...]] = {
    "sequence": tuple(
        dict.fromkeys(state for (before, _), after in sequences.LIFE.items() for state in (before, after))
    ),
    "version": tuple(VersionState),
    "worker": tuple(WorkerState),
}
CHANGES: Mapping[str, tuple[object, ...]] = {
    "sequence": tuple(SequenceChange),
    "version": tuple(VersionChange),
    "worker": tuple(WorkerChange),
}


@dataclass(slots=True)
class Hits:
    taken: dict[str, Counter[Pair]] = field(default_factory=lambda: {life: Counter() for life in LIVES})
    refused: dict[str, Counter[Pair]] = field(default_factory=lambda: {life: Counter() for life in LIVES})
    restored: Counter[str] = field(default_factory=Counter)
    """In which state of the index sequences were when a new attempt began."""

    def add(self, other: "Hits") -> None:
        for life in LIVES:
            self.taken[life] += other.taken[life]
            self.refused[life] += other.refused[life]
        self.restored += other.restored


def name(state: object) -> str:
    """As the pages in docs/lives write it."""
    return str(state) if isinstance(state, Place) else str(state).upper()
