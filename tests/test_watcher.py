"""The watcher beside a real core: its picture is what the core's state says, whatever happens to the run."""

import random
from collections import Counter
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.core import Core
from pipeline.core.dag import Progress
from pipeline.core.events import INFERENCE, Role
from pipeline.core.fleet import Replicas
from pipeline.core.modes import ModeName
from pipeline.core.sequences import SequenceState
from pipeline.core.snapshot import Snapshot
from pipeline.core.worker import Worker
from pipeline.run_folder import RunFolder
from pipeline.watcher import Watcher
from pipeline.wire_counts import Counts
from tests.core.lives import Hits
from tests.core.storm import Storm
from tests.fakes.plan import Odds, make_plan
from tests.fakes.watched import config_of, no_fault
from tests.fakes.world import World


class Beside:
    """A watcher beside a world, which is told all that a shell would tell it; and what it posts."""

    def __init__(self, world: World, folder: Path, config: Config | None = None) -> None:
        self.world, self.config = world, config or config_of()
        self.run = RunFolder(folder / "run")
        self.run.create()
        self.posted: list[ev.Event] = []
        self.rng = random.Random(5)
        self.num_iterations: Counter[str] = Counter()

    def watch(self, event: ev.Event, decisions: list[de.Decision]) -> None:
        world = self.world
        if isinstance(event, ev.RunRestored):
            self.watcher = Watcher(
                world.core,  # type: ignore[arg-type]
                self.config,
                self.posted.append,
                self.run,
                clock=lambda: world.now,
                fault=no_fault,
            )
        self.watcher.after(event, decisions, world.now)
        if world.processes and self.rng.random() < 0.3:
            name = self.rng.choice(sorted(world.processes))
            num = self.rng.randint(0, 3)
            self.num_iterations[name] += num
            counts = Counts(worker=name, running=1, waiting=0, num_tokens=0, rss_bytes=1, num_iterations=num)
            self.watcher.heard(counts)

    def snapshot(self) -> Snapshot:
        return self.watcher._snapshot(self.world.now)


def check(seen: Snapshot, world: World) -> None:
    """Against the core's own state, counted in another way."""
    core = world.core
    assert seen.version == core.versions.current
    by_step = {number: core.sequences.of_step(number) for number in core.steps if number > seen.version}
    left = {n: sum(s.place.role is not None for s in found) for n, found in by_step.items()}
    crowds = {role: {c.step + 1: c for c in seen.role(role).crowds} for role in INFERENCE}
    assert crowds[Role.ROLLOUT].keys() == crowds[Role.REWARD].keys()
    admitted = [n for n in by_step if n <= seen.num_admitted]
    assert all(n in crowds[Role.ROLLOUT] for n in admitted if left[n]), (crowds.keys(), left)
    for number in crowds[Role.ROLLOUT]:
        for role in INFERENCE:
            crowd = crowds[role][number]
            there = [s for s in by_step.get(number, ()) if s.place.role is role]
            assert crowd.num_waiting + sum(crowd.ages) == pytest.approx(len(there)), (number, role)
            fresh = [s for s in there if s.place.state is SequenceState.WAITING and not s.generated]
            assert crowd.num_waiting >= len(fresh)
    serving = {w.name for w in core.fleet.workers.values() if serves(core, w)}
    tasks = {t: w for step in core.steps.values() for of in step.tasks.values() for t, w in of.items()}
    running = sum(
        s.place.state is SequenceState.RUNNING and tasks[s.task] in serving for found in by_step.values() for s in found
    )
    assert sum(block.num_running for block in seen.blocks) == running
    views = {view.index: view for view in seen.blocks if view.index >= 0}
    assert views.keys() == {block.index for block in core.blocks.all}
    for block in core.blocks.all:
        view = views[block.index]
        if core.blocks.is_lost(block):
            assert view.is_silent
        else:
            is_there = block.wanted is None or core.blocks.held_by(block) is block.wanted
            assert (view.role, view.is_silent, view.ready_in_s == 0) == (block.wanted, False, is_there)
    trained = [s for s in core.steps.values() if s.stages["train"] is Progress.RUNNING]
    assert seen.train.left_s is not None or not trained


def serves(core: Core, worker: Worker) -> bool:
    """It is awake, and its slots are not promised to another."""
    block = core.blocks.of(worker)
    return worker.state in ("ready", "loading") and (block is None or block.wanted is worker.role)


class WatchedStorm(Storm):
    beside: Beside

    def _watch(self, event: ev.Event, decisions: list[de.Decision]) -> None:
        super()._watch(event, decisions)
        self.beside.watch(event, decisions)
        if self.world.core.ended is None:
            check(self.beside.snapshot(), self.world)
            self.counts["checked"] += 1


def test_the_picture_is_the_cores_state_through_random_schedules(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    for seed in range(120):
        storm = WatchedStorm(seed, Hits(), counts)
        mode = storm.world.plan.mode
        storm.beside = Beside(storm.world, tmp_path, config_of(f"placement.mode={mode.value}"))
        counts[mode] += 1
        try:
            storm.run()
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error
    assert all(counts[mode] for mode in ModeName)
    assert counts["checked"] > 4_000 and counts["node lost"] and counts["controller killed"], counts


def large(**changes: object) -> World:
    replicas = [Replicas(role=role, replicas=num, slots=1) for role, num in zip(Role, (3, 2, 1), strict=True)]
    plan = make_plan(
        replicas=tuple(replicas),
        **{"sequences_per_step": 64, "total_steps": 8, "staleness": 1, "is_streaming": True} | changes,
    )
    return World(plan, random.Random(1), Odds(flush=0.4, abort=0.05))


def test_a_long_run_leaves_nothing_behind(tmp_path: Path) -> None:
    world = large()
    beside = Beside(world, tmp_path)
    world.watch = beside.watch
    world.start(6).run(100_000)
    assert world.core.ended and world.core.ended.status == "done"
    watcher, seen = beside.watcher, beside.snapshot()
    assert (seen.version, seen.num_admitted) == (8, 8)
    assert not seen.rollout.crowds and not seen.reward.crowds
    assert not watcher._running._marks
    assert len(watcher._progress.judged) <= 9
