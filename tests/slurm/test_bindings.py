"""The slots of a node with a real agent: what was ordered, what it reports and what /proc shows are one thing.

Workers lock the devices that they see (tests.slurm.tasks:hold): one that has to share a device ends at once.
"""

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import wire
from pipeline.bindings import NodeBindings
from pipeline.core import events as ev
from tests.fakes.looker import Looker
from tests.slurm.rig import NODE, children
from tests.slurm.watch import Watch

NUM_SLOTS = 8
DEVICES = [f"GPU-{letter}" for letter in "abcdefgh"]
NAMES = [f"rollout-{index}" for index in range(NUM_SLOTS)]

Held = dict[str, tuple[int, list[int]]]
"""Life and slots of each worker."""


def holder(pid: int) -> tuple[str, list[str]] | None:
    """The worker that this process is and the devices that it sees; None if it is dead, or no program yet."""
    try:
        data = Path(f"/proc/{pid}/environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    variables = dict(entry.partition("=")[::2] for entry in data.decode().split("\0"))
    return (variables["HOLDER"], variables["CUDA_VISIBLE_DEVICES"].split(",")) if "HOLDER" in variables else None


class Sampler(Looker):
    """Looks at all workers of a zygote, again and again. `shared`: devices that two of them had at once."""

    def __init__(self, zygote: int) -> None:
        super().__init__(period_s=0.0005)
        self.zygote, self.num_samples, self.shared = zygote, 0, set[str]()

    def look(self) -> None:
        pids = children(self.zygote)  # before what they are: who is alive after this was there together
        devices = [device for found in map(holder, pids) if found for device in found[1]]
        self.shared.update(device for device in devices if devices.count(device) > 1)
        self.num_samples += 1


class Slots:
    """A node with fake devices, and what was ordered there. `held` is the test's own ledger."""

    def __init__(self, path: Path) -> None:
        self.watch = Watch(path / "run", num_slots=NUM_SLOTS)
        _, _, self.zygote = self.watch.serve()
        self.locks = path / "locks"
        self.locks.mkdir()
        self.held: Held = {}
        self.num_lives = 0

    @property
    def node(self) -> NodeBindings:
        return self.watch.shell.nodes[NODE].bindings

    def pid(self, worker: str) -> int:
        return self.node.observed[worker].pid

    def free(self) -> list[int]:
        return [slot for slot in range(NUM_SLOTS) if all(slot not in slots for _, slots in self.held.values())]

    def order(self, worker: str, slots: list[int]) -> wire.StartWorker:
        self.num_lives += 1
        return wire.StartWorker(
            worker=worker,
            role="rollout",
            index=0,
            life=self.num_lives,
            slots=slots,
            version=0,
            main="tests.slurm.tasks:hold",
            options={"locks": str(self.locks)},
        )

    def start(self, worker: str, slots: list[int]) -> None:
        order = self.order(worker, slots)
        self.watch.send(NODE, order)
        self.held[worker] = (order.life, slots)

    def kill(self, worker: str) -> None:
        self.watch.send(NODE, wire.KillWorker(worker=worker, reason="the test says so"))

    def ended(self, worker: str, life: int) -> str:
        return self.watch.expect(wire.WorkerExited, worker=worker, life=life).reason

    def end(self, worker: str) -> None:
        """Its end is about to be reported."""
        life, _ = self.held.pop(worker)
        assert self.ended(worker, life).startswith("killed by SIGKILL")

    def try_start(self, worker: str, slots: list[int]) -> bool:
        """Whether the agent obeyed; what it refuses, it says so."""
        order = self.order(worker, slots)
        self.watch.send(NODE, order)
        self.watch.until(lambda: worker not in self.node.requested or worker in self.node.observed)
        if worker in self.node.requested:
            self.held[worker] = (order.life, slots)
            return True
        assert self.ended(worker, order.life).startswith(f"refused: {worker} wants slot ")
        return False

    def compare(self) -> None:
        """Ledger, orders, reports and /proc, as soon as what is on its way has come."""
        self.watch.until(lambda: self.observed() == self.held)
        assert self.node.requested == self.held and self.node.strays == ()
        pids = {worker: self.pid(worker) for worker in self.held}
        assert sorted(children(self.zygote)) == sorted(pids.values())
        self.watch.until(lambda: all(map(holder, pids.values())))
        seen = {worker: holder(pid) for worker, pid in pids.items()}
        assert seen == {w: (w, [DEVICES[slot] for slot in slots]) for w, (_, slots) in self.held.items()}

    def observed(self) -> Held:
        return {worker: (binding.life, binding.slots) for worker, binding in self.node.observed.items()}


@pytest.fixture
def slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Slots]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(DEVICES))
    slots = Slots(tmp_path)
    yield slots
    slots.watch.close()


