"""The core as a machine: events in, exact decisions out."""

import random
from collections.abc import Callable

from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.events import Finish, Role
from pipeline.core.fleet import Replicas
from pipeline.core.worker import WorkerState
from tests.core.lives import Lives
from tests.core.tables import Hits
from tests.fakes.durable import Row
from tests.fakes.plan import Odds, make_plan
from tests.fakes.world import World


def new_world(seed: int = 0, odds: Odds | None = None, **plan: object) -> World:
    world = World(make_plan(**plan), random.Random(seed), odds)
    lives = Lives(Hits())
    world.watch = lambda event, decisions: lives.take(world.core, event, decisions)
    return world


def replicas(rollout: int = 1, reward: int = 1) -> tuple[Replicas, ...]:
    nums = {Role.ROLLOUT: rollout, Role.REWARD: reward, Role.TRAIN: 1}
    return tuple(Replicas(role=role, replicas=num, slots=1) for role, num in nums.items())


def until(world: World, condition: Callable[[de.Decision], bool]) -> de.Decision:
    """Go on until the core has decided such a thing."""
    while not (found := [d for d in world.log if condition(d)]):
        assert world.tick()
    return found[0]


def is_start(stage: str, step: int) -> Callable[[de.Decision], bool]:
    return lambda d: isinstance(d, de.StartTask) and (d.stage, d.step) == (stage, step)


def hear(world: World, worker: str, kind: type[ev.Event]) -> ev.Event:
    """Go on until the worker has said such a thing, and take it out of its channel."""
    while not (said := [e for e in world.channels.get(worker, ()) if isinstance(e, kind)]):
        assert world.tick()
    world.channels[worker].remove(said[0])
    return said[0]


def stages(log: list[de.Decision]) -> list[tuple[int, str]]:
    return [(d.step, d.stage) for d in log if isinstance(d, de.StartTask)]


def test_first_decisions_start_one_worker_per_replica() -> None:
    world = new_world().start()
    world.tick()
    started = [d for d in world.log if isinstance(d, de.StartWorker)]
    assert [(d.worker, d.slots) for d in started] == [("rollout-0", (0,)), ("reward-0", (1,)), ("train-0", (2,))]
    assert world.timers.keys() == {"worker:rollout-0", "worker:reward-0", "worker:train-0"}


def test_a_run_goes_through_all_stages_in_order() -> None:
    world = new_world().start().run()
    assert world.core.ended == de.EndRun(status="done", reason="")
    started = stages(world.log)
    assert started[0] == (0, "evaluate")
    for step in (1, 2, 3):
        order = [stage for s, stage in started if s == step]
        expected = ["prompts", "rollout", "reward", "train", "publish"]
        assert order == expected + (["evaluate", "checkpoint"] if step in (2, 3) else [])
    assert world.durable.recorded == [0, 1, 2, 3]
    assert sorted(world.durable.checkpoints) == [0, 2, 3]
    assert world.core.versions.current == 3
    assert not world.timers, "every limit was cleared"


def test_a_worker_that_keeps_dying_ends_the_run() -> None:
    world = new_world(restarts=2).start()
    world.tick()
    for _ in range(3):
        assert world.core.ended is None
        world.kill("reward-0")
        hear(world, "reward-0", ev.WorkerDied)
        world.give(ev.WorkerDied(worker="reward-0", reason="killed"))
    assert world.core.ended is not None
    assert world.core.ended.status == "failed" and "reward-0" in world.core.ended.reason


def test_deaths_before_the_last_progress_do_not_count() -> None:
    world = new_world(restarts=1, evaluate_freq=0).start()
    for step in (1, 2, 3):
        until(world, is_start("reward", step))
        world.kill("reward-0")
    assert world.run().core.ended == de.EndRun(status="done")


def test_r06_a_failed_stage_ends_the_run_with_its_cause() -> None:
    world = new_world().start()
    task = until(world, is_start("train", 1))
    assert isinstance(task, de.StartTask)
    world.give(ev.TaskEnded(task=task.task, ok=False, error="ValueError: no"))
    assert world.core.ended is not None
    assert world.core.ended.status == "failed"
    assert "stage train of step 1 failed on train-0: ValueError: no" in world.core.ended.reason
    assert world.give(ev.TimerFired(name="x")) == [], "nothing is decided after the end"


def test_a_member_without_verdict_is_masked_and_a_group_of_one_is_dropped() -> None:
    world = new_world(total_steps=1).start()
    first = until(world, lambda d: isinstance(d, de.Dispatch) and d.task.startswith("reward"))
    assert isinstance(first, de.Dispatch)
    for seq_id in first.ids[::2]:
        verdict = ev.VerdictInfo(id=seq_id, score=None, failure="timeout")
        world.give(ev.VerdictGiven(task=first.task, verdicts=(verdict,)))
    for seq_id in first.ids[1::2]:
        verdict = ev.VerdictInfo(id=seq_id, score=1.0, failure="")
        decisions = world.core.handle(ev.VerdictGiven(task=first.task, verdicts=(verdict,)), world.now)
    assert decisions == [de.EndTask(task=first.task, worker="reward-0")]
    decisions = world.core.handle(ev.TaskEnded(task=first.task, ok=True), world.now)
    commit = next(d for d in decisions if isinstance(d, de.CommitBatch))
    assert commit.ids == ()
    assert sorted(dict(commit.dropped).values()) == ["group_too_small"] * 2 + ["judge:timeout"] * 2


