"""A worker's process, as far as decisions reach it."""

from collections import deque
from dataclasses import dataclass, field

from pipeline.core import decisions as de
from pipeline.core.events import Role


@dataclass(slots=True)
class Work:
    """A sequence that a task has claimed and not ended. `aborted_at`: the version under which it was taken back."""

    task: str
    id: str
    owner: tuple[int, int]
    idx: int
    aborted_at: int | None = None


@dataclass(slots=True)
class Process:
    """One life of a worker. `trained`: the steps in the weights that a trainer holds, in order."""

    name: str
    role: Role
    node: str
    version: int
    trained: tuple[int, ...] = ()
    orders: deque[de.Decision] = field(default_factory=deque)
    work: list[Work] = field(default_factory=list)
    tasks: dict[str, str] = field(default_factory=dict)
    """The serving tasks that it runs, each with its stage."""
    oldest: dict[str, int] = field(default_factory=dict)
    """Of each rollout task the lowest version that may serve it."""
    is_hung: bool = False
    slots: tuple[int, ...] = ()
    is_awake: bool = True
    """It has its slots."""
