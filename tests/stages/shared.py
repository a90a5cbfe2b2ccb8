"""A node on one slot of which a worker of each role lives, without a controller that decides."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline import wire
from pipeline.queue.client import QueueClient
from pipeline.run_folder import read_json
from pipeline.stage import StageSpec, StageTask
from pipeline.wire_shift import Sleep, Slept, Wake, Woken
from slurm.executor import ElasticJob
from tests.slurm.rig import Rig, start_order, until

ROLES = {"rollout-0": "rollout", "reward-0": "reward", "train-0": "train"}


class Shared(Rig):
    """One node, one slot, a worker of each role on it."""

    def __init__(self, path: Path, workers: tuple[str, ...] = tuple(ROLES), **sections: Any) -> None:
        super().__init__(path, **sections)
        self.options: dict[str, Any] = {}
        self.welcome()
        self.expect(wire.NodeReady)
        self.workers = workers

    def start_all(self) -> "Shared":
        for worker in self.workers:
            self.start_shared(worker)
        return self

    def start_shared(self, worker: str) -> None:
        self.send(start_order(worker, ROLES[worker], shares=[0], **self.options))
        ready = self.expect(wire.WorkerReady, worker=worker)
        assert ready.is_asleep and ready.held_bytes > 0 and (ready.kv_tokens > 0) is (worker != "train-0")
        self.pids[worker] = ready.pid

    def down(self, worker: str) -> Slept:
        self.send(Sleep(worker=worker))
        return self.expect(Slept, worker=worker)

    def up(self, worker: str, version: int = 0) -> Woken:
        self.send(Wake(worker=worker, version=version, probe=None))
        return self.expect(Woken, worker=worker)

    def stage(self, worker: str, stage: str, path: str, step: int = 1, version: int = 0) -> ElasticJob:
        spec = StageSpec(task="", stage=stage, step=step, version=version, attempt=self.attempt)
        return self.submit(worker, StageTask(path, spec))

    def awake(self) -> set[str]:
        """As the agent last said."""
        return {b.worker for b in self.last_bindings() if b.is_awake}

    def last_bindings(self) -> list[wire.Binding]:
        said = [message for message in self.heard if isinstance(message, wire.Bindings)]
        return said[-1].bindings

    def kinds(self, worker: str) -> list[str]:
        """What was heard of the worker and not yet expected, in order."""
        return [type(message).__name__ for message in self.heard if getattr(message, "worker", "") == worker]


@contextmanager
def queue_of(rig: Rig) -> Iterator[QueueClient]:
    """The run's own queue server."""
    secret = os.urandom(32)
    (rig.run.secrets / "queue.key").write_bytes(secret)
    command = [sys.executable, "-m", "pipeline.queue.server", str(rig.run.path), str(rig.attempt)]
    with subprocess.Popen(command) as process:
        try:
            place = until(lambda: read_json(rig.run.secrets / f"queue-{rig.attempt}.json"), "the queue server")
            client = QueueClient(place["endpoint"], secret, rig.attempt, 10.0)
            rig.options = {"queue": place["endpoint"]}
            yield client
            client.close()
        finally:
            process.kill()
