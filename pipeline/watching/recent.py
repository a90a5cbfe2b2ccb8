"""The last shifts, for who looks on: what moved, and what that was predicted and is measured to be worth."""

from collections import deque
from typing import Any

from pipeline.watching.shifts import Shift

_KEPT = 6
_TOGETHER_S = 2.0
"""Blocks that changed hands in the same way within this time are told of together."""
_GAINS_KEPT = 64


class RecentShifts:
    """`block_slots`: of each block. Gains come by the number of the decision, before the shift has ended or after."""

    def __init__(self, block_slots: int) -> None:
        self._block_slots = block_slots
        self._last: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._gains: dict[int, dict[str, float | None]] = {}

    def decided(self, number: int, predicted_gain_s: float | None) -> None:
        self._gains[number] = {"predicted_gain_s": predicted_gain_s, "measured_gain_s": None}
        if len(self._gains) > _GAINS_KEPT:
            del self._gains[min(self._gains)]

    def weighed(self, number: int, measured_gain_s: float) -> None:
        if number in self._gains:
            self._gains[number]["measured_gain_s"] = measured_gain_s

    def ended(self, shift: Shift, wall: float, step: int) -> None:
        """`step`: the newest one that is open."""
        if not shift.is_shift or shift.ended_s is None:
            return
        key = (str(shift.old), str(shift.new), shift.decision)
        took_s = shift.ended_s - shift.begun_s
        for told in self._last:
            if (told["old"], told["new"], told["decision"]) == key and wall - told["wall"] < _TOGETHER_S:
                told["slots"] += self._block_slots
                told["took_s"] = max(told["took_s"], took_s)
                return
        told = {"wall": wall, "step": step, "old": key[0], "new": key[1], "decision": shift.decision}
        self._last.append(told | {"slots": self._block_slots, "took_s": took_s})

    def told(self) -> list[dict[str, Any]]:
        """The newest last."""
        none = {"predicted_gain_s": None, "measured_gain_s": None}
        return [one | self._gains.get(one["decision"], none) for one in self._last]