def test_replicas_that_fit_nowhere_are_named() -> None:
    world = new_world().start(2)
    world.tick()
    assert world.core.ended is not None and "train-0" in world.core.ended.reason


# --- late and repeated reports --------------------------------------------------------------------------------------


def test_a_repeated_segment_is_counted_once() -> None:
    world = new_world().start()
    dispatch = until(world, lambda d: isinstance(d, de.Dispatch))
    assert isinstance(dispatch, de.Dispatch)
    seq_id = dispatch.ids[0]
    segment = ev.SegmentInfo(id=seq_id, idx=0, num_tokens=5, version=0, finish=Finish.FLUSH)
    for _ in range(2):
        world.give(ev.SegmentClosed(task=dispatch.task, segments=(segment,)))
    assert world.core.sequences[seq_id].num_tokens == 5


def test_sequences_of_a_recorded_step_are_not_admitted_again() -> None:
    world = new_world(total_steps=1, evaluate_freq=0).start()
    admitted = hear(world, "rollout-0", ev.SequenceAdmitted)
    world.channels["rollout-0"].appendleft(admitted)
    until(world, lambda d: isinstance(d, de.StartTask) and d.stage == "checkpoint")
    world.give(admitted)
    assert not world.core.sequences.of_step(1)
    assert world.run().core.ended == de.EndRun(status="done")


def test_a_repeated_report_of_readiness_does_not_rewind_the_trainer() -> None:
    world = new_world(evaluate_freq=0, save_freq=9).start()
    until(world, is_start("rollout", 3))
    assert world.processes["train-0"].version == 2
    assert world.give(ev.WorkerReady(worker="train-0", version=0)) == []
    assert [s for s in stages(world.run().log) if s[1] == "train"] == [(1, "train"), (2, "train"), (3, "train")]


# --- weights --------------------------------------------------------------------------------------------------------


def test_r21_a_failed_update_fences_the_replica_which_then_starts_from_the_new_version() -> None:
    world = new_world().start()
    until(world, lambda d: isinstance(d, de.LoadVersion))
    hear(world, "rollout-0", ev.VersionLoaded)
    decisions = world.give(ev.UpdateFailed(worker="rollout-0", version=1, reason="shapes"))
    assert decisions[0] == de.FenceReplica(worker="rollout-0", reason="shapes")
    assert not [d for d in decisions if isinstance(d, de.StartTask | de.Dispatch)]
    assert world.core.fleet.workers["rollout-0"].state is WorkerState.FENCED
    started = until(world, lambda d: isinstance(d, de.StartWorker) and d.version == 1)
    assert isinstance(started, de.StartWorker) and started.worker == "rollout-0"
    assert world.run().core.ended == de.EndRun(status="done")


def test_r21_a_replica_that_started_from_an_older_version_gets_no_work_before_it_has_loaded_the_new_one() -> None:
    world = new_world(replicas=replicas(rollout=2), evaluate_freq=0).start(4)
    until(world, is_start("train", 1))
    world.kill("rollout-1")
    started = until(world, lambda d: isinstance(d, de.StartWorker) and d.worker == "rollout-1" and world.now > 10)
    assert isinstance(started, de.StartWorker) and started.version == 0
    ready = hear(world, "rollout-1", ev.WorkerReady)
    until(world, is_start("rollout", 2))
    decisions = world.give(ready)
    assert de.LoadVersion(worker="rollout-1", version=1, keep_kv=False) in decisions
    assert not [d for d in decisions if isinstance(d, de.StartTask | de.Dispatch)]
    assert world.run().core.ended == de.EndRun(status="done")


def test_a_version_is_not_published_while_the_one_before_is_being_evaluated() -> None:
    """After a resume the batch of step 1 is there, and the base model is not evaluated."""
    world = new_world(total_steps=2, evaluate_freq=1)
    record(world, 1, ["batched"] * 4)
    world.start()
    ready = hear(world, "rollout-0", ev.WorkerReady)
    while world.tick():
        pass
    assert stages(world.log) == [(1, "train")]
    world.give(ready)
    world.run()
    evaluated = [(d.step, d.version) for d in world.log if isinstance(d, de.StartTask) and d.stage == "evaluate"]
    assert evaluated == [(0, 0), (1, 1), (2, 2)]


def test_a_step_is_published_when_no_replica_is_loading_any_more() -> None:
    world = new_world(replicas=replicas(rollout=2), evaluate_freq=0).start(4)
    loaded = hear(world, "rollout-1", ev.VersionLoaded)
    while world.tick():
        pass
    assert [w.version for w in world.core.fleet.ready(Role.ROLLOUT)] == [1]
    assert (2, "prompts") not in stages(world.log)
    world.give(loaded)
    assert (2, "prompts") in stages(world.log)


