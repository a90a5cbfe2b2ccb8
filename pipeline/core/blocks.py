"""Blocks: slots that change hands together, and the role that each of them is wanted for.

A block is as many slots as one replica of the larger inference role has, within a node. Only slots whose workers share
them are in blocks; the others never change hands.
"""

from dataclasses import dataclass, field

from pipeline.core.events import INFERENCE, Role
from pipeline.core.fleet import Fleet
from pipeline.core.worker import Worker


@dataclass(slots=True)
class Block:
    """`roles`: of whom there are workers on it; `wanted`: who is to hold it, None: nobody yet."""

    index: int
    node: str
    node_number: int
    slots: tuple[int, ...]
    workers: list[Worker] = field(default_factory=list)
    wanted: Role | None = None
    before: Role | None = None
    """What it was wanted for before it trained."""

    @property
    def roles(self) -> tuple[Role, ...]:
        return tuple(role for role in Role if any(w.role is role for w in self.workers))

    @property
    def inference(self) -> tuple[Role, ...]:
        """The roles that it may have while nobody trains."""
        return tuple(role for role in INFERENCE if role in self.roles)

    @property
    def trains(self) -> bool:
        return any(worker.role is Role.TRAIN for worker in self.workers)

    def rivals(self, worker: Worker) -> list[Worker]:
        """The others that live on some of its slots."""
        slots = set(worker.slots)
        return [w for w in self.workers if w is not worker and not slots.isdisjoint(w.slots)]


class Blocks:
    """`size`: slots of a block."""

    def __init__(self, fleet: Fleet, size: int) -> None:
        self._fleet = fleet
        self.size = size
        self._numbers: dict[str, int] = {}
        self._found: dict[tuple[str, int], Block] = {}

    @property
    def all(self) -> list[Block]:
        """By index, which a block keeps whatever becomes of its node."""
        return list(self._found.values())

    @property
    def train(self) -> tuple[int, ...]:
        return tuple(block.index for block in self._found.values() if block.trains)

    def refresh(self) -> None:
        """Bindings have changed."""
        for block in self._found.values():
            block.workers = []
        shared = [worker for worker in self._fleet.workers.values() if worker.is_shared]
        for worker in shared:
            self._numbers.setdefault(worker.node, len(self._numbers))
        for worker in sorted(shared, key=lambda w: (self._numbers[w.node], w.slots)):
            self._of(worker).workers.append(worker)

    def of(self, worker: Worker) -> Block | None:
        """None: its slots never change hands."""
        return self._found.get((worker.node, worker.slots[0] // self.size)) if worker.is_shared else None

    def held_by(self, block: Block) -> Role | None:
        """Who can work there now. None: nobody, or it is on its way to somebody."""
        if any(w.holds and not w.serves for w in block.workers):
            return None
        return next((w.role for w in block.workers if w.serves), None)

    def is_lost(self, block: Block) -> bool:
        return block.node not in self._fleet.nodes or not block.workers

    def wants(self, role: Role) -> list[Block]:
        return [block for block in self._found.values() if block.wanted is role and not self.is_lost(block)]

    def _of(self, worker: Worker) -> Block:
        place = worker.slots[0] // self.size
        found = self._found.get((worker.node, place))
        if found is None:
            first = place * self.size
            slots = tuple(range(first, first + self.size))
            found = Block(index=len(self._found), node=worker.node, node_number=self._numbers[worker.node], slots=slots)
            self._found[worker.node, place] = found
        return found
