"""What a look at a machine finds: each thing with its state, and what mends it."""

from dataclasses import asdict, dataclass
from enum import StrEnum


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, and something will be slow, or go wrong with larger runs."""
    FAULT = "fault"
    """No run can work."""
    ABSENT = "absent"
    """Not there, and not needed by every run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`what` was looked at, `said` is what was found, `fix` what to do about it ("": nothing)."""

    what: str
    state: State
    said: str
    fix: str = ""

    def as_json(self) -> dict[str, str]:
        return {key: str(value) for key, value in asdict(self).items()}


def ok(what: str, said: str) -> Finding:
    return Finding(what=what, state=State.OK, said=said)


def warning(what: str, said: str, fix: str) -> Finding:
    return Finding(what=what, state=State.WARNING, said=said, fix=fix)


def fault(what: str, said: str, fix: str) -> Finding:
    return Finding(what=what, state=State.FAULT, said=said, fix=fix)


def absent(what: str, said: str, fix: str = "") -> Finding:
    return Finding(what=what, state=State.ABSENT, said=said, fix=fix)
