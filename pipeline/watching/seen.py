"""What those who look on while a run goes on are shown, for status.json: slots, queues, steps, the last shifts."""

from collections.abc import Iterable
from typing import Any

from pipeline.core.dag import StepProgress
from pipeline.core.events import INFERENCE, Role
from pipeline.core.reports import Report
from pipeline.core.sequences import RUNNING, WAITING
from pipeline.watching.history import History, Line
from pipeline.watching.ports import WatchedCore
from pipeline.watching.recent import RecentShifts

_BEFORE = 2, 4
"""A step is expected to take as long as those so many steps before it: where two are rolled out together, the first of
them waits less for its training than the second."""


class Seen:
    """`age_s`: of the run, at `now`, when this attempt began."""

    def __init__(self, core: WatchedCore, block_slots: int, now: float, age_s: float) -> None:
        self._core = core
        self.history, self.shifts = History(core, now, age_s), RecentShifts(block_slots)
        self._took_s: dict[int, float] = {}

    def take(self, reports: Iterable[Report]) -> None:
        self.history.take(reports)

    def record(self, number: int, now: float) -> list[Line]:
        """The step is recorded."""
        step = self._core.steps.get(number)
        if step is not None and "prompts" in step.started:
            self._took_s[number] = now - step.started["prompts"]
            self._took_s.pop(number - max(_BEFORE) - 1, None)
        return list(self.history.record(number, now))

    def picture(self, now: float, wall: float) -> dict[str, Any]:
        """As JSON. Times are those of `wall`, which is the time of day at `now`."""
        open_steps = [step for step in self._core.steps.values() if not step.is_closed]
        return {
            "slots": self._slots(),
            "queues": {role.value: self._queue(role) for role in INFERENCE},
            "steps": [told for step in open_steps if (told := self._step(step, wall - now)) is not None],
            "shifts": self.shifts.told(),
        }

    def _slots(self) -> list[dict[str, Any]]:
        """A replica's tokens per second are shared out among its slots."""
        workers, rates = self._core.fleet.workers, self.history.rates.of
        found = []
        for slot in sorted(self.history.slots.all, key=lambda slot: (slot.node, slot.number)):
            worker = workers.get(slot.worker)
            rate = rates.get(slot.worker, 0.0) / len(worker.slots) if worker else 0.0
            found.append(
                {
                    "node": slot.node,
                    "slot": slot.number,
                    "role": slot.doing.role,
                    "state": slot.doing.state,
                    "worker": slot.worker,
                    "running": slot.num_running,
                    "tokens_per_s": round(rate, 1),
                }
            )
        return found

    def _queue(self, role: Role) -> dict[str, int]:
        sequences = self._core.sequences
        return {"waiting": sequences.num_at(WAITING[role]), "running": sequences.num_at(RUNNING[role])}

    def _step(self, step: StepProgress, offset_s: float) -> dict[str, Any] | None:
        """None: it has not begun, or nothing is left of it but what goes on beside the next."""
        sequences, number = self._core.sequences, step.step
        if "prompts" not in step.started or step.is_over("record"):
            return None
        num = self._core.plan.sequences_per_step
        is_judged = step.is_over("batch")
        unrolled = sequences.num_of(number, WAITING[Role.ROLLOUT], RUNNING[Role.ROLLOUT])
        unscored = unrolled + sequences.num_of(number, WAITING[Role.REWARD], RUNNING[Role.REWARD])
        is_there = sequences.size(number) > 0
        before = [took for ago in _BEFORE if (took := self._took_s.get(number - ago)) is not None]
        before = before or list(self._took_s.values())[-1:]
        return {
            "step": number,
            "sequences": num,
            "rolled_out": num if is_judged else num - unrolled if is_there else 0,
            "scored": num if is_judged else num - unscored if is_there else 0,
            "running": [name for name, progress in step.stages.items() if progress == "running"],
            "began": step.started["prompts"] + offset_s,
            "expected_s": sum(before) / len(before) if before else None,
        }
