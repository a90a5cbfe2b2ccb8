"""The slots of one node, as its agent gives them out: which worker has which, and which devices they are.

The controller plans bindings and says them with each order; here they are kept, so that a slot is never given twice
while a process that had it lives. Devices are named as the node's environment names them: by what is in its
CUDA_VISIBLE_DEVICES (numbers, or UUIDs where a site hides the others), in that order; without it by number.
"""

import os
import re
from collections.abc import Mapping, Sequence
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
    """A worker's slots. `life`: of the order that it was started by; `pid`: 0 until its process is there."""

    slots: tuple[int, ...]
    life: int
    pid: int = 0


class Allocator:
    """`devices`: as `devices_here` names those of the node."""

    def __init__(self, num_slots: int, devices: Sequence[str] | None = None) -> None:
        self._num_slots = num_slots
        self._devices = devices
        self.bindings: dict[str, Bound] = {}

    def bind(self, worker: str, slots: Sequence[int], life: int = 0) -> dict[str, str]:
        """The worker has these slots until `release`; returns the variables that let it see its devices alone."""
        taken = {slot: name for name, held in self.bindings.items() for slot in held.slots}
        if worker in self.bindings:
            raise SlotsTaken(f"{worker} is bound already, to slots {list(self.bindings[worker].slots)}")
        for slot in slots:
            if slot in taken or not 0 <= slot < self._num_slots:
                raise SlotsTaken(f"{worker} wants slot {slot}: {taken.get(slot, f'there are {self._num_slots}')}")
        self.bindings[worker] = Bound(tuple(slots), life)
        if self._devices is None or not slots:
            return {}
        return {VISIBLE: ",".join(self._devices[slot] for slot in slots if slot < len(self._devices))}

    def release(self, worker: str) -> None:
        """Its process has ended."""
        self.bindings.pop(worker, None)

    def forked(self, worker: str, pid: int) -> None:
        """Its process is there."""
        self.bindings[worker].pid = pid
