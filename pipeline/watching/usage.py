"""What slots are used for: how many each role has, and the share of their time in which it computes."""

from collections.abc import Iterable, Mapping

from pipeline.core.events import Role
from pipeline.core.reports import (
    BlockBound,
    BlockLost,
    ReplicaReport,
    Report,
    ShiftBegun,
    ShiftEnded,
    TrainBlocksChosen,
    TrainingBegun,
    TrainingEnded,
)


class Usage:
    """Added up between two rows. `slots`: of a replica of each role; `block_slots`: of a block that changes hands.
    Blocks below 0 have the slots of the one replica that is theirs. Training computes from its begin to its end."""

    def __init__(self, slots: Mapping[Role, int], block_slots: int, now: float) -> None:
        self._slots, self._block_slots = slots, block_slots
        self._holder: dict[int, Role | None] = {}
        self._coming: dict[int, Role] = {}
        self._train: tuple[int, ...] = ()
        self._training_since: float | None = None
        self._begin(now)

    def take(self, reports: Iterable[Report]) -> None:
        for report in reports:
            match report:
                case ReplicaReport():
                    self._busy_s[report.role] += (report.decode_s + report.prefill_s) * self._slots[report.role]
                case BlockBound():
                    self._hand(report.block, report.role, report.at_s)
                case ShiftBegun():
                    self._hand(report.block, None, report.at_s)
                    self._coming[report.block] = report.new
                case ShiftEnded():
                    self._hand(report.block, self._coming.pop(report.block, None), report.at_s)
                case BlockLost():
                    self._hand(report.block, None, report.at_s)
                case TrainBlocksChosen():
                    self._train = report.block_indices
                case TrainingBegun():
                    self._training_since = report.at_s
                case TrainingEnded():
                    self._trained(report.at_s)
                    self._training_since = None

    def since(self, now: float) -> dict[str, float]:
        """Since the last call: `alloc/<role>_slots`, the mean number; `role/<role>/util`, the share of their time."""
        for block, role in self._holder.items():
            self._hand(block, role, now)
        self._trained(now)
        seconds = max(now - self._begun_s, 1e-9)
        found = {f"alloc/{role.value}_slots": held / seconds for role, held in self._held_s.items()}
        for role, held in self._held_s.items():
            found[f"role/{role.value}/util"] = min(1.0, self._busy_s[role] / held) if held else 0.0
        self._begin(now)
        return found

    def _begin(self, now: float) -> None:
        self._begun_s = now
        self._held_s, self._busy_s = dict.fromkeys(Role, 0.0), dict.fromkeys(Role, 0.0)
        self._since = dict.fromkeys(self._holder, now)

    def _hand(self, block: int, role: Role | None, now: float) -> None:
        before = self._holder.get(block)
        if before is not None:
            self._held_s[before] += (now - self._since[block]) * self._num_slots(block, before)
        self._holder[block], self._since[block] = role, now

    def _trained(self, now: float) -> None:
        if self._training_since is not None:
            num_slots = sum(self._num_slots(block, Role.TRAIN) for block in self._train)
            self._busy_s[Role.TRAIN] += (now - max(self._training_since, self._begun_s)) * num_slots

    def _num_slots(self, block: int, role: Role) -> int:
        return self._block_slots if block >= 0 else self._slots[role]
