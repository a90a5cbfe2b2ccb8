"""The quickstart's engines and trainer on one slot: a colocated run by hand, whose shifts are seen in /proc."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline import wire
from pipeline.config import Config, load_files
from pipeline.memory import private_bytes
from pipeline.preload import of_zygote
from pipeline.queue.client import QueueClient
from slurm.executor import ElasticJob
from tests.stages.shared_slot import ROLES, Shared, queue_of

KV_BYTES = 64 << 20
NUM_STEPS = 2


class Quickstart(Shared):
    wait_s = 120.0

    def make_config(self, **sections: Any) -> Config:
        return load_files(["configs/quickstart.yaml"], ["rollout.flush_s=0.02", "run.seed=7"])

    def welcome(self, preload: list[str] | None = None) -> None:
        super().welcome(of_zygote(self.config))

    def serve(self, worker: str, stage: str, ids: list[str], turn: int, **spec: int) -> ElasticJob:
        job = self.stage(worker, stage, f"stages.{stage}:{stage}", **spec)
        turns = [turn] * len(ids)
        self.send(wire.DispatchTask(worker=worker, task=job.job_id, ids=ids, turns=turns))
        return job

    def finish(self, job: ElasticJob, worker: str) -> None:
        self.send(wire.EndTask(worker=worker, task=job.job_id))
        self.result(job)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Quickstart]:
    rig = Quickstart(tmp_path / "run")
    yield rig
    rig.close()


def test_a_colocated_run_by_hand(rig: Quickstart) -> None:
    """Each step rolls out, judges and trains on the same slot, and a rollout is interrupted by a sleep: what it goes on
    with, woken, fits what the trainer says of all tokens."""
    with queue_of(rig) as queue:
        rig.start_all()
        pids = dict(rig.pids)
        asleep = {worker: private_bytes(pid) for worker, pid in pids.items()}
        for step in range(1, NUM_STEPS + 1):
            metrics = train_one(rig, queue, step)
            assert metrics["train/num_tokens"] > 1000 and metrics["mismatch/max_abs_logprob_diff"] < 1e-4
        for worker in ("rollout-0", "reward-0"):
            woken = rig.up(worker, version=NUM_STEPS)
            awake = private_bytes(pids[worker])
            slept = rig.down(worker)
            assert slept.costly == woken.costly and slept.costly["communicators"] > 0, "those of its start"
            assert awake - private_bytes(pids[worker]) > 0.8 * KV_BYTES
            assert private_bytes(pids[worker]) - asleep[worker] < 2 * KV_BYTES, "caches of kernels"
        assert rig.pids == pids == {b.worker: b.pid for b in rig.last_bindings()} and rig.pids.keys() == ROLES.keys()


def train_one(rig: Quickstart, queue: QueueClient, step: int) -> dict[str, float]:
    """The trainer's metrics of the step."""
    prompts = rig.stage("rollout-0", "prompts", "stages.prompts:prompts", step=step)  # it sleeps
    ids = rig.expect(wire.Admitted).ids
    rig.result(prompts)
    rig.up("rollout-0", version=step - 1)
    job = rig.serve("rollout-0", "rollout", ids, turn=1, step=step, version=step - 1)
    rig.expect(wire.SegmentsClosed, task=job.job_id)
    assert rig.down("rollout-0").num_aborted > 0
    rig.result(job)
    left = [row.id for row in queue.get(ids) if row.state == "admitted"]
    rig.up("rollout-0", version=step - 1)
    rig.finish(rig.serve("rollout-0", "rollout", left, turn=2, step=step, version=step - 1), "rollout-0")
    rig.down("rollout-0")
    rig.up("reward-0")
    rig.finish(rig.serve("reward-0", "reward", ids, turn=3, step=step), "reward-0")
    rig.down("reward-0")
    queue.commit_batch(step, ids, [])
    rig.up("train-0")
    trained = rig.result(rig.stage("train-0", "train", "stages.train:train", step=step, version=step - 1))
    queue.commit_trained(step)
    rig.result(rig.stage("train-0", "publish", "stages.train:publish", step=step, version=step))
    rig.send(wire.SealVersion(version=step))
    rig.expect(wire.VersionSealed, version=step)
    rig.down("train-0")
    rig.heard = [message for message in rig.heard if isinstance(message, wire.Bindings)][-1:]
    metrics: dict[str, float] = trained["metrics"]
    return metrics
