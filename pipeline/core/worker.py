"""The life of a worker: the warm process of a replica, or of a rank of the training group.

PLANNED ▶ STARTING ▶ READY ⇄ LOADING ▶ FENCED ▶ DEAD ▶ STARTING (a new process under the same name)
of those that share their slots: STARTING ▶ ASLEEP ▶ WAKING ▶ READY ▶ LEAVING ▶ ASLEEP
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from pipeline.core.events import Role


class WorkerState(StrEnum):
    PLANNED = "planned"
    STARTING = "starting"
    READY = "ready"
    LOADING = "loading"
    LEAVING = "leaving"
    ASLEEP = "asleep"
    WAKING = "waking"
    FENCED = "fenced"
    DEAD = "dead"


class WorkerChange(StrEnum):
    """What happens to a worker."""

    STARTED = "started"
    REPORTED = "reported"
    ASKED = "asked"
    LOADED = "loaded"
    SENT_DOWN = "sent down"
    SLEPT = "slept"
    CALLED = "called"
    WOKEN = "woken"
    REFUSED = "refused"
    EXPIRED = "expired"
    DIED = "died"


LIFE: Mapping[tuple[WorkerState, WorkerChange], WorkerState] = {
    (WorkerState.PLANNED, WorkerChange.STARTED): WorkerState.STARTING,
    (WorkerState.STARTING, WorkerChange.REPORTED): WorkerState.READY,
    (WorkerState.STARTING, WorkerChange.SLEPT): WorkerState.ASLEEP,
    (WorkerState.STARTING, WorkerChange.EXPIRED): WorkerState.FENCED,
    (WorkerState.STARTING, WorkerChange.DIED): WorkerState.DEAD,
    (WorkerState.READY, WorkerChange.ASKED): WorkerState.LOADING,
    (WorkerState.READY, WorkerChange.SENT_DOWN): WorkerState.LEAVING,
    (WorkerState.READY, WorkerChange.EXPIRED): WorkerState.FENCED,
    (WorkerState.READY, WorkerChange.DIED): WorkerState.DEAD,
    (WorkerState.LOADING, WorkerChange.LOADED): WorkerState.READY,
    (WorkerState.LOADING, WorkerChange.REFUSED): WorkerState.FENCED,
    (WorkerState.LOADING, WorkerChange.EXPIRED): WorkerState.FENCED,
    (WorkerState.LOADING, WorkerChange.DIED): WorkerState.DEAD,
    (WorkerState.LEAVING, WorkerChange.SLEPT): WorkerState.ASLEEP,
    (WorkerState.LEAVING, WorkerChange.EXPIRED): WorkerState.FENCED,
    (WorkerState.LEAVING, WorkerChange.DIED): WorkerState.DEAD,
    (WorkerState.ASLEEP, WorkerChange.CALLED): WorkerState.WAKING,
    (WorkerState.ASLEEP, WorkerChange.EXPIRED): WorkerState.FENCED,
    (WorkerState.ASLEEP, WorkerChange.DIED): WorkerState.DEAD,
    (WorkerState.WAKING, WorkerChange.WOKEN): WorkerState.READY,
    (WorkerState.WAKING, WorkerChange.REFUSED): WorkerState.FENCED,
    (WorkerState.WAKING, WorkerChange.EXPIRED): WorkerState.FENCED,
    (WorkerState.WAKING, WorkerChange.DIED): WorkerState.DEAD,
    (WorkerState.FENCED, WorkerChange.DIED): WorkerState.DEAD,
    (WorkerState.DEAD, WorkerChange.STARTED): WorkerState.STARTING,
}
"""The life of a worker; what is not in it is illegal."""


_THERE = {WorkerState.READY, WorkerState.LOADING, WorkerState.LEAVING, WorkerState.ASLEEP, WorkerState.WAKING}


@dataclass(slots=True)
class Worker:
    """The binding and the life of a replica, or of a rank of the training group. `deaths` counts those of its own,
    since the last progress of the run; `life`: of its process, never used twice; ranks that belong together share it.

    `version` is what it serves, `asked` what it was last asked to load, or to wake with; `fault`: why it was fenced;
    `is_dismissed`: that was no fault of its own. `is_shared`: others live on its slots. `kv_tokens`: what the cache of
    its engine has room for; 0: not known.
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
    is_shared: bool = False
    kv_tokens: int = 0

    @property
    def holds(self) -> bool:
        """Its slots, whether they are of use to it or not yet, or not any more."""
        return not self.is_down and self.state is not WorkerState.ASLEEP

    @property
    def serves(self) -> bool:
        """It works, or goes on working in a moment."""
        return self.state is WorkerState.READY or self.state is WorkerState.LOADING

    @property
    def is_there(self) -> bool:
        """It can be given what needs no slots."""
        return self.state in _THERE

    @property
    def is_down(self) -> bool:
        """It has no process, and can be started."""
        return self.state is WorkerState.PLANNED or self.state is WorkerState.DEAD

    def start(self, version: int, life: int) -> None:
        """A new process is started; it will serve `version`."""
        moved = self._move(WorkerChange.STARTED)
        assert moved, self
        self.version, self.life, self.fault, self.is_dismissed = version, life, "", False

    def report(self, version: int, *, is_asleep: bool = False, kv_tokens: int = 0) -> bool:
        """It can be given work, or its slots. False, and nothing changes, if it is not expected to say so."""
        if self.state is not WorkerState.STARTING or is_asleep is not self.is_shared:
            return False
        if not self._move(WorkerChange.SLEPT if is_asleep else WorkerChange.REPORTED):
            return False
        self.version, self.kv_tokens = version, kv_tokens
        return True

    def send_down(self) -> None:
        moved = self._move(WorkerChange.SENT_DOWN)
        assert moved, self

    def sleep(self) -> bool:
        """Its slots are free. False if it was not sent down."""
        return self.state is WorkerState.LEAVING and self._move(WorkerChange.SLEPT)

    def call(self, version: int) -> None:
        """Wake it with this version."""
        moved = self._move(WorkerChange.CALLED)
        assert moved, self
        self.asked = version

    def wake(self, version: int) -> bool:
        """It can be given work. A trainer has the weights that it had. False if it was not called with this one."""
        if version != self.asked or not self._move(WorkerChange.WOKEN):
            return False
        if self.role is not Role.TRAIN:
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
        if self.state is not WorkerState.LOADING or version != self.asked:
            return False
        return self._fail(reason)

    def fail_to_wake(self, reason: str) -> bool:
        """Nobody knows what it holds now. False if it was not called."""
        return self.state is WorkerState.WAKING and self._fail(reason)

    def _fail(self, reason: str) -> bool:
        moved = self._move(WorkerChange.REFUSED)
        assert moved, self
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
