"""The core as a machine: events in, exact decisions out."""

import random

import pytest

from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.core import Core
from pipeline.core.events import Role
from pipeline.core.fleet import Replicas
from tests.fakes.world import World, check_invariants, make_plan


def new_world(seed: int = 0, **plan: object) -> World:
    return World(Core(make_plan(**plan)), rng=random.Random(seed))


def test_first_decisions_start_one_worker_per_replica() -> None:
    world = new_world().start()
    started = [d for d in world.log if isinstance(d, de.StartWorker)]
    assert [(d.worker, d.slots) for d in started] == [("rollout-0", (0,)), ("reward-0", (1,)), ("train-0", (2,))]
    assert world.timers == {"worker:rollout-0", "worker:reward-0", "worker:train-0"}


def test_a_run_goes_through_all_stages_in_order() -> None:
    world = new_world().start().run()
    assert world.core.ended == de.EndRun(status="done", reason="")
    stages = [(d.step, d.stage) for d in world.log if isinstance(d, de.StartTask)]
    assert stages[:2] == [(0, "evaluate"), (1, "prompts")] or stages[0] == (0, "evaluate")
    for step in (1, 2, 3):
        order = [stage for s, stage in stages if s == step]
        expected = ["prompts", "rollout", "reward", "train", "publish"]
        assert order == expected + (["evaluate", "checkpoint"] if step in (2, 3) else [])
    assert world.rows == [0, 1, 2, 3]
    assert world.saved == [2, 3]
    assert world.core.versions.current == 3
    assert not world.timers, "every limit was cleared"


@pytest.mark.parametrize("seed", range(60))
def test_any_order_of_reports_trains_every_sequence_once(seed: int) -> None:
    replicas = (
        Replicas(role=Role.ROLLOUT, replicas=2, slots=1),
        Replicas(role=Role.REWARD, replicas=2, slots=1),
        Replicas(role=Role.TRAIN, replicas=1, slots=1),
    )
    world = new_world(seed, replicas=replicas, sequences_per_step=8).start(num_slots=5)
    while not world.core.ended and world.tick():
        check_invariants(world.core)
    assert world.core.ended is not None and world.core.ended.status == "done"
    assert sorted(world.trained.values()) == [1] * 8 + [2] * 8 + [3] * 8


@pytest.mark.parametrize("seed", range(60))
def test_killed_workers_lose_and_double_nothing(seed: int) -> None:
    world = new_world(seed, restarts=1000).start()
    kills = 0
    while not world.core.ended and world.tick():
        check_invariants(world.core)
        if kills < 10 and world.rng.random() < 0.1 and not world.core.ended:
            world.kill(world.rng.choice(["rollout-0", "reward-0", "train-0"]))
            kills += 1
    assert world.core.ended is not None and world.core.ended.status == "done", world.core.ended
    assert sorted(world.trained.values()) == [1] * 4 + [2] * 4 + [3] * 4
    assert world.rows == [0, 1, 2, 3]
    assert world.sealed == [1, 2, 3]
    assert world.trainer_version == 3 and max(world.saved) == 3
    assert kills


def test_a_worker_that_keeps_dying_ends_the_run() -> None:
    world = new_world(restarts=2).start()
    for _ in range(3):
        assert world.core.ended is None
        world.kill("reward-0")
    assert world.core.ended is not None
    assert world.core.ended.status == "failed" and "reward-0" in world.core.ended.reason


def test_r06_a_failed_stage_ends_the_run_with_its_cause() -> None:
    world = new_world().start()
    while not any(isinstance(d, de.StartTask) and d.stage == "train" for d in world.log):
        world.tick()
    task = next(d.task for d in world.log if isinstance(d, de.StartTask) and d.stage == "train")
    world.give(ev.TaskEnded(task=task, ok=False, error="ValueError: no"))
    assert world.core.ended is not None
    assert world.core.ended.status == "failed"
    assert "stage train of step 1 failed on train-0: ValueError: no" in world.core.ended.reason
    assert world.give(ev.TimerFired(name="x")) == [], "nothing is decided after the end"


def test_a_member_without_verdict_is_masked_and_a_group_of_one_is_dropped() -> None:
    world = new_world(total_steps=1)
    world.failure = "timeout"
    world.start().run()
    commit = next(d for d in world.log if isinstance(d, de.CommitBatch))
    assert commit.ids == ()
    reasons = dict(commit.dropped)
    assert sorted(reasons.values()) == ["group_too_small"] * 2 + ["judge:timeout"] * 2


def test_a_limit_that_runs_out_is_named() -> None:
    world = new_world().start()
    world.give(ev.TimerFired(name="worker:rollout-0"))
    assert world.core.ended == de.EndRun(status="failed", reason="limit exceeded: worker:rollout-0")