def test_500_random_changes_leave_ledger_reports_and_processes_equal(slots: Slots) -> None:
    done = {"start": 0, "kill": 0, "die": 0, "replace": 0, "clash": 0}
    with Sampler(slots.zygote) as sampler:
        num_refused = change(slots, random.Random(6), done)
    print(f"{done}, refused while another died {num_refused}, samples {sampler.num_samples}")
    assert sum(done.values()) == 500 and min(done.values()) > 30
    assert sampler.shared == set() and sampler.num_samples > 100
    assert slots.watch.shell.posted == []


def change(slots: Slots, rng: random.Random, done: dict[str, int]) -> int:
    """Until 500 changes are done, each compared; returns how often an order was refused while another worker died."""
    num_refused = 0
    while sum(done.values()) < 500:
        held, free = sorted(slots.held), slots.free()
        new = next((name for name in rng.sample(NAMES, len(NAMES)) if name not in slots.held), "")
        kinds = [*(["start"] * 2 if free else []), *(["kill", "die"] if held else [])]
        kind = rng.choice([*kinds, *(["replace", "clash"] if held and new else [])])
        one = rng.choice(held or [""])
        match kind:
            case "start":
                slots.start(new, rng.sample(free, rng.randint(1, min(3, len(free)))))
            case "kill":
                slots.kill(one)
                slots.end(one)
            case "die":
                os.kill(slots.pid(one), signal.SIGKILL)
                slots.end(one)
            case "replace":  # ordered again and again while the one before is dying
                wanted = slots.held[one][1]
                slots.kill(one)
                while not slots.try_start(new, wanted):
                    num_refused += 1
                slots.end(one)
            case "clash":
                wanted = [*rng.sample(free, min(1, len(free))), rng.choice(slots.held[one][1])]
                assert not slots.try_start(new, wanted)
        done[kind] += 1
        slots.compare()
    return num_refused


def test_the_slots_of_a_worker_that_is_not_dead_yet_are_refused(slots: Slots) -> None:
    slots.start("rollout-0", [0, 1])
    slots.compare()
    os.kill(slots.zygote, signal.SIGSTOP)  # it cannot kill
    slots.kill("rollout-0")
    assert not slots.try_start("rollout-1", [1, 2])
    assert holder(slots.pid("rollout-0"))
    os.kill(slots.zygote, signal.SIGCONT)
    slots.end("rollout-0")
    assert slots.try_start("rollout-1", [1, 2])
    slots.compare()


def test_an_order_for_slots_that_are_not_there_is_refused(slots: Slots) -> None:
    assert not slots.try_start("rollout-0", [NUM_SLOTS])
    slots.compare()


def test_a_worker_that_nobody_ordered_is_reported_until_it_has_ended(slots: Slots) -> None:
    """One under a name that is used elsewhere, or was. Its end is not that worker's."""
    watch, stray = slots.watch, slots.order("rollout-1", [2])
    slots.start("rollout-0", [0])
    slots.compare()
    node = watch.shell.nodes[NODE]
    watch.do(watch.nodes.channel.send(node.peer, stray))  # past the ledger
    strays = (ev.Stray(worker="rollout-1", slots=(2,)),)
    assert watch.next() == ev.StraysReported(node=NODE, strays=strays)
    assert not slots.try_start("rollout-2", [2, 3])
    slots.kill("rollout-1")
    assert watch.next() == ev.StraysReported(node=NODE, strays=())
    assert slots.try_start("rollout-1", [2, 3])
    slots.compare()
    assert watch.shell.posted == []
