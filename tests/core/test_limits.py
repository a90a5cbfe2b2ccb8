"""Every wait has a limit, and what happens when it runs out."""

import pytest

from pipeline.core import decisions as de
from pipeline.core import events as ev
from tests.core.test_core import hear, is_start, new_world, until
from tests.fakes.world import World


def fences(log: list[de.Decision]) -> list[tuple[str, str]]:
    return [(d.worker, d.reason) for d in log if isinstance(d, de.FenceReplica)]


def test_a_worker_whose_limit_runs_out_is_killed_and_started_again() -> None:
    world = new_world().start()
    world.tick()
    world.processes["rollout-0"].is_hung = True
    world.run()
    assert fences(world.log) == [("rollout-0", "limit exceeded: worker:rollout-0 (limits.engine_start_s, 10000 s)")]
    assert world.core.ended == de.EndRun(status="done")


@pytest.mark.parametrize(("hung", "kind"), [("rollout-0", de.LoadVersion), ("train-0", de.StartTask)])
def test_r27_every_wait_for_a_worker_has_a_limit(hung: str, kind: type[de.Decision]) -> None:
    world = new_world(evaluate_freq=0).start()
    until(world, lambda d: isinstance(d, kind) and d.worker == hung)  # type: ignore[attr-defined]
    world.processes[hung].is_hung = True
    world.run()
    assert fences(world.log)[0] in [
        ("rollout-0", "limit exceeded: worker:rollout-0 (limits.stage_s, 10000 s)"),
        ("train-0", "limit exceeded: task:train-1-4 (limits.stage_s, 10000 s)"),
    ]
    assert world.core.ended == de.EndRun(status="done")


def test_r27_a_worker_that_always_hangs_ends_the_run_with_the_limit_as_its_cause() -> None:
    world = new_world(restarts=1).start()
    while world.core.ended is None:
        if "reward-0" in world.processes:
            world.processes["reward-0"].is_hung = True
        if not world.tick():
            world.let_time_pass()
    assert world.core.ended.status == "failed"
    limit = "limit exceeded: worker:reward-0 (limits.engine_start_s, 10000 s)"
    assert world.core.ended.reason == f"reward-0 on n0 died 2 times without progress: {limit}\nkilled"


def test_a_worker_that_cannot_be_killed_ends_the_run() -> None:
    world = new_world().start()
    world.tick()
    world.now += 1e9
    decisions = world.core.handle(ev.TimerFired(name="worker:rollout-0"), world.now)
    reason = "limit exceeded: worker:rollout-0 (limits.engine_start_s, 10000 s)"
    assert fences(decisions) == [("rollout-0", reason)]
    world.core.handle(ev.TimerFired(name="worker:rollout-0"), world.now + 1e9)
    assert world.core.ended == de.EndRun(status="failed", reason=reason)


def test_nodes_that_never_come_end_the_run() -> None:
    world = new_world().start()
    world.channels.clear()
    world.run()
    assert world.core.ended == de.EndRun(
        status="failed", reason="limit exceeded: nodes (limits.engine_start_s, 20000 s)"
    )


def test_a_node_that_does_not_seal_a_version_is_ended_and_started_again() -> None:
    world = new_world().start()
    until(world, lambda d: isinstance(d, de.SealVersion))
    assert "seal:n0" in world.timers
    world.channels["n0"].clear()
    world.run()
    reason = "limit exceeded: seal:n0 (limits.stage_s, 10000 s)"
    assert [d for d in world.log if isinstance(d, de.EndNode)] == [de.EndNode(node="n0", reason=reason)]
    assert world.core.ended == de.EndRun(status="done")


def test_a_copy_that_hangs_is_ended_then_its_node_is() -> None:
    world = new_world(num_nodes=2, min_nodes=2, restarts=1).start(3, 1)
    until(world, lambda d: isinstance(d, de.CopyVersion))
    world.copies.clear()  # both movers are stuck, and nobody is told when they are killed
    world.run()
    ends = [d for d in world.log if isinstance(d, de.EndCopy | de.EndNode)]
    assert ends == [
        de.EndCopy(node="n1", reason="limit exceeded: copy:n1 (limits.publish_s, 20000 s)"),
        de.EndNode(node="n1", reason="limit exceeded: copy:n1 (limits.engine_start_s, 10000 s)"),
    ]
    assert world.core.ended == de.EndRun(status="done")


def test_a_timer_that_fires_after_it_was_cleared_or_set_anew_changes_nothing() -> None:
    world = new_world().start()
    until(world, lambda d: isinstance(d, de.Dispatch))
    assert "worker:rollout-0" not in world.timers
    assert world.give(ev.TimerFired(name="worker:rollout-0")) == []
    world.kill("reward-0")
    hear(world, "reward-0", ev.WorkerDied)
    world.give(ev.WorkerDied(worker="reward-0", reason="killed"))
    assert "worker:reward-0" in world.timers, "armed again"
    world.give(ev.TimerFired(name="worker:reward-0"))
    assert world.core.ended is None


def saving(world: World, step: int) -> World:
    """The last save took 50 s, and `step` is about to be trained."""
    until(world, is_start("checkpoint", 1))
    world.now += 50
    until(world, is_start("train", step))
    return world


def test_a_stop_with_time_enough_saves_what_is_trained() -> None:
    world = saving(new_world(total_steps=4, save_freq=1, evaluate_freq=0).start(), 2)
    world.give(ev.CancelAsked(reason="stopped by SIGTERM", within_s=500))
    world.run()
    assert world.core.ended == de.EndRun(status="cancelled", reason="stopped by SIGTERM")
    assert world.durable.newest_checkpoint == 2


def test_r03_a_save_that_does_not_fit_into_the_time_left_is_not_begun() -> None:
    world = saving(new_world(total_steps=4, save_freq=1, evaluate_freq=0).start(), 2)
    world.give(ev.CancelAsked(reason="stopped by SIGTERM", within_s=60))
    mark = len(world.log)
    world.run()
    assert world.core.ended == de.EndRun(status="cancelled", reason="stopped by SIGTERM")
    assert world.durable.newest_checkpoint == 1 and not [d for d in world.log[mark:] if is_start("checkpoint", 2)(d)]


def test_a_stop_that_takes_too_long_ends_the_run_all_the_same() -> None:
    world = new_world(total_steps=4, evaluate_freq=0).start()
    until(world, is_start("train", 1))
    world.processes["train-0"].is_hung = True
    world.give(ev.CancelAsked(reason="stopped by SIGUSR2", within_s=30))
    world.run()
    assert world.core.ended == de.EndRun(status="cancelled", reason="stopped by SIGUSR2")
