"""The ledger: nodes, slots, and the life of a worker.

    PLANNED ▶ STARTING ▶ READY ⇄ LOADING ▶ FENCED ▶ DEAD ▶ STARTING (a new process under the same name)

A binding (role, replica, node, slots) is planned here first; the agents' reports make it observed. A slot belongs to
at most one binding.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.core.events import Role


class WorkerState(StrEnum):
    PLANNED = "planned"
    STARTING = "starting"
    READY = "ready"
    LOADING = "loading"
    FENCED = "fenced"
    DEAD = "dead"


class WorkerChange(StrEnum):
    """What happens to a worker."""

    STARTED = "started"
    REPORTED = "reported"
    ASKED = "asked"
    LOADED = "loaded"
    REFUSED = "refused"
    EXPIRED = "expired"
    DIED = "died"


LIFE: Mapping[tuple[WorkerState, WorkerChange], WorkerState] = {
    (WorkerState.PLANNED, WorkerChange.STARTED): WorkerState.STARTING,
    (WorkerState.STARTING, WorkerChange.REPORTED): WorkerState.READY,
    (WorkerState.STARTING, WorkerChange.EXPIRED): WorkerState.FENCED,
    (WorkerState.STARTING, WorkerChange.DIED): WorkerState.DEAD,
    (WorkerState.READY, WorkerChange.ASKED): WorkerState.LOADING,
    (WorkerState.READY, WorkerChange.EXPIRED): WorkerState.FENCED,
    (WorkerState.READY, WorkerChange.DIED): WorkerState.DEAD,
    (WorkerState.LOADING, WorkerChange.LOADED): WorkerState.READY,
    (WorkerState.LOADING, WorkerChange.REFUSED): WorkerState.FENCED,
    (WorkerState.LOADING, WorkerChange.EXPIRED): WorkerState.FENCED,
    (WorkerState.LOADING, WorkerChange.DIED): WorkerState.DEAD,
    (WorkerState.FENCED, WorkerChange.DIED): WorkerState.DEAD,
    (WorkerState.DEAD, WorkerChange.STARTED): WorkerState.STARTING,
}
"""The life of a worker; what is not in it is illegal."""


@dataclass(slots=True)
class Worker:
    """One replica's binding and its life. `deaths` counts those of its own, since the last progress
    of the run.

    `version` is what it serves, `asked` what it was last asked to load; `fault`: why it was fenced.
    """

    name: str
    role: Role
    node: str
    slots: tuple[int, ...]
    state: WorkerState = WorkerState.PLANNED
    version: int = 0
    asked: int = -1
    deaths: int = 0
    fault: str = ""

    def start(self, version: int) -> None:
        """A new process is started; it will serve `version`."""
        moved = self._move(WorkerChange.STARTED)
        assert moved, self
        self.version, self.fault = version, ""

    def report(self, version: int) -> bool:
        """It can be given work. False, and nothing changes, if it is not expected to report."""
        if not self._move(WorkerChange.REPORTED):
            return False
        self.version = version
        return True

    def ask(self, version: int) -> None:
        moved = self._move(WorkerChange.ASKED)
        assert moved, self
        self.asked = version

    def load(self, version: int) -> bool:
        """It serves the version that it was asked for. False if it was not asked for this one."""
        if version != self.asked or not self._move(WorkerChange.LOADED):
            return False
        self.version = version
        return True

    def refuse(self, version: int, reason: str) -> bool:
        """It could not load the version, and gets no work any more. False if it was not asked for this one."""
        if version != self.asked or not self._move(WorkerChange.REFUSED):
            return False
        self.fault = reason
        return True

    def expire(self, reason: str) -> bool:
        """A limit of it or of its work ran out: it gets no work any more. False if it is fenced or dead already."""
        if not self._move(WorkerChange.EXPIRED):
            return False
        self.fault = reason
        return True

    def die(self) -> bool:
        """False if it has died before."""
        return self._move(WorkerChange.DIED)

    def _move(self, change: WorkerChange) -> bool:
        after = LIFE.get((self.state, change))
        if after is None:
            return False
        self.state = after
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many replicas a role has and how many slots each takes."""

    role: Role
    replicas: int
    slots: int


@dataclass(slots=True)
class Fleet:
    """`nodes`: those that can be given workers, with their slots. `losses` counts those of each node since the last
    progress of the run."""

    nodes: dict[str, int] = field(default_factory=dict)
    workers: dict[str, Worker] = field(default_factory=dict)
    losses: Counter[str] = field(default_factory=Counter)

    def join(self, node: str, num_slots: int) -> list[Worker]:
        """Returns the dead workers that are bound there: they can be started again."""
        self.nodes[node] = num_slots
        return [w for w in self.workers.values() if w.node == node and w.state is WorkerState.DEAD]

    def lose(self, node: str) -> list[Worker]:
        """Nothing can be started there. Returns the workers bound there, which keep their bindings."""
        self.nodes.pop(node, None)
        self.losses[node] += 1
        return [w for w in self.workers.values() if w.node == node]

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
        """Those that can be given work."""
        return self._of(role, WorkerState.READY)

    def loading(self, role: Role) -> list[Worker]:
        return self._of(role, WorkerState.LOADING)

    def progress(self) -> None:
        """The run got further: deaths and losses before this do not count any more."""
        self.losses.clear()
        for worker in self.workers.values():
            worker.deaths = 0

    def _of(self, role: Role, state: WorkerState) -> list[Worker]:
        return [w for w in self.workers.values() if w.role is role and w.state is state]
