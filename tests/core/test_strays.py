"""What an agent runs that nobody ordered is ended, and what is to have its slots or its name waits for that."""

import random

import pytest

from pipeline.core import decisions as de
from pipeline.core import events as ev
from tests.core.lives import Lives
from tests.core.storm import random_world
from tests.core.tables import Hits
from tests.core.test_core import is_start, new_world, replicas, until
from tests.fakes.world import World

DONE = de.EndRun(status="done")


def report(world: World, node: str, *strays: tuple[str, tuple[int, ...]]) -> None:
    found = tuple(ev.Stray(worker=worker, slots=slots) for worker, slots in strays)
    world.give(ev.StraysReported(node=node, strays=found))


def ends(world: World) -> list[de.Decision]:
    return [d for d in world.log if isinstance(d, de.EndStray)]


def training(**plan: object) -> World:
    """One node with a slot more than is needed, in its first step's training."""
    world = new_world(**plan).start(4)
    until(world, is_start("train", 1))
    return world


def test_a_stray_is_ended_once_and_the_run_goes_on() -> None:
    world = training()
    for _ in range(2):
        report(world, "n0", ("old-0", (3,)))
    assert ends(world) == [de.EndStray(worker="old-0", node="n0", reason="nobody ordered it on n0, slots [3]")]
    assert world.run().core.ended == DONE and world.core.fleet.strays == {} and "stray:n0" not in world.timers


@pytest.mark.parametrize(("name", "slot"), [("old-0", 0), ("rollout-0", 3)])
def test_nothing_is_started_on_the_slots_or_under_the_name_of_a_stray(name: str, slot: int) -> None:
    world = training()
    assert world.core.fleet.workers["rollout-0"].slots == (0,)
    report(world, "n0", (name, (slot,)))
    world.channels["n0"].clear()  # it does not end
    world.kill("rollout-0")
    num = len(world.log)
    while world.channels.get("rollout-0"):
        world.tick()
    assert not [d for d in world.log[num:] if isinstance(d, de.StartWorker)]
    report(world, "n0")
    assert [d.worker for d in world.log[num:] if isinstance(d, de.StartWorker)] == ["rollout-0"]
    assert world.run().core.ended == DONE


@pytest.mark.parametrize("num_slots", [1, 2])
def test_a_node_that_comes_with_a_stray_is_used_as_far_as_it_is_free(num_slots: int) -> None:
    world = new_world(num_nodes=2, min_nodes=1, replicas=replicas(rollout=2)).start(3, num_slots)
    late = world.channels.pop("n1")
    until(world, is_start("rollout", 2))
    world.channels["n1"] = late  # its memory shows version 0: it is given version 1 first
    while "n1" not in world.core.crew.memories:
        world.give(late.popleft())
    report(world, "n1", ("old-0", (0,)))
    ended = world.channels["n1"].popleft()
    until(world, lambda d: isinstance(d, de.CopyVersion))
    while "n1" not in world.core.fleet.nodes:
        assert world.tick()
    assert world.core.ended is None
    placed = world.core.fleet.workers.get("rollout-1")
    assert (placed.slots if placed else None) == ((1,) if num_slots == 2 else None)
    world.say("n1", ended)
    assert world.run().core.ended == DONE
    assert world.core.fleet.workers["rollout-1"].node == "n1"


def test_where_a_stray_does_not_end_its_node_does() -> None:
    world = training()
    report(world, "n0", ("old-0", (0,)))
    world.channels["n0"].clear()
    world.now += 1e9
    world.give(ev.TimerFired(name="stray:n0"))
    assert [d.node for d in world.log if isinstance(d, de.EndNode)] == ["n0"]
    assert world.run().core.ended == DONE


def test_whatever_strays_there_are_a_run_comes_to_its_end() -> None:
    num_strays, num_done = 0, 0
    for seed in range(200):
        rng = random.Random(seed)
        world, slots = random_world(rng)
        lives = Lives(Hits())
        world.watch = lambda event, decisions, world=world, lives=lives: lives.take(world.core, event, decisions)
        world.start(*slots)
        while world.core.ended is None:
            draw = rng.random()
            if draw < 0.02 and world.memories:
                node = rng.choice(sorted(world.memories))
                taken = tuple(rng.sample(range(world.num_slots[node]), rng.randint(0, world.num_slots[node])))
                report(world, node, (rng.choice([*world.core.fleet.workers, "old-0"]), taken))
                num_strays += 1
            elif draw < 0.03 and world.processes:
                world.kill(rng.choice(sorted(world.processes)))
            elif not world.tick():
                world.let_time_pass()
        num_done += world.core.ended == DONE
        causes = ("died ", "was lost ", "failed: ", " failed on ")
        assert world.core.ended == DONE or any(cause in world.core.ended.reason for cause in causes), world.core.ended
    print(f"{num_strays} strays, {num_done} of 200 runs done")
    assert num_strays > 200 and num_done > 100
