"""The ledger: nodes, slots, and which worker is bound to which.

A binding (role, replica, node, slots) is planned here first; the agents' reports make it observed. Workers of roles
that share slots may be bound to the same ones; then at most one of them *holds* a slot, and the others sleep. What an
agent observes that is not planned is a stray: nothing is started under its name or on its slots until it has ended.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from pipeline.core.events import Role, Stray
from pipeline.core.worker import Worker, WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """How many replicas a role has (train: how many ranks) and how many slots each takes; 0: it needs none."""

    role: Role
    replicas: int
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Of a role's replicas: the sequences that one runs at once, and the tokens of the longest output."""

    max_num_seqs: float = math.inf
    longest: float = math.inf


@dataclass(frozen=True, slots=True)
class _Place:
    """What is to be bound. `is_essential`: without it no step can be made. Where replicas share slots with others, none
    of them is: the slots that are there have some of each role."""

    name: str
    role: Role
    index: int
    num_slots: int
    is_essential: bool


class Fleet:
    """`nodes`: those that can be given workers, with their slots. `losses` counts those of each node since the last
    progress of the run."""

    def __init__(self, wanted: Iterable[Replicas], shared: Collection[Role] = ()) -> None:
        """`shared`: the roles whose workers live on the same slots."""
        self.shared = shared
        places = [
            _Place(
                f"{want.role}-{index}",
                want.role,
                index,
                want.slots,
                want.role is Role.TRAIN or (index == 0 and want.role not in shared),
            )
            for want in wanted
            for index in range(want.replicas)
        ]
        self._places = sorted(places, key=self._turn)
        self._num_ranks = sum(place.role is Role.TRAIN for place in places)
        self.nodes: dict[str, int] = {}
        self.workers: dict[str, Worker] = {}
        self.losses: Counter[str] = Counter()
        self.strays: dict[str, tuple[Stray, ...]] = {}

    def _turn(self, place: _Place) -> tuple[bool, bool]:
        """What is essential is placed first. Of roles that share: train at the end of its slots, and rollout, which
        takes all that is left, last of all."""
        return not place.is_essential, bool(self.shared) and place.role is Role.ROLLOUT

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

    def place(self, *, is_short: bool = False) -> None:
        """Bind what has no binding, or one to a node that is lost, as far as free slots reach; what is essential
        first. A replica stays on one node, and on that for as long as it is there. `is_short`: slots that become free
        are kept for what is essential, until all of that is bound."""
        for place in self._places:
            if is_short and not place.is_essential and self.missing(essential=True):
                return
            worker = self.workers.get(place.name)
            if worker is not None and (worker.node in self.nodes or not worker.is_down):
                continue
            rooms = ((n, self._room(n, place)) for n in self.nodes)
            node, chosen = next(((n, room) for n, room in rooms if room is not None), ("", None))
            if chosen is None:
                continue
            if worker is None:
                worker = self.workers[place.name] = Worker(place.name, place.role, place.index, node, chosen)
                worker.is_shared = place.role in self.shared
            else:
                worker.node, worker.slots = node, chosen

    def _room(self, node: str, place: _Place) -> tuple[int, ...] | None:
        """Free slots for it; None if there is no room. Where roles share, replicas begin at multiples of their size, so
        that they lie on the same slots, and training takes the last ones."""
        num, free = place.num_slots, self.free_slots(node, place.role)
        if not self.shared or not num:
            return tuple(free[:num]) if len(free) >= num else None
        starts = range(0, self.nodes[node] - num + 1, num)
        for start in reversed(starts) if place.role is Role.TRAIN else starts:
            if set(range(start, start + num)) <= set(free):
                return tuple(range(start, start + num))
        return None

    def startable(self) -> list[Worker]:
        """Those without a process, on nodes that are there, with nothing strange on their slots."""
        return [w for w in self.workers.values() if w.is_down and w.node in self.nodes and not self._is_barred(w)]

    def with_all_ranks(self, workers: list[Worker]) -> list[Worker]:
        """Without the ranks among them, unless these are all."""
        num_ranks = sum(w.role is Role.TRAIN for w in workers)
        return [w for w in workers if w.role is not Role.TRAIN or num_ranks == self._num_ranks]

    def missing(self, *, essential: bool) -> list[str]:
        """What has no binding; `essential`: of that what no step can be made without."""
        return [p.name for p in self._places if p.name not in self.workers and (p.is_essential or not essential)]

    def yielding(self, name: str) -> list[Worker]:
        """The replicas that have to give up their slots on some node, so that `name` fits there, as few as possible;
        none if it fits nowhere."""
        wanted = next(place for place in self._places if place.name == name)
        essential = {place.name for place in self._places if place.is_essential}
        found: list[list[Worker]] = []
        for node in self.nodes:
            here = [worker for worker in self.workers.values() if worker.node == node]
            step = wanted.num_slots if self.shared else 1
            for start in range(0, self.nodes[node] - wanted.num_slots + 1, step):
                slots = range(start, start + wanted.num_slots)
                strays = any(set(stray.slots) & set(slots) for stray in self.strays.get(node, ()))
                holders = [w for w in here if set(w.slots) & set(slots) and not self._may_share(w, wanted.role)]
                if not strays and not any(worker.name in essential for worker in holders):
                    found.append(holders)
        return min(found, key=len, default=[])

    def free_slots(self, node: str, role: Role | None = None) -> list[int]:
        """`role`: whose workers may be bound to slots of those with whom it shares, too."""
        taken = {
            s
            for w in self.workers.values()
            if w.node == node and not (role and self._may_share(w, role))
            for s in w.slots
        }
        taken.update(s for stray in self.strays.get(node, ()) for s in stray.slots)
        return [s for s in range(self.nodes[node]) if s not in taken]

    def _may_share(self, worker: Worker, role: Role) -> bool:
        return worker.is_shared and role in self.shared and worker.role is not role

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

    def there(self, role: Role) -> list[Worker]:
        """Those that can be given what needs no slots, awake ones first; ranks only all together."""
        found = [w for w in self.workers.values() if w.role is role and w.is_there]
        found.sort(key=lambda w: w.state is not WorkerState.READY)
        return found if role is not Role.TRAIN or len(found) == self._num_ranks else []

    def loading(self, role: Role) -> list[Worker]:
        """Those whose version changes, or that wake with one."""
        return self._of(role, WorkerState.LOADING) + self.waking(role)

    def waking(self, role: Role) -> list[Worker]:
        return self._of(role, WorkerState.WAKING)

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
