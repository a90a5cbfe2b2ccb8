"""Which block has which role: what has changed in the core's ledger, as reports."""

from collections.abc import Iterable
from dataclasses import dataclass

from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.events import Role
from pipeline.core.reports import (
    BlockBound,
    BlockHeard,
    BlockKnown,
    BlockLost,
    Report,
    ShiftBegun,
    ShiftEnded,
    TrainBlocksChosen,
)
from pipeline.watching.ports import Block, Places

_CHANGING = (
    ev.RunRestored,
    ev.NodeJoined,
    ev.NodeLost,
    ev.VersionSealed,
    ev.WorkerReady,
    ev.WorkerDied,
    ev.WorkerSlept,
    ev.WorkerWoken,
    ev.WakeFailed,
    ev.UpdateFailed,
    ev.PlanMade,
    ev.TimerFired,
)
"""Events with which workers change; what is wanted of blocks may change with any."""
_ORDERING = (de.ShiftDown, de.ShiftUp, de.StartWorker, de.FenceReplica)


@dataclass(slots=True)
class _Seen:
    """A block, as it was told of. `serves`: its role has it; `is_moving`: not yet, and that is told; `left`: who had it
    before it began to move."""

    role: Role | None = None
    left: Role | None = None
    serves: bool = False
    is_moving: bool = False
    is_lost: bool = False


class Hands:
    """Who has which block, as it was told."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._seen: dict[int, _Seen] = {}
        self._train: tuple[int, ...] = ()
        self._wanted: list[Role | None] = []

    def may_have_changed(self, event: ev.Event, decisions: Iterable[de.Decision]) -> bool:
        """Cheap: most events are of sequences, and change no block."""
        return (
            isinstance(event, _CHANGING)
            or any(isinstance(decision, _ORDERING) for decision in decisions)
            or [block.wanted for block in self._places.all] != self._wanted
        )

    def role(self, block: int) -> Role | None:
        """As it was told."""
        seen = self._seen.get(block)
        return None if seen is None or seen.is_lost else seen.role

    def heard(self, now: float) -> Iterable[Report]:
        """Of those that live: nobody is silent whom the core does not call lost."""
        return (BlockHeard(at_s=now, block=index) for index, seen in self._seen.items() if not seen.is_lost)

    def look(self, now: float) -> Iterable[Report]:
        """What has changed since the last look."""
        blocks = self._places.all
        self._wanted = [block.wanted for block in blocks]
        for block in blocks:
            seen = self._seen.get(block.index)
            if seen is None:
                seen = self._seen[block.index] = _Seen()
                yield BlockKnown(at_s=now, block=block.index, node=block.node_number)
            self._places.place(block)
            yield from self._look_at(block, seen, now)
        if (train := self._places.train) != self._train:
            self._train = train
            yield TrainBlocksChosen(at_s=now, block_indices=train)

    def _look_at(self, block: Block, seen: _Seen, now: float) -> Iterable[Report]:
        index, wanted = block.index, block.wanted
        if self._places.is_lost(block):
            if not seen.is_lost:
                seen.is_lost, seen.serves, seen.is_moving = True, False, False
                yield BlockLost(at_s=now, block=index)
            return
        holder = self._places.held_by(block)
        serves = wanted is not None and holder is wanted
        is_back, seen.is_lost = seen.is_lost, False
        if wanted is None:
            if is_back or seen.role is not None or seen.is_moving:
                yield BlockBound(at_s=now, block=index, role=None)
        elif is_back or seen.role is not wanted or (seen.serves and not serves):
            gives = seen.left if seen.is_moving else seen.role or holder
            has_fallen = seen.role is wanted or (gives is wanted and not seen.is_moving)
            old = None if is_back or has_fallen else gives
            if serves and old is None:
                yield BlockBound(at_s=now, block=index, role=wanted)
                seen.is_moving = False
            else:
                yield ShiftBegun(at_s=now, block=index, old=old, new=wanted)
                seen.is_moving, seen.left = True, old
        if serves and seen.is_moving:
            yield ShiftEnded(at_s=now, block=index)
        seen.role, seen.serves = wanted, serves
        seen.is_moving = wanted is not None and not serves
