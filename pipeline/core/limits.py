"""What is waited for, and for how long: each wait has a name, and says what it exceeded."""

from typing import NamedTuple

from pipeline.core.decisions import SetTimer
from pipeline.core.steps import RunPlan


class _Limit(NamedTuple):
    due: float
    reason: str


class Limits(dict[str, _Limit]):
    """Those that are armed, by name; `task:ID`, `worker:NAME`, `node:NAME`, `seal:VERSION`, `nodes`."""

    def __init__(self, plan: RunPlan) -> None:
        super().__init__()
        self._plan = plan

    def arm(self, name: str, key: str, now: float, times: int) -> SetTimer:
        """From now on `name` may take so many times `limits.<key>`."""
        after_s = times * getattr(self._plan, key)
        self[name] = _Limit(now + after_s, f"limit exceeded: {name} (limits.{key}, {after_s:g} s)")
        return SetTimer(name=name, after_s=after_s)

    def expired(self, name: str, now: float) -> str:
        """The reason, once, if it ran out; "" if it was cleared or set anew meanwhile."""
        if name not in self or now < self[name].due:
            return ""
        return self.pop(name).reason
