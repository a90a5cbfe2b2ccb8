"""Who has which slots of one node: what was requested of its agent, and what the agent reports.

    planned (core/fleet.py) ▶ requested (the order is sent) ▶ observed (the agent reports the process)

Orders and reports each arrive in the order in which they were sent, and an agent says that a process has ended before
it reports bindings without it. So whatever is observed was requested and has not ended. What else is reported is a
stray, at once: nothing that is still on its way explains it. So are those who are awake together on one slot, all of
them, and that is all that is looked for of who is awake: it can be seen in one report, and what an agent refuses to do
needs no second ledger.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pipeline import wire
from pipeline.core import events as ev

_Order = tuple[int, list[int]]


@dataclass
class NodeBindings:
    """Of one life of the node's agent. `requested`: life and slots of what was ordered and has not ended."""

    requested: dict[str, _Order] = field(default_factory=dict)
    observed: dict[str, wire.Binding] = field(default_factory=dict)
    strays: tuple[ev.Stray, ...] = ()

    def request(self, start: wire.StartWorker) -> None:
        self.requested[start.worker] = (start.life, start.slots)

    def end(self, exited: wire.WorkerExited) -> bool:
        """False if it is the end of what was not requested: then it says nothing of the worker of that name."""
        order = self.requested.get(exited.worker)
        if order is None or order[0] != exited.life:
            return False
        del self.requested[exited.worker]
        return True

    def observe(self, report: wire.Bindings) -> bool:
        """Whether `strays` has changed."""
        self.observed = {binding.worker: binding for binding in report.bindings}
        awake = Counter(slot for binding in report.bindings if binding.is_awake for slot in binding.slots)
        clashing = {slot for slot, num in awake.items() if num > 1}
        strays = [binding for binding in report.bindings if self._is_stray(binding, clashing)]
        before, self.strays = self.strays, tuple(map(_stray, strays))
        return self.strays != before

    def _is_stray(self, binding: wire.Binding, clashing: set[int]) -> bool:
        is_ordered = self.requested.get(binding.worker) == (binding.life, binding.slots)
        return not is_ordered or (binding.is_awake and not clashing.isdisjoint(binding.slots))

    def describe(self) -> dict[str, Any]:
        """What is observed, for status.json."""
        return {
            name: {"slots": binding.slots, "pid": binding.pid, "awake": binding.is_awake}
            for name, binding in self.observed.items()
        }


def _stray(binding: wire.Binding) -> ev.Stray:
    return ev.Stray(worker=binding.worker, slots=tuple(binding.slots))
