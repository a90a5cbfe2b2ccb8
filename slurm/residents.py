"""Workers that share slots, as their agent watches over them: orders to sleep and to wake in, what came of them out.

A worker says that it sleeps, or is awake; how much it holds then is measured here, from outside. One that sleeps and
holds what others are to have, or is awake and holds more than its slots have, is killed instead of believed.

What a sleeper may hold. At its first sleep it has done no work: what it held then is its *floor*; what it held more at
its first waking is its *context*. A sleep must free at least half of the context, measured from when it was ordered:
what else the worker gathers while it works, caches of compiled kernels above all (70 MiB in 40 steps of the quickstart,
whose context has 77), makes no difference to that. All of that together may come to half of the context and
`DRIFT_BYTES`, or what leaks a little each time would never be seen. A first sleep that gave nothing up would make the
floor too high: that one is the engine's own to notice, which knows what it made.

Measured is what the worker's end would free, with the ranks of its engine: Private_Dirty of the host, or where the node
has GPUs, and not only a scheduler that numbers some, what NVML says of the processes; where that says nothing, what the
worker itself says. That is what the controller is told, too.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from pipeline import wire
from pipeline.kill_points import kill_point
from pipeline.memory import device_bytes, held_bytes
from pipeline.wire_shift import Prepare, Sleep, Slept, Wake, WakeFailed, Woken
from slurm.allocator import Allocator, Bound, SlotsTaken

DRIFT_BYTES = 256 << 20
_NOTICEABLE_BYTES = 64 << 20
"""A smaller context is not told from what else comes and goes."""
_SHARE = 0.5

Said = wire.WorkerReady | Slept | Woken


@dataclass(slots=True)
class Holdings:
    """What one life of a worker was seen to hold, in bytes: at its first sleep, at its first waking, and before it was
    last told to sleep."""

    floor: int | None = None
    awake: int | None = None
    before: int | None = None

    @property
    def context(self) -> int:
        return 0 if self.floor is None or self.awake is None else max(0, self.awake - self.floor)

    def asleep(self, held: int) -> str:
        """Why a sleeper that holds so much is not believed, or nothing."""
        if self.floor is None:
            self.floor = held
        freed = None if self.before is None else self.before - held
        if freed is not None and self.context >= _NOTICEABLE_BYTES and freed < _SHARE * self.context:
            return (
                f"it says that it sleeps, and holds {_mib(held)}: that is {_mib(freed)} less than before, of "
                f"{_mib(self.context)} that its first waking took"
            )
        allowed = self.floor + int(_SHARE * self.context) + DRIFT_BYTES
        if held > allowed:
            return (
                f"it says that it sleeps, and holds {_mib(held)}: {_mib(allowed)} are allowed, after "
                f"{_mib(self.floor)} at its first sleep and {_mib(self.context)} more at its first waking"
            )
        return ""

    def wake(self, held: int, num_slots: int, slot_memory: int) -> str:
        """Why one that is awake and holds so much may not go on, or nothing. `slot_memory` 0: no limit."""
        self.awake, self.before = held if self.awake is None else self.awake, held
        if not slot_memory or held <= num_slots * slot_memory:
            return ""
        return f"it holds {_mib(held)}: cluster.slot_memory is {_mib(slot_memory)} for each of its {num_slots} slots"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.0f} MiB"


class Residents:
    """`say` is heard by the controller, `order` by the worker that the message names; `kill(worker, why)`;
    `on_change` follows each change of who is awake."""

    def __init__(
        self,
        allocator: Allocator,
        slot_memory: int,
        has_devices: bool,
        *,
        say: Callable[[wire.FromAgent], None],
        order: Callable[[wire.ToWorker], None],
        kill: Callable[[str, str], None],
        on_change: Callable[[], None],
    ) -> None:
        self._allocator, self._slot_memory, self._has_devices = allocator, slot_memory, has_devices
        self._say, self._order, self._kill, self._on_change = say, order, kill, on_change
        self._inbox: asyncio.Queue[Said | Sleep] = asyncio.Queue()
        self._holdings: dict[str, tuple[Bound, Holdings]] = {}

    def obey(self, message: Sleep | Prepare | Wake) -> None:
        """Relay it, unless others have the slots. Of a dead worker its end was or will be said."""
        if message.worker not in self._allocator.bindings:
            return
        match message:
            case Sleep():
                self._inbox.put_nowait(message)
                return
            case Wake():
                try:
                    self._allocator.wake(message.worker)
                except SlotsTaken as taken:
                    self._say(WakeFailed(worker=message.worker, reason=f"refused: {taken}"))
                    return
                self._on_change()
                kill_point("agent.wake")
        self._order(message)

    def hear(self, message: Said) -> None:
        """It is passed on when it was found to be true; at once where nothing depends on it."""
        bound = self._allocator.bindings.get(message.worker)
        if bound is not None and not bound.is_shared and not self._slot_memory:
            self._say(message)
        else:
            self._inbox.put_nowait(message)

    async def judge(self) -> NoReturn:
        """Consumes what was ordered and heard; each message waits for a thread that measures, and for no other one:
        a worker has only one of them on its way."""
        async with asyncio.TaskGroup() as group:
            while True:
                message = await self._inbox.get()
                group.create_task(self._judge(message), name=f"measure {message.worker}")
        raise AssertionError("unreachable: the loop is endless")

    async def _judge(self, message: Said | Sleep) -> None:
        bound = self._allocator.bindings.get(message.worker)
        if bound is None:
            return
        held = await self._measure(bound.pid or getattr(message, "pid", 0))
        if self._allocator.bindings.get(message.worker) is not bound:
            return  # it has ended meanwhile
        of, holdings = self._holdings.get(message.worker, (None, Holdings()))
        if of is not bound:  # another life
            holdings = Holdings()
        self._holdings[message.worker] = bound, holdings
        if isinstance(message, Sleep):
            holdings.before = holdings.before if held is None else held
            self._order(message)
            kill_point("agent.sleep")
        else:
            self._decide(message, bound, holdings, message.held_bytes if held is None else held)

    def _decide(self, message: Said, bound: Bound, holdings: Holdings, held: int) -> None:
        worker = message.worker
        is_asleep = isinstance(message, Slept) or (isinstance(message, wire.WorkerReady) and message.is_asleep)
        fault = holdings.asleep(held) if is_asleep else holdings.wake(held, len(bound.slots), self._slot_memory)
        if fault:
            print(f"killing {worker}: {fault}")
            self._kill(worker, fault)
            return
        if is_asleep:
            self._allocator.sleep(worker)
            self._on_change()
        if not isinstance(message, wire.WorkerReady):
            kill_point("agent.slept" if is_asleep else "agent.woken")
        self._say(msgspec.structs.replace(message, held_bytes=held))

    async def _measure(self, pid: int) -> int | None:
        """None: nobody can say, or it is dead."""
        try:
            return await asyncio.to_thread(device_bytes if self._has_devices else held_bytes, pid)
        except OSError:
            return None
