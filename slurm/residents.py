"""Workers that share slots, as their agent watches over them: orders to sleep and to wake in, what came of them out.

A worker says that it sleeps, or is awake; how much it holds then is measured here, from outside. One that sleeps and
holds what others are to have, or is awake and holds more than its slots have, is killed instead of believed.

What a sleeper may hold. At its first sleep it has done no work: what it held then is what it keeps, its *floor*; at
its first waking it held that and its *context*. Later it may hold the floor, a quarter of the context (interpreters,
allocators and caches of compiled kernels keep some of what they once had), and `SLACK_BYTES`. A first sleep that gave
nothing up would make the floor too high: that one is the engine's own to notice, which knows what it made.

Measured is what its end would free: Private_Dirty of the host, or where the node has GPUs, what NVML says of the
process; where that says nothing, what the worker itself says. That is what the controller is told, too.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from pipeline import wire
from pipeline.memory import device_bytes, private_bytes
from pipeline.wire_shift import Prepare, Sleep, Slept, Wake, WakeFailed, Woken
from slurm.allocator import Allocator, Bound, SlotsTaken

SLACK_BYTES = 64 << 20
_KEPT = 0.25  # of the context

Said = wire.WorkerReady | Slept | Woken


@dataclass(slots=True)
class Holdings:
    """What one life of a worker was seen to hold, in bytes: at its first sleep, and at its first waking."""

    floor: int | None = None
    awake: int | None = None

    def asleep(self, held: int) -> str:
        """Why a sleeper that holds so much is not believed, or nothing."""
        if self.floor is None:
            self.floor = held
        context = max(0, (self.awake or 0) - self.floor)
        allowed = self.floor + int(_KEPT * context) + SLACK_BYTES
        if held <= allowed:
            return ""
        return (
            f"it says that it sleeps, and holds {_mib(held)}: {_mib(allowed)} are allowed, after {_mib(self.floor)} at "
            f"its first sleep and {_mib(context)} more at its first waking"
        )

    def wake(self, held: int, num_slots: int, slot_memory: int) -> str:
        """Why one that is awake and holds so much may not go on, or nothing. `slot_memory` 0: no limit."""
        if self.awake is None:
            self.awake = held
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
        self._said: asyncio.Queue[Said] = asyncio.Queue()
        self._holdings: dict[str, tuple[Bound, Holdings]] = {}

    def obey(self, message: Sleep | Prepare | Wake) -> None:
        """Relay it, unless others have the slots. Of a dead worker its end was or will be said."""
        if message.worker not in self._allocator.bindings:
            return
        if isinstance(message, Wake):
            try:
                self._allocator.wake(message.worker)
            except SlotsTaken as taken:
                self._say(WakeFailed(worker=message.worker, reason=f"refused: {taken}"))
                return
            self._on_change()
        self._order(message)

    def hear(self, message: Said) -> None:
        """It is passed on when it was found to be true; at once where nothing depends on it."""
        bound = self._allocator.bindings.get(message.worker)
        if bound is not None and not bound.is_shared and not self._slot_memory:
            self._say(message)
        else:
            self._said.put_nowait(message)

    async def judge(self) -> NoReturn:
        """Consumes what was heard, one after the other; waits for that, and for a thread that measures."""
        while True:
            message = await self._said.get()
            bound = self._allocator.bindings.get(message.worker)
            held = await self._measure(message, bound)
            if bound is not None and held is not None and self._allocator.bindings.get(message.worker) is bound:
                self._decide(message, bound, held)

    def _decide(self, message: Said, bound: Bound, held: int) -> None:
        worker = message.worker
        of, holdings = self._holdings.get(worker, (None, Holdings()))
        if of is not bound:  # another life
            holdings = Holdings()
        self._holdings[worker] = bound, holdings
        is_asleep = isinstance(message, Slept) or (isinstance(message, wire.WorkerReady) and message.is_asleep)
        fault = holdings.asleep(held) if is_asleep else holdings.wake(held, len(bound.slots), self._slot_memory)
        if fault:
            print(f"killing {worker}: {fault}")
            self._kill(worker, fault)
            return
        if is_asleep:
            self._allocator.sleep(worker)
            self._on_change()
        self._say(msgspec.structs.replace(message, held_bytes=held))

    async def _measure(self, message: Said, bound: Bound | None) -> int | None:
        """None: it is dead."""
        if bound is None:
            return None
        pid = bound.pid or (message.pid if isinstance(message, wire.WorkerReady) else 0)
        try:
            if not self._has_devices:
                return await asyncio.to_thread(private_bytes, pid)
            held = await asyncio.to_thread(device_bytes, pid)
        except OSError:
            return None
        return message.held_bytes if held is None else held
