"""Where else the rows of a run go: what a sink of the user's is (`tracking.also`).

`module:name`, or `path/to/file.py:name`, is called without arguments and returns a sink. It lives in a process of its
own: whatever it does or waits for, training does not notice.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Of the run, as a sink is told at its start. `id` is the same at each attempt of the run; `config` is without
    secrets.

    No step below `first_step` is told. What the sink has from there on is of a step whose receipt was lost with the
    run's processes: at most one, and it is told again.
    """

    name: str
    id: str
    folder: str
    attempt: int
    first_step: int
    config: Mapping[str, Any]


class Sink(Protocol):
    """Each call has a limit of time, after which the sink is given up. What `log` raises is told once, and the next row
    comes all the same."""

    def start(self, run: RunFacts) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Steps ascend, each once. `metrics` are those of metrics.jsonl that are finite."""

    def close(self, status: str) -> None:
        """`status`: done, failed, cancelled or requeued; after the last two the run may go on, with another start."""
