"""What leaves the core: decisions, and the limits of what is waited for.

Each wait has a name, and says what it exceeded: `task:ID`, `worker:NAME`, `node:NAME`, `copy:NODE`, `seal:NODE`,
`stray:NODE`, and `nodes`, the first coming of all.
"""

import math
from typing import NamedTuple

from pipeline.core.decisions import Decision, EndRun, SetTimer
from pipeline.core.steps import RunPlan


class _Limit(NamedTuple):
    due: float
    reason: str


class Outbox:
    """The decisions of one event, in order, and the limits that are armed."""

    def __init__(self, plan: RunPlan) -> None:
        self._plan = plan
        self.now = -math.inf
        self.decisions: list[Decision] = []
        self.ended: EndRun | None = None
        self._limits: dict[str, _Limit] = {}

    def begin(self, now: float) -> None:
        self.now, self.decisions = now, []

    def emit(self, decision: Decision) -> None:
        self.decisions.append(decision)

    def end(self, status: str, reason: str) -> None:
        """The first end holds."""
        if self.ended is None:
            self.ended = EndRun(status=status, reason=reason)
            self.emit(self.ended)

    def limit(self, name: str, *keys: str, times: int = 1) -> None:
        """From now on `name` may take so many times the sum of `limits.<key>`."""
        after_s = times * sum(getattr(self._plan, key) for key in keys)
        named = " + ".join(f"limits.{key}" for key in keys)
        self.limit_to(name, after_s, f"limit exceeded: {name} ({named}, {after_s:g} s)")

    def limit_to(self, name: str, after_s: float, reason: str) -> None:
        self._limits[name] = _Limit(self.now + after_s, reason)
        self.emit(SetTimer(name=name, after_s=after_s))

    def left_s(self, name: str) -> float:
        """Until this limit; for ever if there is none."""
        return self._limits[name].due - self.now if name in self._limits else math.inf

    def clear(self, name: str) -> None:
        if self._limits.pop(name, None) is not None:
            self.emit(SetTimer(name=name, after_s=0.0))

    def limited(self, kind: str) -> list[str]:
        """What of this kind is waited for: ids or names."""
        return [name.partition(":")[2] for name in self._limits if name.partition(":")[0] == kind]

    def expired(self, name: str) -> str:
        """The reason, once, if it ran out; "" if it was cleared or set anew meanwhile."""
        if name not in self._limits or self.now < self._limits[name].due:
            return ""
        return self._limits.pop(name).reason