def test_a_failed_update_fences_the_replica_which_then_starts_from_the_new_version() -> None:
    world = new_world().start()
    while not any(isinstance(d, de.LoadVersion) for d in world.log):
        world.tick()
    world.pending = [(w, e) for w, e in world.pending if not isinstance(e, ev.VersionLoaded)]
    decisions = world.give(ev.UpdateFailed(worker="rollout-0", version=1, reason="shapes"))
    assert decisions[0] == de.FenceReplica(worker="rollout-0", reason="shapes")
    while not (started := [d for d in world.log if isinstance(d, de.StartWorker) and d.version == 1]):
        world.tick()
    assert started[0].worker == "rollout-0"
    assert world.run().core.ended == de.EndRun(status="done")


def run_until(world: World, kind: type, count: int = 1) -> None:
    while sum(isinstance(d, kind) for d in world.log) < count:
        assert world.tick()


def test_cancel_during_rollout_saves_the_last_trained_version() -> None:
    world = new_world(save_freq=10).start()
    run_until(world, de.CommitTrained, 1)
    while not any(isinstance(d, de.StartTask) and d.stage == "rollout" and d.step == 2 for d in world.log):
        world.tick()
    world.give(ev.CancelAsked(reason="interrupted"))
    world.run()
    assert world.core.ended == de.EndRun(status="cancelled", reason="interrupted")
    assert world.saved == [1] and world.rows == [0, 1]


def test_cancel_during_training_brings_the_step_to_its_end() -> None:
    world = new_world(save_freq=10).start()
    while not any(isinstance(d, de.StartTask) and d.stage == "train" and d.step == 1 for d in world.log):
        world.tick()
    world.give(ev.CancelAsked(reason="interrupted"))
    world.run()
    assert world.saved == [1] and world.rows[-1] == 1
    assert world.core.ended == de.EndRun(status="cancelled", reason="interrupted")


def test_cancel_before_anything_runs_ends_at_once() -> None:
    world = new_world().start()
    world.give(ev.CancelAsked(reason="interrupted"))
    assert world.core.ended == de.EndRun(status="cancelled", reason="interrupted")


def test_replicas_that_fit_nowhere_are_named() -> None:
    world = new_world().start(num_slots=2)
    assert world.core.ended is not None and "train-0" in world.core.ended.reason


def restored(step: int, states: list[str], batched: bool = False) -> ev.RestoredStep:
    sequences = tuple(
        ev.RestoredSequence(
            id=f"{step:06d}-{i // 2:05d}-{i % 2:04d}", state=state, score=1.0 if state != "admitted" else None
        )
        for i, state in enumerate(states)
    )
    return ev.RestoredStep(step=step, batched=batched, sequences=sequences)


def test_recorded_batches_are_trained_again_without_rollout() -> None:
    steps = (restored(3, ["batched"] * 4, batched=True), restored(4, ["admitted", "generated", "scored", "admitted"]))
    world = new_world(total_steps=5)
    world.batches[3] = tuple(s.id for s in steps[0].sequences)
    assert world.batches[3]
    world.start(version=2, steps=steps).run()
    stages = [(d.step, d.stage) for d in world.log if isinstance(d, de.StartTask)]
    assert stages[0] == (3, "train")
    assert (4, "prompts") not in stages and (5, "prompts") in stages
    first = next(d for d in world.log if isinstance(d, de.Dispatch))
    assert [i[-10:] for i in first.ids] == ["00000-0000", "00001-0001"]
    assert world.core.ended == de.EndRun(status="done")
    assert sorted(world.trained.values()) == [3] * 4 + [4] * 4 + [5] * 4


def test_a_dead_trainer_trains_the_recorded_batches_again() -> None:
    world = new_world(total_steps=6, save_freq=3, evaluate_freq=0).start()
    while not any(isinstance(d, de.StartTask) and d.stage == "train" and d.step == 6 for d in world.log):
        world.tick()
    mark = len(world.log)
    world.kill("train-0")
    world.run()
    again = [(d.step, d.stage) for d in world.log[mark:] if isinstance(d, de.StartTask)]
    assert again == [(4, "train"), (5, "train"), (6, "train"), (6, "publish"), (6, "checkpoint")]
    assert world.rows == [1, 2, 3, 4, 5, 6] and world.core.ended == de.EndRun(status="done")


def test_the_journal_replays_to_the_same_decisions() -> None:
    world = new_world(seed=3).start().run()
    again = Core(world.core.plan)
    decisions = [d for i, e in enumerate(world.events, 1) for d in again.handle(e, float(i))]
    assert decisions == world.log