# --- a stop ---------------------------------------------------------------------------------------------------------


def test_cancel_during_rollout_saves_the_last_trained_version() -> None:
    world = new_world(save_freq=10).start()
    until(world, is_start("rollout", 2))
    world.give(ev.CancelAsked(reason="interrupted"))
    world.give(ev.CancelAsked(reason="again"))
    world.run()
    assert world.core.ended == de.EndRun(status="cancelled", reason="interrupted")
    assert world.durable.newest_checkpoint == 1 and world.durable.recorded == [0, 1]


def test_cancel_during_training_brings_the_step_to_its_end() -> None:
    world = new_world(save_freq=10).start()
    until(world, is_start("train", 1))
    world.give(ev.CancelAsked(reason=""))
    world.run()
    assert world.durable.newest_checkpoint == 1 and world.durable.recorded[-1] == 1
    assert world.core.ended is not None and world.core.ended.status == "cancelled"


def test_cancel_before_anything_runs_ends_at_once() -> None:
    world = new_world().start()
    world.give(ev.CancelAsked(reason="interrupted"))
    assert world.core.ended == de.EndRun(status="cancelled", reason="interrupted")


def test_cancel_after_a_resume_still_records_what_goes_before_the_saved_step() -> None:
    """Step 1 is trained from its recorded batch while the base model's evaluation has not begun."""
    world = new_world(total_steps=3, evaluate_freq=1)
    record(world, 1, ["batched"] * 4)
    world.start()
    until(world, is_start("train", 1))
    world.give(ev.CancelAsked(reason="interrupted"))
    world.run()
    assert world.core.ended == de.EndRun(status="cancelled", reason="interrupted")
    assert world.durable.recorded == [0, 1] and world.durable.newest_checkpoint == 1


# --- resume and rewind ----------------------------------------------------------------------------------------------


def record(world: World, step: int, states: list[str]) -> None:
    """The index holds sequences of `step` in these states."""
    for i, state in enumerate(states):
        row = Row(f"{step:06d}-{i // 2:05d}-{i % 2:04d}", step, state)
        row.score = 1.0 if state in ("scored", "batched") else None
        row.segments = [] if state == "admitted" else [(3, step - 1)]
        world.durable.rows[row.id] = row
    if set(states) == {"batched"}:
        world.durable.batches[step] = tuple(row.id for row in world.durable.of_step(step))


def test_recorded_batches_are_trained_again_without_rollout() -> None:
    world = new_world(total_steps=5)
    world.durable.save((1, 2))
    world.durable.recorded = [0, 1, 2]
    record(world, 3, ["batched"] * 4)
    record(world, 4, ["admitted", "generated", "scored", "admitted"])
    world.start().run()
    started = stages(world.log)
    assert started[0] == (3, "train")
    assert (4, "prompts") not in started and (5, "prompts") in started
    first = next(d for d in world.log if isinstance(d, de.Dispatch))
    assert [i[-10:] for i in first.ids] == ["00000-0000", "00001-0001"]
    assert world.core.ended == de.EndRun(status="done")
    assert {(row.step, row.state) for row in world.durable.rows.values()} == {(s, "trained") for s in (3, 4, 5)}


def test_a_dead_trainer_trains_the_recorded_batches_again() -> None:
    world = new_world(total_steps=6, save_freq=3, evaluate_freq=0).start()
    until(world, is_start("train", 6))
    mark = len(world.log)
    world.kill("train-0")
    world.run()
    again = stages(world.log[mark:])
    assert again == [(4, "train"), (5, "train"), (6, "train"), (6, "publish"), (6, "checkpoint")]
    assert world.durable.recorded == [1, 2, 3, 4, 5, 6] and world.core.ended == de.EndRun(status="done")


def test_cancel_while_batches_are_trained_again_saves_what_the_trainer_has() -> None:
    world = new_world(total_steps=6, save_freq=6, evaluate_freq=0).start()
    until(world, is_start("train", 5))
    world.kill("train-0")
    mark = len(world.log)
    while not any(is_start("train", 3)(d) for d in world.log[mark:]):
        world.tick()
    world.give(ev.CancelAsked(reason="interrupted"))
    world.run()
    assert world.core.ended == de.EndRun(status="cancelled", reason="interrupted")
    assert world.durable.newest_checkpoint == 3


def test_a_trainer_that_died_before_its_training_was_recorded_trains_that_again() -> None:
    world = new_world(total_steps=1, evaluate_freq=0).start()
    trained = hear(world, "", ev.BatchTrained)
    world.kill("train-0")
    hear(world, "train-0", ev.WorkerDied)
    world.give(ev.WorkerDied(worker="train-0", reason="killed"))
    world.give(hear(world, "train-0", ev.WorkerReady))
    decisions = world.give(trained)
    assert stages(decisions) == [(1, "train")]
    assert world.run().core.ended == de.EndRun(status="done")


def test_a_finished_run_has_nothing_left_to_do() -> None:
    world = new_world(total_steps=2)
    world.durable.save((1, 2))
    world.start()
    assert world.core.ended == de.EndRun(status="done")
