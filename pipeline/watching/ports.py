"""What the watcher reads of a core, and of the blocks of slots that change hands."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pipeline.core.events import Role
from pipeline.core.fleet import Fleet
from pipeline.core.sequences import Sequences
from pipeline.core.steps import RunPlan, Steps
from pipeline.core.versions import Versions
from pipeline.core.worker import Worker


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
    """Those that change hands. `block`, where one is given: one of `all`."""

    @property
    def all(self) -> Sequence[Block]: ...
    @property
    def size(self) -> int:
        """Slots of each."""

    @property
    def train(self) -> tuple[int, ...]:
        """Those that train, whenever there is something to train."""

    def held_by(self, block: Any, /) -> Role | None:
        """Who is awake there; None: nobody, or the block changes hands."""

    def is_lost(self, block: Any, /) -> bool: ...


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
    """The slots of one worker, where they are its alone. Below 0: it never changes hands."""

    index: int
    name: str
    roles: tuple[Role, ...]
    wanted: Role
    node: str = ""
    node_number: int = 0
    slots: tuple[int, ...] = ()


class Places:
    """All blocks: those that change hands, which are the core's, and one for each worker whose slots are its own."""

    def __init__(self, core: WatchedCore, shared: Collection[Role]) -> None:
        self._fleet = core.fleet
        self._shared: Blocks | None = core.blocks if shared else None
        own = [(f"{r.role}-{i}", r.role) for r in core.plan.replicas if r.role not in shared for i in range(r.replicas)]
        self._own = [
            _OwnBlock(index=-1 - i, name=name, roles=(role,), wanted=role) for i, (name, role) in enumerate(own)
        ]
        self._index = {block.name: block.index for block in self._own}
        self._by_slot: dict[tuple[str, int], int] = {}
        self.size = core.blocks.size if shared else max(r.slots for r in core.plan.replicas)

    @property
    def all(self) -> list[Block]:
        return [*(self._shared.all if self._shared else ()), *self._own]

    def slots_of(self, index: int) -> list[str]:
        """Of a block, as timeline.jsonl names them."""
        return [f"{block.node}:{slot}" for block in self.all if block.index == index for slot in block.slots]

    @property
    def train(self) -> tuple[int, ...]:
        own = (block.index for block in self._own if block.wanted is Role.TRAIN)
        return (*(self._shared.train if self._shared else ()), *own)

    def held_by(self, block: Block) -> Role | None:
        if self._shared and block.index >= 0:
            return self._shared.held_by(block)
        return None if self.is_lost(block) else block.wanted

    def is_lost(self, block: Block) -> bool:
        if self._shared and block.index >= 0:
            return self._shared.is_lost(block)
        worker = self._fleet.workers.get(self._own[-1 - block.index].name)
        return worker is None or not worker.serves

    def place(self, block: Block) -> None:
        """Whoever lives on its slots lives there from now on."""
        self._by_slot |= {(block.node, slot): block.index for slot in block.slots}

    def block_of(self, worker: Worker) -> int | None:
        own = self._index.get(worker.name)
        return own if own is not None else self._by_slot.get((worker.node, worker.slots[0]))
