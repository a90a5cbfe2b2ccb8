"""Stages that overlap: sequences that stream to the judge, steps that run one version behind, updates in between."""

import pytest

from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.events import Finish, Role
from pipeline.core.sequences import RUNNING, WAITING
from tests.core.test_core import is_start, new_world, record, replicas, stages, until
from tests.fakes.plan import Odds
from tests.fakes.world import World


def step_of(task: str) -> int:
    return int(task.split("-")[1])


def dispatches(world: World, role: str) -> list[de.Dispatch]:
    return [d for d in world.log if isinstance(d, de.Dispatch) and d.task.startswith(role)]


def close(world: World, dispatch: de.Dispatch, seq_id: str, finish: Finish = Finish.STOP) -> list[de.Decision]:
    version = world.processes[dispatch.worker].version
    segment = ev.SegmentInfo(id=seq_id, idx=0, num_tokens=1, version=version, finish=finish)
    return world.give(ev.SegmentClosed(task=dispatch.task, segments=(segment,)))


def first_rollout(world: World) -> de.Dispatch:
    found = until(world, lambda d: isinstance(d, de.Dispatch) and d.task.startswith("rollout"))
    assert isinstance(found, de.Dispatch)
    return found


@pytest.mark.parametrize("is_streaming", [True, False])
def test_a_finished_sequence_goes_to_the_judge_at_once_if_it_may(is_streaming: bool) -> None:
    world = new_world(is_streaming=is_streaming, evaluate_freq=0).start()
    dispatch = first_rollout(world)
    while not world.core.fleet.ready(Role.REWARD):
        world.tick()
    before = len(dispatches(world, "reward"))
    close(world, dispatch, dispatch.ids[1])
    judged = [i for d in dispatches(world, "reward")[before:] for i in d.ids]
    assert judged == ([dispatch.ids[1]] if is_streaming else [])


def test_a_step_ends_only_when_its_rollout_tasks_have() -> None:
    """What they counted belongs into its row."""
    world = new_world(is_streaming=True, total_steps=1, evaluate_freq=0).start()
    dispatch = first_rollout(world)
    while world.core.sequences.of_step(1) and any(s.place.role for s in world.core.sequences.of_step(1)):
        world.processes[dispatch.worker].orders = type(world.processes[dispatch.worker].orders)(
            o for o in world.processes[dispatch.worker].orders if not isinstance(o, de.EndTask)
        )
        assert world.tick()
    while world.tick():
        pass
    assert not [d for d in world.log if isinstance(d, de.CommitBatch)]


def test_at_staleness_1_two_steps_begin_with_the_base_model() -> None:
    world = new_world(staleness=1, is_streaming=True, evaluate_freq=0).start()
    until(world, is_start("rollout", 2))
    assert not [d for d in world.log if isinstance(d, de.SealVersion)]
    until(world, is_start("prompts", 3))
    assert world.core.versions.current == 1, "the third needs version 1"
    assert world.run().core.ended == de.EndRun(status="done")


def test_at_staleness_0_nothing_of_a_step_begins_before_the_version_before_it() -> None:
    world = new_world(is_streaming=True, evaluate_freq=0).start()
    until(world, is_start("prompts", 2))
    assert world.core.versions.current == 1


def test_a_new_version_takes_the_running_sequences_back_and_they_go_on_under_it() -> None:
    world = new_world(staleness=1, is_streaming=True, evaluate_freq=0).start()
    held = []
    while not [d for d in world.log if isinstance(d, de.LoadVersion)]:
        process = world.processes.get("rollout-0")
        if process:  # step 2 makes no progress
            held += [w for w in process.work if step_of(w.task) == 2]
            process.work = [w for w in process.work if step_of(w.task) == 1]
        assert world.tick()
    assert {s.place for s in world.core.sequences.of_step(2)} == {RUNNING[Role.ROLLOUT]}
    process = world.processes["rollout-0"]
    process.work += held
    load = next(order for order in process.orders if isinstance(order, de.LoadVersion))
    process.orders.remove(load)
    world._obey(process, load)
    num_before = len(dispatches(world, "rollout"))
    world.run()
    again = dispatches(world, "rollout")[num_before:]
    assert {i for d in again for i in d.ids} >= {f"000002-{g:05d}-{m:04d}" for g in (0, 1) for m in (0, 1)}
    assert all(row.segments[-1][1] == 1 for row in world.durable.of_step(2)), "and end under it"
    assert world.core.ended == de.EndRun(status="done")


def test_kept_caches_mean_that_nothing_is_taken_back() -> None:
    world = new_world(staleness=1, is_streaming=True, evaluate_freq=0, keep_kv=True).start().run()
    loads = [d for d in world.log if isinstance(d, de.LoadVersion)]
    assert loads and all(d.keep_kv for d in loads)
    turns = [t for d in dispatches(world, "rollout") for t in d.turns]
    assert set(turns) == {1}


def test_busy_replicas_are_updated_one_after_the_other_and_idle_ones_at_once() -> None:
    world = new_world(
        staleness=1, is_streaming=True, evaluate_freq=0, replicas=replicas(rollout=3), sequences_per_step=2
    ).start(5)
    while world.core.versions.current < 1:
        for process in world.processes.values():  # step 2 makes no progress
            process.work = [w for w in process.work if step_of(w.task) == 1]
        assert world.tick()
    busy = {w for w in world.core.fleet.workers if w.startswith("rollout") and world.core._load(w)}
    assert len(busy) == 2
    idle = {"rollout-0", "rollout-1", "rollout-2"} - busy
    loads = [d.worker for d in world.log if isinstance(d, de.LoadVersion)]
    assert len(loads) == 2 and idle < set(loads)
    (first,) = busy & set(loads)
    (given,) = [d for d in dispatches(world, "rollout") if d.worker == first and step_of(d.task) == 2]
    assert not [d for d in close(world, given, given.ids[0], Finish.ABORT) if isinstance(d, de.Dispatch)], (
        "nothing is given to a replica that is to be updated itself"
    )
    assert world.core.sequences[given.ids[0]].place == WAITING[Role.ROLLOUT]
    decisions = world.give(ev.VersionLoaded(worker=next(iter(idle)), version=1))
    assert [d.worker for d in decisions if isinstance(d, de.Dispatch)] == list(idle)
    assert not [d for d in decisions if isinstance(d, de.LoadVersion)]
    decisions = world.give(ev.VersionLoaded(worker=first, version=1))
    assert [d.worker for d in decisions if isinstance(d, de.LoadVersion)] == list(busy - {first})


