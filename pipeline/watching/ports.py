"""What the watcher reads of a core, and of the blocks of slots that change hands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipeline.core.events import Role
from pipeline.core.fleet import Fleet, Worker, WorkerState
from pipeline.core.sequences import Sequences
from pipeline.core.steps import RunPlan, Steps
from pipeline.core.versions import Versions

AWAKE = (WorkerState.READY, WorkerState.LOADING)
"""Workers that serve, or go on serving in a moment."""


class Block(Protocol):
    """Slots that change hands together."""

    @property
    def index(self) -> int: ...
    @property
    def node(self) -> str: ...
    @property
    def node_number(self) -> int: ...
    @property
    def slots(self) -> tuple[int, ...]: ...
    @property
    def roles(self) -> tuple[Role, ...]:
        """Who may have it."""

    @property
    def wanted(self) -> Role | None:
        """Who is to have it."""


class Blocks(Protocol):
    """None where each role has its own slots."""

    @property
    def all(self) -> Sequence[Block]: ...
    @property
    def size(self) -> int:
        """Slots of each."""

    @property
    def train(self) -> tuple[int, ...]:
        """Those that train, whenever there is something to train."""

    def held_by(self, block: Block, /) -> Role | None:
        """Who is awake there; None: nobody, or the block changes hands."""

    def is_lost(self, block: Block, /) -> bool: ...


class WatchedCore(Protocol):
    @property
    def plan(self) -> RunPlan: ...
    @property
    def sequences(self) -> Sequences: ...
    @property
    def steps(self) -> Steps: ...
    @property
    def versions(self) -> Versions: ...
    @property
    def fleet(self) -> Fleet: ...
    @property
    def blocks(self) -> Blocks: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnBlock:
    """The slots of one worker, where they are its alone."""

    index: int
    name: str
    roles: tuple[Role, ...]
    wanted: Role
    node: str = ""
    node_number: int = 0
    slots: tuple[int, ...] = ()


class OwnBlocks:
    """Blocks where no slot is shared: one for each worker, in the order of the plan."""

    def __init__(self, core: WatchedCore) -> None:
        self._fleet = core.fleet
        names = [(f"{r.role}-{i}", r.role) for r in core.plan.replicas for i in range(r.replicas)]
        self.all = [_OwnBlock(index=i, name=name, roles=(r,), wanted=r) for i, (name, r) in enumerate(names)]
        self.size = max(r.slots for r in core.plan.replicas)
        self.train = tuple(block.index for block in self.all if block.wanted is Role.TRAIN)
        self._index = {block.name: block.index for block in self.all}

    def held_by(self, block: Block, /) -> Role | None:
        return None if self.is_lost(block) else block.wanted

    def is_lost(self, block: Block, /) -> bool:
        worker = self._fleet.workers.get(self.all[block.index].name)
        return worker is None or worker.state not in AWAKE

    def block_of(self, worker: Worker) -> int | None:
        return self._index.get(worker.name)
