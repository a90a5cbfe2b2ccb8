"""status.json: what a run is doing now, for `status`, `logs` and the progress display.

Readers never open the queue or unpickle: this file, metrics.jsonl and summary.json are all they need. It is replaced
in one step, at most four times a second while the run goes on.
"""

import time
from typing import TYPE_CHECKING, Any

import msgspec

from pipeline.config import Config
from pipeline.core.dag import Progress
from pipeline.core.sequences import PLACES
from pipeline.run_folder import RunFolder, write_atomic

if TYPE_CHECKING:
    from pipeline.core.core import Core

_PERIOD_S = 0.25
EXIT_CODES = {"done": 0, "failed": 1, "cancelled": 130}
"""How a run ended, as the exit code of its controller and of the command that waits for it."""


def _stat(pid: int) -> list[bytes]:
    """What the kernel says of a process, from its state on; a dead one is in state X, whether waited for or not."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return [b"X"]
    return [b"X"] if fields[0] == b"Z" else fields


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is none. With the pid it names a process."""
    fields = _stat(pid)
    return None if fields[0] == b"X" else int(fields[19])


def is_stopped(pid: int) -> bool:
    """Whether the process was stopped by a signal, and so waits to be continued."""
    return _stat(pid)[0] in (b"T", b"t")


class StatusFile:
    """Owned by the controller. `pid` and `pid_start` together name its process beyond the reuse of pids."""

    def __init__(self, run: RunFolder, config: Config, attempt: int, pid: int) -> None:
        self._run = run
        self._written = 0.0
        self.value: dict[str, Any] = {
            "run": run.name,
            "status": "starting",
            "attempt": attempt,
            "pid": pid,
            "pid_start": start_ticks(pid),
            "started": time.time(),
            "updated": time.time(),
            "step": 0,
            "total_steps": config.trainer.total_training_steps,
            "version": 0,
            "stage": "",
            "sequences": {},
            "nodes": {},
            "workers": [],
            "bindings": {},
            "slots": [],
            "queues": {},
            "steps": [],
            "shifts": [],
            "weights": None,
            "judge": None,
            "error": None,
            "mlflow": None,
            "sinks": [],
            "cluster": config.cluster.kind,
        }

    @property
    def is_due(self) -> bool:
        """Whether it was not written a moment ago."""
        return time.monotonic() - self._written >= _PERIOD_S

    def show(self, core: "Core", bindings: dict[str, Any], seen: dict[str, Any]) -> None:
        """Write the ledger's state. `bindings`: what each node's agent observes, beside what is planned, in `workers`;
        `seen`: slots, queues, steps and shifts, as `pipeline.watching.seen` has them, and `pipeline.weights_view`."""
        open_steps = [s for s in core.steps.values() if not s.is_closed]
        step = open_steps[-1] if open_steps else None
        running = [n for s in open_steps for n, p in s.stages.items() if p is Progress.RUNNING]
        counts: dict[str, int] = {}
        for place in PLACES:
            if step is not None and (num := core.sequences.num_of(step.step, place)):
                counts[place.state] = counts.get(place.state, 0) + num
        self.write(
            step=step.step if step else max(core.steps, default=0),
            version=core.versions.current,
            stage=", ".join(running),
            sequences=counts,
            nodes=core.crew.nodes(),
            workers=[
                {"name": w.name, "role": w.role, "node": w.node, "slots": w.slots, "state": w.state}
                for w in core.fleet.workers.values()
            ],
            bindings=bindings,
            **seen,
        )

    def write(self, **changes: Any) -> None:
        self.value |= changes | {"updated": time.time()}
        self._written = time.monotonic()
        # With the workers of many slots Python's own encoder would take a tenth of a core.
        text = msgspec.json.format(msgspec.json.encode(self.value), indent=1).decode()
        write_atomic(self._run.status, f"{text}\n", durable=False)
