"""The ledger: nodes, slots, and the life of a worker.

    STARTING ▶ READY ▶ DEAD ▶ STARTING (a new process under the same name, `limits.restarts` times without progress)

A binding (role, replica, node, slots) is planned here first; the agents' reports make it observed. A slot belongs to
at most one living binding.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.core.events import Role


class WorkerState(StrEnum):
    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


@dataclass(slots=True)
class Worker:
    """One replica's binding and its life. `deaths` counts those since the last progress of the run."""

    name: str
    role: Role
    node: str
    slots: tuple[int, ...]
    state: WorkerState = WorkerState.STARTING
    version: int = 0
    deaths: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many replicas a role has and how many slots each takes."""

    role: Role
    replicas: int
    slots: int


@dataclass(slots=True)
class Fleet:
    nodes: dict[str, int] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)

    def join(self, node: str, num_slots: int) -> None:
        self.nodes[node] = num_slots

    def free_slots(self, node: str) -> list[int]:
        taken = {s for w in self.workers.values() if w.node == node for s in w.slots}
        return [s for s in range(self.nodes[node]) if s not in taken]

    def place(self, wanted: list[Replicas]) -> list[Worker]:
        """Bind the replicas that have no binding yet, as far as free slots reach; a replica stays on one node."""
        placed = []
        for want in wanted:
            for index in range(want.replicas):
                name = f"{want.role}-{index}"
                node = next((n for n in self.nodes if len(self.free_slots(n)) >= want.slots), None)
                if name in self.workers or node is None:
                    continue
                worker = Worker(name, want.role, node, tuple(self.free_slots(node)[: want.slots]))
                self.workers[name] = worker
                placed.append(worker)
        return placed

    def unplaced(self, wanted: list[Replicas]) -> list[str]:
        """Replicas without a binding."""
        names = (f"{want.role}-{index}" for want in wanted for index in range(want.replicas))
        return [name for name in names if name not in self.workers]

    def free(self) -> dict[str, int]:
        return {node: len(self.free_slots(node)) for node in self.nodes}

    def ready(self, role: Role) -> list[Worker]:
        return [w for w in self.workers.values() if w.role is role and w.state is WorkerState.READY]

    def progress(self) -> None:
        """The run got further: deaths before this do not count any more."""
        for worker in self.workers.values():
            worker.deaths = 0