def test_no_token_is_older_than_the_bound_whatever_happens() -> None:
    """`World` refuses such a segment; here the bound is reached, and passed by a core without the rule."""
    for seed in range(40):
        world = new_world(seed, Odds(flush=0.3, abort=0.1), staleness=1, is_streaming=True, total_steps=4)
        world.start().run()
        lags = {step - 1 - v for step in (1, 2, 3, 4) for row in world.durable.of_step(step) for _, v in row.segments}
        assert lags <= {0, 1} and world.core.ended == de.EndRun(status="done")
    assert lags == {0, 1}


def test_a_sequence_with_tokens_of_a_newer_version_waits_for_that_version() -> None:
    """After a resume the served version is the checkpoint's, older than what was served before."""
    world = new_world(staleness=1, is_streaming=True, evaluate_freq=0, total_steps=3)
    record(world, 1, ["batched"] * 4)
    record(world, 2, ["admitted"] * 4)
    for row in world.durable.of_step(2):
        row.segments = [(3, 1)]
    world.start()
    first = first_rollout(world)
    assert world.core.versions.current == 1 and step_of(first.task) == 2
    assert world.run().core.ended == de.EndRun(status="done")


# --- nodes ----------------------------------------------------------------------------------------------------------


def test_a_lost_node_is_started_again_and_the_lost_versions_are_trained_and_published_again() -> None:
    world = new_world(total_steps=6, save_freq=3, evaluate_freq=0, staleness=1, is_streaming=True).start()
    until(world, is_start("train", 6))
    mark = len(world.log)
    world.lose_node("n0")
    assert [d.node for d in world.log[mark:] if isinstance(d, de.StartNode)] == ["n0"]
    world.run()
    again = [s for s in stages(world.log[mark:]) if s[1] in ("train", "publish")]
    assert again == [(s, stage) for s in (4, 5, 6) for stage in ("train", "publish")]
    assert world.durable.recorded == [1, 2, 3, 4, 5, 6] and world.core.ended == de.EndRun(status="done")


def test_a_node_that_is_lost_again_and_again_ends_the_run_with_its_cause() -> None:
    world = new_world(restarts=2, odds=Odds(node_fails=1.0)).start()
    until(world, is_start("rollout", 1))
    world.lose_node("n0")
    world.run()
    expected = de.EndRun(status="failed", reason="node n0 was lost 3 times without progress: no room")
    assert world.core.ended == expected


def test_losses_before_the_last_progress_do_not_count() -> None:
    world = new_world(restarts=1, evaluate_freq=0).start()
    for step in (1, 2, 3):
        until(world, is_start("rollout", step))
        world.lose_node("n0")
    assert world.run().core.ended == de.EndRun(status="done")


def test_a_trainer_that_was_rewinding_when_its_node_was_lost_publishes_all_lost_versions_again() -> None:
    world = new_world(total_steps=6, save_freq=6, evaluate_freq=0).start()
    until(world, is_start("train", 5))
    world.kill("train-0")
    mark = len(world.log)
    while not any(is_start("train", 3)(d) for d in world.log[mark:]):
        world.tick()
    mark = len(world.log)
    world.lose_node("n0")
    world.run()
    published = [s for s, stage in stages(world.log[mark:]) if stage == "publish"]
    assert published == [1, 2, 3, 4, 5, 6] and world.core.ended == de.EndRun(status="done")


def test_what_a_lost_node_put_and_did_not_report_still_bounds_what_follows() -> None:
    """Segments of version 2 are in the queue, and the core never heard of them: version 2 is waited for."""
    world = new_world(total_steps=4, save_freq=4, evaluate_freq=0, staleness=1, is_streaming=True).start()
    until(world, is_start("rollout", 3))
    running = {RUNNING[Role.ROLLOUT]}
    while world.core.versions.current < 2 or {s.place for s in world.core.sequences.of_step(3)} != running:
        process = world.processes["rollout-0"]
        process.work = [w for w in process.work if step_of(w.task) == 2 or w.aborted_at is not None]
        assert world.tick()
    for row in world.durable.of_step(3):
        row.segments = [*row.segments, (2, 2)]
    world.lose_node("n0")
    assert world.run().core.ended == de.EndRun(status="done")
    assert {row.segments[-1][1] for row in world.durable.of_step(3)} == {2}


def test_what_a_new_memory_holds_is_not_published_again() -> None:
    """Version 2 was saved before its seal was known: the memory that is made of it holds it."""
    world = new_world(total_steps=4, save_freq=2, evaluate_freq=0).start()
    until(world, is_start("publish", 4))
    world.lose_node("n0")
    until(world, lambda d: isinstance(d, de.SealVersion) and d.version == 3 and world.core.versions.current == 2)
    mark = len(world.log)
    world.lose_node("n0")
    world.run()
    assert [s for s, stage in stages(world.log[mark:]) if stage == "publish"] == [3, 4]
    assert world.core.ended == de.EndRun(status="done")
