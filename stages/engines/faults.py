"""What an emulated engine does wrong when it is told so."""

import os
import threading
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict


class Fault(BaseModel):
    """`raise`, `hang` or `die` (exit at once) in the engine's `step`, counted from 1; `refuse` the update to `version`;
    `leak`: a sleep that frees nothing; `refuse_wake`; or die or hang in a sleep or a wake. Of these it is the `nth`,
    counted from 1, the sleep after its start among them (0: each). With `once`, the path of a marker file, it happens
    only to who creates that file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal[
        "raise",
        "hang",
        "die",
        "refuse",
        "leak",
        "refuse_wake",
        "die_in_sleep",
        "hang_in_sleep",
        "die_in_wake",
        "hang_in_wake",
    ]
    step: int = 0
    version: int = 0
    nth: int = 0
    once: str = ""


class Faults:
    """Each question may be the one that lets the fault happen: ask once."""

    def __init__(self, faults: list[Fault]) -> None:
        self._faults = faults

    def in_step(self, number: int) -> None:
        for fault in self._faults:
            if fault.kind in ("raise", "hang", "die") and fault.step == number and _is_mine(fault):
                _end(fault.kind)
                raise RuntimeError(f"the engine fails in step {fault.step}, as options.faults say")

    def refuses(self, version: int) -> bool:
        return any(f.kind == "refuse" and f.version == version and _is_mine(f) for f in self._faults)

    def leaks(self, nth: int) -> bool:
        return self._has("leak", nth)

    def refuses_to_wake(self, nth: int) -> bool:
        return self._has("refuse_wake", nth)

    def in_shift(self, phase: Literal["sleep", "wake"], nth: int) -> None:
        for fault in self._faults:
            if fault.kind.endswith(f"_in_{phase}") and fault.nth in (0, nth) and _is_mine(fault):
                _end(fault.kind.removesuffix(f"_in_{phase}"))

    def _has(self, kind: str, nth: int) -> bool:
        return any(f.kind == kind and f.nth in (0, nth) and _is_mine(f) for f in self._faults)


def _end(kind: str) -> None:
    if kind == "die":
        os._exit(1)
    if kind == "hang":
        threading.Event().wait()


def _is_mine(fault: Fault) -> bool:
    if not fault.once:
        return True
    try:
        Path(fault.once).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
