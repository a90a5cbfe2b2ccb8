"""The watcher where blocks change hands: what runs, which steps there are, and what was shifted."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.dag import Progress
from pipeline.core.events import Finish, Role, VerdictInfo
from pipeline.wire import WorkerReady
from tests.fakes.watched import DONE, NUM, RUNNING, TICK, Run, shift


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "r")
    yield run
    run.watcher.close()


# --- what runs --------------------------------------------------------------------------------------------------------


def test_between_two_flushes_a_sequence_ages_with_its_engines_iterations(run: Run) -> None:
    a, b, c, *_ = run.core.admit(1)
    run.give("rollout-0", a, b)
    run.give("rollout-1", c)
    run.count("rollout-0", num_iterations=10)
    assert run.ages(Role.ROLLOUT, 0) == pytest.approx(20.0)
    run.close("rollout-0", a, 9, Finish.FLUSH)
    assert run.ages(Role.ROLLOUT, 0) == pytest.approx(9.0 + 10.0), "what is durable is known"
    run.count("rollout-0", num_iterations=5, running=1, waiting=1)
    assert run.ages(Role.ROLLOUT, 0) == pytest.approx(9.0 + 5.0), "the engine has not begun with the last one"
    run.count("rollout-0", num_iterations=5)
    run.watcher.heard(WorkerReady(worker="rollout-0", version=0, pid=1, seconds={}))
    run.give("rollout-1", run.core.admit(2)[0])
    assert run.snapshot().blocks[1].num_running == 2


def test_a_verdict_ages_and_its_length_is_learned(run: Run) -> None:
    ids = run.core.admit(1)
    before = run.snapshot().reward.survival
    for id in ids:
        run.give("rollout-0", id)
        run.close("rollout-0", id, 40, Finish.STOP)
        run.give("reward-2", id)
    run.count("reward-2", num_iterations=3)
    assert run.ages(Role.REWARD, 0) == pytest.approx(3.0 * NUM)
    longest = run.watcher._config.reward.genrm.max_tokens
    for id in ids:
        verdict = VerdictInfo(id=id, score=1.0, failure="", num_tokens=longest)
        run.core.sequences.judge("task of reward-2", verdict)
        run.after(ev.VerdictGiven(task="task of reward-2", verdicts=(verdict,)))
    assert run.snapshot().reward.survival[-2] > before[-2] + 0.05
    assert run.snapshot().reward.crowds == (), "all judged"
    assert run.watcher.metrics(1)["role/reward/finishes_per_s"] == 0.0, "no time has passed"
    run.now += 1.0
    assert run.watcher.metrics(1)["role/reward/finishes_per_s"] == pytest.approx(NUM, rel=0.05)
    assert run.snapshot().rollout.survival != run.watcher.monitor.believed.rollout.survival  # type: ignore[union-attr]


def test_what_runs_on_a_block_that_leaves_waits(run: Run) -> None:
    ids = run.core.admit(1)
    run.give("rollout-0", *ids)
    run.close("rollout-0", ids[0], 7, Finish.FLUSH)
    run.core.blocks.all[0].wanted = Role.REWARD
    del run.core.blocks.held[0]
    run.after()
    seen = run.snapshot()
    assert [b.num_running for b in seen.blocks] == [0, 0, 0, 0]
    assert seen.rollout.crowds[0].num_waiting == NUM - 1 and sum(seen.rollout.crowds[0].ages) == pytest.approx(1.0)
    assert seen.blocks[0].role is Role.REWARD and seen.blocks[0].ready_in_s == pytest.approx(0.2)


def test_what_fits_into_a_cache_is_what_its_engine_says(run: Run) -> None:
    run.watcher.heard(WorkerReady(worker="reward-0", version=0, pid=1, seconds={}, is_asleep=True, kv_tokens=4321))
    assert run.snapshot().reward.kv_tokens == 4321.0 != run.snapshot().rollout.kv_tokens


def test_costs_are_told_once_until_they_change(run: Run) -> None:
    def work(at_s: float, decode_s: float) -> list[ev.Event]:
        run.posted.clear()
        run.now = at_s
        run.count("rollout-0", num_iterations=100, decode_s=decode_s, batch=4.0, context=100.0)
        return list(run.posted)

    first = work(100.0, 1.0)
    assert [type(e) for e in first] == [ev.CostsMeasured] * 2
    assert [e.role for e in first if isinstance(e, ev.CostsMeasured)] == [Role.ROLLOUT, Role.REWARD]
    assert work(101.0, 1.0) == [], "not so often"
    for at_s in range(106, 200, 6):
        settled = work(at_s, 1.0)
    assert settled == [], "nothing new"
    changed = [event for at_s in range(200, 230, 6) for event in work(at_s, 2.0)]
    assert changed and {e.role for e in changed if isinstance(e, ev.CostsMeasured)} == {Role.ROLLOUT}


# --- steps ------------------------------------------------------------------------------------------------------------


def test_the_runs_step_1_is_the_planners_step_0_and_makes_version_1(run: Run) -> None:
    run.core.admit(1)
    run.core.admit(2)
    run.after(at=110.0)
    seen = run.snapshot()
    assert (seen.version, seen.num_admitted) == (0, 2)
    assert [crowd.step for crowd in seen.rollout.crowds] == [0, 1]
    for sequence in run.core.sequences.of_step(1):
        run.give("rollout-0", sequence.id)
        run.close("rollout-0", sequence.id, 5, Finish.STOP)
        run.give("reward-2", sequence.id)
        run.core.sequences.judge("task of reward-2", VerdictInfo(id=sequence.id, score=1.0, failure=""))
    run.core.progress(1, 120.0, rollout=DONE, reward=DONE, batch=RUNNING)
    run.after(at=120.0)
    seen = run.snapshot()
    assert seen.train.is_waiting and seen.train.left_s is None
    assert [crowd.step for crowd in seen.rollout.crowds] == [1]
    run.core.blocks.all[3].wanted = Role.TRAIN
    run.after(at=121.0)
    assert run.snapshot().train.left_s == pytest.approx(1.0 + 0.2), "called: the shift, and the training"
    run.core.bind(Role.TRAIN, 3)
    run.core.progress(1, 122.0, batch=DONE, train=RUNNING)
    run.after(at=122.0)
    run.core.progress(1, 130.0, train=DONE, publish=RUNNING)
    run.after(at=130.0)
    assert run.snapshot().train.left_s is not None, "until its version is there"
    run.core.versions.write(1)
    run.core.versions.seal(1)
    run.after(at=132.0)
    seen = run.snapshot()
    assert (seen.version, seen.train.left_s, seen.train.is_waiting) == (1, None, False)
    assert [crowd.step for crowd in seen.rollout.crowds] == [1]
    assert seen.train.step_s == pytest.approx((0.3 * 1.0 + 10.0) / 1.3, rel=0.1), "from 122 to 132"


def test_a_version_that_is_lost_is_made_again(run: Run) -> None:
    for step in (1, 2):
        run.core.admit(step)
        run.core.progress(step, 105.0, rollout=DONE, reward=DONE, batch=DONE, train=RUNNING)
        run.core.progress(step, 105.0, train=DONE, publish=DONE)
        run.core.versions.write(step)
        run.core.versions.seal(step)
        run.after(at=110.0 + step)
    assert run.snapshot().version == 2
    run.core.versions.reset(1)
    run.core.steps[2].stages["train"] = Progress.PENDING
    run.after(at=120.0)
    seen = run.snapshot()
    assert seen.version == 1 and seen.train.left_s is not None, "it has begun once, and is to begin again"


# --- shifts -----------------------------------------------------------------------------------------------------------


def test_shifts_are_measured_kept_and_counted(run: Run) -> None:
    run.after(ev.PlanMade(number=7, moves=((1, Role.REWARD),)), at=150.0)
    shift(run, 1, Role.ROLLOUT, Role.REWARD)
    shift(run, 3, Role.REWARD, Role.TRAIN)
    first, second = run.lines("shift")
    assert (first["block"], first["old"], first["new"], first["decision"]) == (1, "rollout", "reward", None)
    assert first["down_s"] == {"tasks": 1.5, "release": 0.4, "all": 2.0}
    assert first["up_s"] == {"read": 2.0, "cache": 0.5, "all": 3.0}
    assert (first["aborted"], first["asleep_bytes"], first["awake_bytes"]) == (5, 10, 99)
    assert first["took_s"] == pytest.approx(5.0) and not first["failure"] and second["new"] == "train"
    row = run.watcher.metrics(1)
    assert (row["shift/num"], row["shift/num_rollout_reward"], row["shift/num_train"]) == (2.0, 1.0, 1.0)
    assert (row["shift/down_s"], row["shift/up_s"], row["shift/aborted"]) == (2.0, 3.0, 10.0)
    assert "role/rollout/running" in row and "planner/cycle_s" in row
    assert run.watcher.metrics(2)["shift/num"] == 0.0, "each is of one row"
    assert run.snapshot().shift_s[Role.REWARD] > 2.0, "5 s were measured, .2 s believed"
    assert run.snapshot().last_shift_s == 150.0


def test_a_block_of_which_something_else_is_wanted_on_its_way_makes_one_shift(run: Run) -> None:
    run.core.blocks.all[0].wanted = Role.TRAIN
    del run.core.blocks.held[0]
    run.after(TICK, de.ShiftDown(worker="rollout-0", following=(), version=0), at=150.0)
    run.core.blocks.all[0].wanted = Role.REWARD
    run.after(at=151.0)
    run.core.bind(Role.REWARD, 0)
    run.after(at=152.0)
    (line,) = run.lines("shift")
    assert (line["old"], line["new"], line["took_s"], line["failure"]) == ("rollout", "reward", 2.0, "")
    run.core.blocks.all[0].wanted = Role.ROLLOUT
    run.after(at=160.0)
    run.core.blocks.all[0].wanted = Role.REWARD
    run.after(at=161.0)
    assert run.watcher.metrics(1)["shift/num"] == 1.0, "it has kept its role"


def test_a_plan_that_moves_a_block_is_named_by_its_shift(run: Run) -> None:
    run.core.blocks.all[1].wanted = Role.REWARD
    del run.core.blocks.held[1]
    run.after(ev.PlanMade(number=7, moves=((1, Role.REWARD),)), at=150.0)
    run.core.bind(Role.REWARD, 1)
    run.after(at=151.0)
    assert [line["decision"] for line in run.lines("shift")] == [7]


def test_a_block_that_is_lost_ends_its_shift_and_comes_back_from_nowhere(run: Run) -> None:
    run.core.blocks.all[1].wanted = Role.REWARD
    del run.core.blocks.held[1]
    run.after()
    run.core.blocks.lost.add(1)
    run.core.blocks.all[1].wanted = None
    run.after()
    assert run.snapshot().blocks[1].is_silent
    run.core.blocks.lost.clear()
    run.core.blocks.all[1].wanted = Role.ROLLOUT
    run.after()
    seen = run.snapshot().blocks[1]
    assert (seen.role, seen.is_silent) == (Role.ROLLOUT, False) and seen.ready_in_s > 0
    run.core.bind(Role.ROLLOUT, 1)
    run.after(at=200.0)
    assert run.snapshot().blocks[1].ready_in_s == 0
    lost, back = run.lines("shift")
    assert (lost["failure"], lost["took_s"]) == ("lost", None) and back["old"] is None
    assert run.watcher.metrics(1)["shift/num"] == 0.0 and run.snapshot().shift_s[Role.ROLLOUT] == pytest.approx(0.2)
