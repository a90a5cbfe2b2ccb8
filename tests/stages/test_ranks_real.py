"""A rollout engine of two ranks, forked by a real agent: its memory, its deaths, and what they leave."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import wire
from pipeline.config import Config, load_files
from pipeline.memory import family
from pipeline.preload import of_zygote
from pipeline.wire_shift import Sleep, Slept, Wake, Woken
from tests.slurm.rig import Rig, is_gone, shared_memory, start_order, until

pytestmark = pytest.mark.vllm

KV_BYTES = 64 << 20
NUM_PROCESSES = 3  # the worker and its two ranks


class Pair(Rig):
    """One node of two slots, which the worker may share."""

    wait_s = 120.0

    def make_config(self) -> Config:
        return load_files(["quickstart.yaml"], ["model.policy.tensor_parallel=2", "cluster.slots_per_node=4"])

    def begin(self) -> None:
        self.send(start_order("rollout-0", shares=[0, 1]))

    def started(self) -> list[int]:
        """The pids of the worker and its ranks, when it sleeps for the first time."""
        ready = self.expect(wire.WorkerReady)
        assert ready.is_asleep
        pids = family(ready.pid)
        assert len(pids) == NUM_PROCESSES and self.left_behind() == []
        return pids

    def left_behind(self) -> list[str]:
        """In shared memory, beside the node's weights."""
        return [name for name in shared_memory(self.run, self.attempt) if "rollout-0" in name]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Pair]:
    rig = Pair(tmp_path / "run")
    rig.welcome(of_zygote(rig.config))
    rig.expect(wire.NodeReady)
    yield rig
    rig.close()


def test_the_life_of_ranks_is_their_workers(rig: Pair) -> None:
    rig.begin()
    pids = rig.started()
    held = []
    for _ in range(2):
        rig.send(Wake(worker="rollout-0", version=0, probe=None))
        awake = rig.expect(Woken).held_bytes
        rig.send(Sleep(worker="rollout-0"))
        held.append((awake, rig.expect(Slept).held_bytes))
    assert all(awake - asleep > 0.8 * KV_BYTES for awake, asleep in held), "what the ranks hold counts"
    assert family(pids[0]) == pids

    for killed, said in ((pids[2], "rank 1 of the engine"), (None, "killed by SIGKILL")):
        os.kill(killed or pids[0], signal.SIGKILL)
        reason = rig.expect(wire.WorkerExited).reason
        assert said in reason and "killed by SIGKILL" in reason, reason
        assert all(is_gone(pid) for pid in pids), "they hold its slots to their end"
        assert rig.left_behind() == []
        rig.heard.clear()
        rig.begin()
        if killed:
            pids = rig.started()

    worker = 0
    while not worker:
        worker = next((binding.pid for binding in rig.expect(wire.Bindings).bindings), 0)
    until(lambda: len(family(worker)) == NUM_PROCESSES and rig.left_behind(), "its ranks")
    pids = family(worker)
    os.kill(worker, signal.SIGKILL)
    rig.expect(wire.WorkerExited)
    assert all(is_gone(pid) for pid in pids) and rig.left_behind() == []
