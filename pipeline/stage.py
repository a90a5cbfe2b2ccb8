"""A stage task: what is pickled, and what it finds inside the warm worker that runs it.

The task names its stage by dotted path, so the control plane never imports the data plane. Nothing of a task is
process-wide: a worker may run several at once, each in its own thread, so the context travels in a ContextVar.
"""

import importlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pipeline.core.events import SegmentInfo, VerdictInfo
from pipeline.core.tasks import NEEDS_NO_SLOTS

StageResult = dict[str, Any]
"""What a stage returns: JSON-able. Numbers become metrics `<name>`; other keys are the stage's own business."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """Which task this is; `version` is the weight version that it works on (train: the one it starts from; rollout: the
    oldest one that it may use)."""

    task: str
    stage: str
    step: int
    version: int
    attempt: int
    is_own: bool = False
    """The user's."""

    @property
    def needs_slots(self) -> bool:
        """Whether its worker must be awake; of a task that is not loaded nobody knows."""
        return self.stage not in NEEDS_NO_SLOTS and not self.is_own


class TaskContext(Protocol):
    """What a running stage task sees of its worker. `worker` is the stages.worker.Worker that hosts it."""

    spec: StageSpec
    worker: Any
    log_path: Path
    """The task's own log."""

    def next_order(self, timeout_s: float | None) -> "Order | None":
        """The next order of the controller to this task, or None after `timeout_s`."""

    def report_admitted(self, step: int, ids: list[str], num_prompt_tokens: Sequence[int] = ()) -> None: ...
    def report_segments(self, segments: list[SegmentInfo]) -> None: ...
    def report_verdicts(self, verdicts: list[VerdictInfo]) -> None: ...
    def log(self, text: str) -> None:
        """A line in the task's own log."""


@dataclass(frozen=True, slots=True)
class Order:
    """`kind` is dispatch (ids and turns), abort (ids), end, or leave: abort all, then end."""

    kind: str
    ids: tuple[str, ...] = ()
    turns: tuple[int, ...] = ()


current_task: ContextVar[TaskContext] = ContextVar("current_task")


def resolve(path: str) -> Callable[..., Any]:
    """The object that `module:name` names."""
    module, _, name = path.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


@dataclass(frozen=True, slots=True)
class StageTask:
    """The callable that submitit pickles: runs `path(context, spec)` in the worker."""

    path: str
    spec: StageSpec

    def __call__(self) -> StageResult:
        result: StageResult = resolve(self.path)(current_task.get(), self.spec)
        return result
