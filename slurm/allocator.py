"""The slots of one node, as its agent gives them out: which worker has which, and which devices they are.

The controller plans bindings and says them with each order; here they are kept, so that a slot is never given twice
while a process that had it lives. Workers that share slots live there together: one of them is awake.

Devices are named as the node's environment names them: by what is in its CUDA_VISIBLE_DEVICES (numbers, or UUIDs where
a site hides the others), in that order; without it by number.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"


def devices_here(environment: Mapping[str, str], dev: Path = Path("/dev")) -> list[str] | None:
    """The GPUs that this host's processes may use, in order; None where there are none."""
    if VISIBLE in environment:
        return [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]
    found = (re.fullmatch(r"nvidia(\d+)", name) for name in os.listdir(dev))
    numbers = sorted(int(match[1]) for match in found if match)
    return [str(number) for number in numbers] or None


class SlotsTaken(RuntimeError):
    """An order wants slots that are not free, or not there: controller and agent disagree."""


@dataclass(slots=True)
class Bound:
    """A worker's slots. `life`: of the order that it was started by; `pid`: 0 until its process is there; `is_awake`:
    they are its own now."""

    slots: tuple[int, ...]
    life: int
    pid: int = 0
    is_shared: bool = False
    is_awake: bool = True


class Allocator:
    """`devices`: as `devices_here` names those of the node."""

    def __init__(self, num_slots: int, devices: Sequence[str] | None = None) -> None:
        self._num_slots = num_slots
        self._devices = devices
        self.bindings: dict[str, Bound] = {}

    def bind(self, worker: str, slots: Sequence[int], life: int = 0, *, is_shared: bool = False) -> dict[str, str]:
        """The worker has these slots until `release`; returns the variables that let it see its devices alone. One that
        is shared may be where others sleep; while it starts it is awake."""
        if worker in self.bindings:
            raise SlotsTaken(f"{worker} is bound already, to slots {list(self.bindings[worker].slots)}")
        for slot in slots:
            if not 0 <= slot < self._num_slots:
                raise SlotsTaken(f"{worker} wants slot {slot}: there are {self._num_slots}")
        self._require_free(worker, slots, lambda other: other.is_awake or not is_shared)
        self.bindings[worker] = Bound(tuple(slots), life, is_shared=is_shared)
        if self._devices is None or not slots:
            return {}
        return {VISIBLE: ",".join(self._devices[slot] for slot in slots if slot < len(self._devices))}

    def sleep(self, worker: str) -> None:
        """It holds nothing of its slots any more, and lives on."""
        assert self.bindings[worker].is_shared, f"{worker} has its slots to itself"
        self.bindings[worker].is_awake = False

    def wake(self, worker: str) -> None:
        """It has its slots to itself again. Raises SlotsTaken if another is awake on one of them, or it is itself."""
        bound = self.bindings[worker]
        if bound.is_awake:
            raise SlotsTaken(f"{worker} is awake already")
        self._require_free(worker, bound.slots, lambda other: other.is_awake)
        bound.is_awake = True

    def _require_free(self, worker: str, slots: Sequence[int], is_in_the_way: Callable[[Bound], bool]) -> None:
        for name, other in self.bindings.items():
            common = set(slots) & set(other.slots)
            if common and name != worker and is_in_the_way(other):
                raise SlotsTaken(f"{worker} wants slot {min(common)}: {name}")

    def release(self, worker: str) -> None:
        """Its process has ended."""
        self.bindings.pop(worker, None)

    def forked(self, worker: str, pid: int) -> None:
        """Its process is there."""
        self.bindings[worker].pid = pid
