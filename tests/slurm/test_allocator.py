"""Slots are given to one worker at a time, and a worker sees its own devices."""

import random
from pathlib import Path

import pytest

from slurm.allocator import VISIBLE, Allocator, Bound, SlotsTaken, devices_here


@pytest.mark.parametrize(
    ("devices", "slots", "seen"),
    [
        (None, (0, 2), {}),
        (["0", "1", "2", "3"], (0, 2), {VISIBLE: "0,2"}),
        (["4", "5", "6", "7"], (1,), {VISIBLE: "5"}),
        (["GPU-8a1f", "GPU-77b0"], (1,), {VISIBLE: "GPU-77b0"}),
        (["0", "1"], (), {}),
    ],
)
def test_a_worker_sees_its_own_devices_and_no_others(
    devices: list[str] | None, slots: tuple[int, ...], seen: dict
) -> None:
    assert Allocator(4, devices).bind("rollout-0", slots) == seen


def test_a_slot_has_one_worker_until_that_is_dead() -> None:
    node = Allocator(3)
    node.bind("rollout-0", (0, 1))
    with pytest.raises(SlotsTaken, match="train-0 wants slot 1: rollout-0"):
        node.bind("train-0", (1,))
    with pytest.raises(SlotsTaken, match="rollout-0 is bound already"):
        node.bind("rollout-0", (2,))
    with pytest.raises(SlotsTaken, match="wants slot 3: there are 3"):
        node.bind("train-0", (2, 3))
    assert node.bindings == {"rollout-0": Bound((0, 1), 0)}, "what was refused has taken nothing"
    node.release("rollout-0")
    node.release("rollout-0")
    node.bind("train-0", (1, 2))


def test_those_who_share_slots_are_awake_one_at_a_time() -> None:
    node = Allocator(3)
    node.bind("rollout-0", (0,), is_shared=True)
    with pytest.raises(SlotsTaken, match="reward-0 wants slot 0: rollout-0"):
        node.bind("reward-0", (0,), is_shared=True)  # the other one starts, and is awake
    node.sleep("rollout-0")
    with pytest.raises(SlotsTaken, match="train-0 wants slot 0: rollout-0"):
        node.bind("train-0", (0,))  # it would never sleep
    node.bind("reward-0", (0, 1), is_shared=True)
    with pytest.raises(SlotsTaken, match="rollout-0 wants slot 0: reward-0"):
        node.wake("rollout-0")
    with pytest.raises(SlotsTaken, match="reward-0 is awake already"):
        node.wake("reward-0")
    node.sleep("reward-0")
    node.wake("rollout-0")
    assert {name: bound.is_awake for name, bound in node.bindings.items()} == {"rollout-0": True, "reward-0": False}
    node.release("rollout-0")
    node.wake("reward-0")


def test_whatever_is_bound_and_released_no_slot_is_ever_held_twice() -> None:
    rng, node = random.Random(0), Allocator(8, [*map(str, range(8))])
    for n in range(2_000):
        if node.bindings and rng.random() < 0.5:
            node.release(rng.choice(list(node.bindings)))
        wanted = rng.sample(range(8), rng.randint(1, 3))
        held = {slot for bound in node.bindings.values() for slot in bound.slots}
        try:
            seen = node.bind(f"w{n}", wanted)[VISIBLE]
        except SlotsTaken:
            assert held & set(wanted)
        else:
            assert not held & set(wanted) and seen == ",".join(map(str, wanted))


def test_whatever_is_bound_slept_woken_and_released_one_is_awake_on_a_slot() -> None:
    rng, node = random.Random(1), Allocator(6)
    done = dict.fromkeys(("bind", "sleep", "wake", "release", "refused"), 0)
    for n in range(4_000):
        kind = rng.choice(["bind", "sleep", "wake", "wake", "release"])
        bound = sorted(node.bindings)
        one = rng.choice(bound or [""])
        try:
            if kind == "bind":
                node.bind(f"w{n}", rng.sample(range(6), rng.randint(1, 2)), is_shared=rng.random() < 0.8)
            elif kind == "sleep" and one and node.bindings[one].is_shared:
                node.sleep(one)
            elif kind == "wake" and one:
                node.wake(one)
            elif kind == "release" and rng.random() < 0.5:
                node.release(one)
            done[kind] += 1
        except SlotsTaken:
            done["refused"] += 1
        awake = [slot for b in node.bindings.values() if b.is_awake for slot in b.slots]
        alone = [slot for b in node.bindings.values() if not b.is_shared for slot in b.slots]
        everybodys = [slot for b in node.bindings.values() for slot in b.slots]
        assert len(set(awake)) == len(awake)
        assert all(everybodys.count(slot) == 1 for slot in alone)
    assert min(done.values()) > 100


def test_the_devices_of_a_host_are_those_it_is_told_or_those_it_has(tmp_path: Path) -> None:
    assert devices_here({}, tmp_path) is None
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert devices_here({}, tmp_path) == ["2", "10"]
    assert devices_here({VISIBLE: "GPU-8a1f, GPU-77b0"}, tmp_path) == ["GPU-8a1f", "GPU-77b0"]
    assert devices_here({VISIBLE: ""}, tmp_path) == []
