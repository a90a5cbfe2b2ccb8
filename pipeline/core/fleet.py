"""The ledger: nodes, slots, and the life of a worker.

    PLANNED ▶ STARTING ▶ READY ⇄ LOADING ▶ FENCED ▶ DEAD ▶ STARTING (a new process under the same name)

A binding (role, replica, node, slots) is planned here first; the agents' reports make it observed. A slot belongs to
at most one binding. What an agent observes that is not planned is a stray: nothing is started under its name or on its
slots until it has ended.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from pipeline.core.events import Role, Stray


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
    """The binding and the life of a replica, or of a rank of the training group. `deaths` counts those of its own,
    since the last progress of the run; `life`: of its process, never used twice; ranks that belong together share it.

    `version` is what it serves, `asked` what it was last asked to load; `fault`: why it was fenced; `is_dismissed`:
    that was no fault of its own.
    """

    name: str
    role: Role
    index: int
    node: str
    slots: tuple[int, ...]
    state: WorkerState = WorkerState.PLANNED
    version: int = 0
    asked: int = -1
    deaths: int = 0
    life: int = 0
    fault: str = ""
    is_dismissed: bool = False

    @property
    def is_down(self) -> bool:
        """It has no process, and can be started."""
        return self.state is WorkerState.PLANNED or self.state is WorkerState.DEAD

    def start(self, version: int, life: int) -> None:
        """A new process is started; it will serve `version`."""
        moved = self._move(WorkerChange.STARTED)
        assert moved, self
        self.version, self.life, self.fault, self.is_dismissed = version, life, "", False

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

    def dismiss(self, reason: str) -> bool:
        """As `expire`, where it has done nothing wrong."""
        self.is_dismissed = self.expire(reason)
        return self.is_dismissed

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
    """How many replicas a role has (train: how many ranks) and how many slots each takes."""

    role: Role
    replicas: int
    slots: int


@dataclass(frozen=True, slots=True)
class _Place:
    """What is to be bound. `is_essential`: without it no step can be made."""

    name: str
    role: Role
    index: int
    num_slots: int
    is_essential: bool


class Fleet:
    """`nodes`: those that can be given workers, with their slots. `losses` counts those of each node since the last
    progress of the run."""

    def __init__(self, wanted: Iterable[Replicas]) -> None:
        places = [
            _Place(f"{want.role}-{index}", want.role, index, want.slots, want.role is Role.TRAIN or index == 0)
            for want in wanted
            for index in range(want.replicas)
        ]
        self._places = sorted(places, key=lambda place: not place.is_essential)
        self._num_ranks = sum(place.role is Role.TRAIN for place in places)
        self.nodes: dict[str, int] = {}
        self.workers: dict[str, Worker] = {}
        self.losses: Counter[str] = Counter()
        self.strays: dict[str, tuple[Stray, ...]] = {}

    # --- nodes and bindings ----------------------------------------------------------------------------------------

    def join(self, node: str, num_slots: int) -> None:
        self.nodes[node] = num_slots

    def lose(self, node: str) -> list[Worker]:
        """Nothing can be started there. Returns the workers bound there, which keep their bindings."""
        self.nodes.pop(node, None)
        self.strays.pop(node, None)
        self.losses[node] += 1
        return [w for w in self.workers.values() if w.node == node]

    def abandon(self, node: str) -> None:
        """It does not come back: what is bound there is bound elsewhere, or not at all."""
        for worker in [w for w in self.workers.values() if w.node == node]:
            del self.workers[worker.name]

    def place(self) -> None:
        """Bind what has no binding, or one to a node that is lost, as far as free slots reach; what is essential
        first. A replica stays on one node, and on that for as long as it is there."""
        for place in self._places:
            worker = self.workers.get(place.name)
            if worker is not None and (worker.node in self.nodes or not worker.is_down):
                continue
            node = next((n for n in self.nodes if len(self.free_slots(n)) >= place.num_slots), None)
            if node is None:
                continue
            slots = tuple(self.free_slots(node)[: place.num_slots])
            if worker is None:
                self.workers[place.name] = Worker(place.name, place.role, place.index, node, slots)
            else:
                worker.node, worker.slots = node, slots

    def startable(self) -> list[Worker]:
        """Those without a process on nodes that are there; ranks only if that is all of them."""
        down = [w for w in self.workers.values() if w.is_down and w.node in self.nodes and not self._is_barred(w)]
        num_ranks = sum(w.role is Role.TRAIN for w in down)
        return [w for w in down if w.role is not Role.TRAIN or num_ranks == self._num_ranks]

    def missing(self, *, essential: bool) -> list[str]:
        """What has no binding; `essential`: of that what no step can be made without."""
        return [p.name for p in self._places if p.name not in self.workers and (p.is_essential or not essential)]

    def yielding(self, name: str) -> list[Worker]:
        """The replicas that have to give up their slots on some node, so that `name` fits there; none if it fits
        nowhere."""
        needed = next(place.num_slots for place in self._places if place.name == name)
        for node in self.nodes:
            num_free, chosen = len(self.free_slots(node)), []
            for place in reversed(self._places):
                worker = self.workers.get(place.name)
                if num_free < needed and worker and worker.node == node and not place.is_essential:
                    chosen.append(worker)
                    num_free += place.num_slots
            if num_free >= needed:
                return chosen
        return []

    def free_slots(self, node: str) -> list[int]:
        taken = {s for w in self.workers.values() if w.node == node for s in w.slots}
        taken.update(s for stray in self.strays.get(node, ()) for s in stray.slots)
        return [s for s in range(self.nodes[node]) if s not in taken]

    def _is_barred(self, worker: Worker) -> bool:
        """A stray has its name or its slots."""
        strays = self.strays.get(worker.node, ())
        return any(stray.worker == worker.name or set(stray.slots) & set(worker.slots) for stray in strays)

    def free(self) -> dict[str, int]:
        return {node: len(self.free_slots(node)) for node in self.nodes}

    # --- those that work -------------------------------------------------------------------------------------------

    def ready(self, role: Role) -> list[Worker]:
        """Those that can be given work; ranks only all together."""
        found = self._of(role, WorkerState.READY)
        return found if role is not Role.TRAIN or len(found) == self._num_ranks else []

    def loading(self, role: Role) -> list[Worker]:
        return self._of(role, WorkerState.LOADING)

    def broken_group(self) -> list[Worker]:
        """The ranks that go on while another one has ended: nothing can come of that."""
        ranks = [w for w in self.workers.values() if w.role is Role.TRAIN]
        is_whole = len(ranks) == self._num_ranks and not any(w.is_down for w in ranks)
        return [] if is_whole else [w for w in ranks if not w.is_down and w.state is not WorkerState.FENCED]

    def progress(self) -> None:
        """The run got further: deaths and losses before this do not count any more."""
        self.losses.clear()
        for worker in self.workers.values():
            worker.deaths = 0

    def _of(self, role: Role, state: WorkerState) -> list[Worker]:
        return [w for w in self.workers.values() if w.role is role and w.state is state]
