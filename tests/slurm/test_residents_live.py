"""Workers that share slots, shifted, killed and started at random: the agent's reports are the test's own ledger."""

import os
import random
import signal
from pathlib import Path

from pipeline import wire
from pipeline.wire_shift import Sleep, Slept, Wake, WakeFailed, Woken
from tests.slurm.rig import Rig, start_order

SLOTS = {"rollout-0": [0], "reward-0": [0], "rollout-1": [0, 1], "reward-1": [1]}
NUM_OPERATIONS = 150


class Ledger:
    """`awake`: of every worker that lives, in the order of their starts."""

    def __init__(self, rig: Rig) -> None:
        self.rig, self.awake, self.num_lives = rig, dict[str, bool](), 0
        self.lives: dict[str, int] = {}

    def others_awake(self, worker: str) -> list[str]:
        return [
            w for w, is_awake in self.awake.items() if is_awake and w != worker and set(SLOTS[w]) & set(SLOTS[worker])
        ]

    def compare(self) -> None:
        """Its last report, after which nothing else comes."""
        bindings = [
            wire.Binding(w, self.lives[w], SLOTS[w], self.rig.pids[w], is_awake) for w, is_awake in self.awake.items()
        ]
        self.rig.expect(wire.Bindings, bindings=bindings)
        self.rig.heard.clear()

    def start(self, worker: str) -> bool:
        self.num_lives += 1
        order = start_order(worker, worker.partition("-")[0], shares=SLOTS[worker])
        self.rig.send(
            wire.StartWorker(**{f: getattr(order, f) for f in order.__struct_fields__} | {"life": self.num_lives})
        )
        if self.others_awake(worker):
            assert self.rig.expect(wire.WorkerExited, worker=worker, life=self.num_lives).reason.startswith("refused: ")
            return False
        self.rig.ready(worker)
        self.awake[worker], self.lives[worker] = False, self.num_lives
        return True

    def wake(self, worker: str) -> bool:
        self.rig.send(Wake(worker=worker, version=0, probe=None))
        if self.others_awake(worker):
            assert self.rig.expect(WakeFailed, worker=worker).reason.startswith("refused: ")
            return False
        assert self.rig.expect(Woken, worker=worker).held_bytes > 0
        self.awake[worker] = True
        return True

    def sleep(self, worker: str) -> None:
        self.rig.send(Sleep(worker=worker))
        assert self.rig.expect(Slept, worker=worker).held_bytes > 0
        self.awake[worker] = False

    def kill(self, worker: str, rng: random.Random) -> None:
        """Also in the middle of a shift."""
        if self.awake[worker] and rng.random() < 0.5:
            self.rig.send(Sleep(worker=worker))
        elif not self.awake[worker] and not self.others_awake(worker) and rng.random() < 0.5:
            self.rig.send(Wake(worker=worker, version=0, probe=None))
        os.kill(self.rig.pids[worker], signal.SIGKILL)
        reason = self.rig.expect(wire.WorkerExited, worker=worker, life=self.lives[worker]).reason
        assert reason.startswith("killed by SIGKILL")
        del self.awake[worker]


def test_whatever_is_shifted_killed_and_started_the_report_is_the_ledger(tmp_path: Path) -> None:
    rng, rig = random.Random(3), Rig(tmp_path / "run")
    done = dict.fromkeys(("start", "wake", "sleep", "kill", "refused"), 0)
    try:
        rig.welcome()
        rig.expect(wire.NodeReady)
        ledger = Ledger(rig)
        while sum(done.values()) < NUM_OPERATIONS:
            worker = rng.choice(list(SLOTS))
            if worker not in ledger.awake:
                kind = "start"
            elif rng.random() < 0.15:
                kind = "kill"
            else:
                kind = "sleep" if ledger.awake[worker] else "wake"
            match kind:
                case "start":
                    is_done = ledger.start(worker)
                case "wake":
                    is_done = ledger.wake(worker)
                case "sleep":
                    is_done = ledger.sleep(worker) is None
                case _:
                    is_done = ledger.kill(worker, rng) is None
            done[kind if is_done else "refused"] += 1
            if is_done:
                ledger.compare()
    finally:
        rig.close()
    assert min(done.values()) >= 10, done
