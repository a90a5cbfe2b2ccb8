"""What the monitor makes of reports, by hand; whole simulations are in tests/simulator/test_observe.py."""

from dataclasses import replace

import pytest

from pipeline.core.events import Role
from pipeline.core.iteration import IterationCost
from pipeline.core.monitor import Monitor
from pipeline.core.reports import (
    BlockBound,
    BlockHeard,
    BlockLost,
    QueueReport,
    ReplicaEnded,
    ReplicaReport,
    SequencesEnded,
    ShiftBegun,
    ShiftEnded,
    StepAdmitted,
    StepProgress,
    TrainBlocksChosen,
    TrainingBegun,
    TrainingCalled,
    TrainingEnded,
    VersionPublished,
)
from pipeline.core.snapshot import BlockView, Crowd, RoleView, Snapshot, TrainView

COST = IterationCost(weights_s=4e-3, kv_s=2e-9, compute_s=1e-5, prefill_s=1e-5, overhead_s=2e-3, per_sequence_s=1e-5)
NUM_SEQUENCES = 8


def role_view(cost: IterationCost = COST) -> RoleView:
    return RoleView(
        num_slots=1,
        cost=cost,
        kv_tokens=1000.0,
        max_num_seqs=16,
        prompt_tokens=100.0,
        prefill_tokens=50.0,
        bin_tokens=10,
        survival=(1.0, 0.5, 0.25, 0.1, 0.0),
        crowds=(),
    )


def believed() -> Snapshot:
    """Block 2 of three trains."""
    return Snapshot(
        at_s=0.0,
        version=0,
        staleness=1,
        num_sequences=NUM_SEQUENCES,
        num_admitted=0,
        num_steps=10,
        blocks=tuple(BlockView(index=i, node=i // 2, role=None) for i in range(3)),
        block_slots=1,
        rollout=role_view(),
        reward=role_view(),
        train=TrainView(block_indices=(2,), step_s=40.0),
        shift_s={Role.ROLLOUT: 2.0, Role.REWARD: 3.0, Role.TRAIN: 4.0},
        release_s=5.0,
    )


def monitor() -> Monitor:
    """Block 0 rolls out, 1 judges, 2 trains; step 0 is admitted."""
    watched = Monitor(believed())
    for block, role in enumerate(Role):
        watched.feed(BlockBound(at_s=0.0, block=block, role=role))
    watched.feed(StepAdmitted(at_s=0.0, step=0))
    return watched


def report(at_s: float = 1.0, **changes: object) -> ReplicaReport:
    base = ReplicaReport(
        at_s=at_s,
        replica=0,
        block=0,
        role=Role.ROLLOUT,
        num_running=3,
        ages={0: (1.0, 2.0, 0.0, 0.0)},
        kv_tokens=345.0,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def queue(at_s: float, role: Role, fresh: dict[int, int], ages: dict[int, tuple[float, ...]]) -> QueueReport:
    return QueueReport(at_s=at_s, role=role, num_fresh=fresh, ages=ages)


def block(watched: Monitor, index: int, now: float) -> BlockView:
    return watched.snapshot(now).blocks[index]


# --- counts ----------------------------------------------------------------------------------------------------------


def test_what_is_believed_is_what_is_seen_at_first() -> None:
    assert Monitor(believed()).snapshot(0.0) == believed()


def test_crowds_are_what_runs_and_what_was_aborted() -> None:
    watched = monitor()
    watched.feed(report(), report(replica=1, ages={0: (0.0, 0.0, 0.5, 0.5)}, num_running=1))
    watched.feed(queue(1.0, Role.ROLLOUT, {0: 3}, {0: (0.0, 1.0, 0.0, 0.0)}))
    seen = watched.snapshot(1.0)
    assert seen.rollout.crowds == (Crowd(step=0, num_waiting=3, ages=(1.0, 3.0, 0.5, 0.5)),)
    assert seen.reward.crowds == (Crowd(step=0, num_waiting=0, ages=(0.0,) * 4),)
    assert (seen.blocks[0].num_running, seen.blocks[0].num_tokens) == (4, 690.0)


def test_a_report_replaces_the_one_before() -> None:
    watched = monitor()
    watched.feed(report(1.0), report(2.0, num_running=1, ages={0: (0.0, 0.0, 0.0, 1.0)}))
    watched.feed(queue(1.0, Role.ROLLOUT, {0: 5}, {}), queue(2.0, Role.ROLLOUT, {}, {}))
    assert watched.snapshot(2.0).rollout.crowds == (Crowd(step=0, num_waiting=0, ages=(0.0, 0.0, 0.0, 1.0)),)


def test_a_step_has_a_crowd_until_all_of_it_is_judged() -> None:
    watched = monitor()
    watched.feed(StepAdmitted(at_s=1.0, step=1))

    def steps() -> list[int]:
        return [crowd.step for crowd in watched.snapshot(1.0).reward.crowds]

    assert steps() == [0, 1]
    watched.feed(StepProgress(at_s=1.0, step=0, num_rolled_out=NUM_SEQUENCES, num_scored=NUM_SEQUENCES - 1))
    assert steps() == [0, 1] and not watched.snapshot(1.0).train.is_waiting
    watched.feed(StepProgress(at_s=1.0, step=0, num_rolled_out=NUM_SEQUENCES, num_scored=NUM_SEQUENCES))
    assert steps() == [1] and watched.snapshot(1.0).train.is_waiting
    watched.feed(VersionPublished(at_s=2.0, version=1))
    assert steps() == [1] and not watched.snapshot(2.0).train.is_waiting


# --- blocks, shifts, silence -----------------------------------------------------------------------------------------


def test_a_shift_empties_its_block_and_takes_what_shifts_took() -> None:
    watched = monitor()
    watched.feed(report(1.0), ShiftBegun(at_s=2.0, block=0, old=Role.ROLLOUT, new=Role.REWARD))
    seen = block(watched, 0, 3.0)
    assert (seen.role, seen.num_running, seen.ready_in_s) == (Role.REWARD, 0, 2.0)
    assert watched.snapshot(3.0).last_shift_s == 2.0
    assert block(watched, 0, 9.0).ready_in_s == pytest.approx(0.3), "overdue: soon"
    watched.feed(ShiftEnded(at_s=9.0, block=0))
    assert block(watched, 0, 9.0).ready_in_s == 0.0
    assert 3.0 < watched.snapshot(9.0).shift_s[Role.REWARD] < 7.0, "7 s were measured, 3 s were believed"
    for at_s in range(10, 110, 10):
        watched.feed(ShiftBegun(at_s=at_s, block=0, old=Role.ROLLOUT, new=Role.REWARD))
        watched.feed(ShiftEnded(at_s=at_s + 1.0, block=0))
    seen_s = watched.snapshot(110.0).shift_s
    assert seen_s[Role.REWARD] < 2.5 and seen_s[Role.ROLLOUT] == 2.0


def test_what_leaves_training_takes_longer() -> None:
    watched = monitor()
    watched.feed(ShiftBegun(at_s=0.0, block=2, old=Role.TRAIN, new=Role.ROLLOUT))
    assert block(watched, 2, 1.0).ready_in_s == 2.0 + 5.0 - 1.0
    watched.feed(ShiftEnded(at_s=13.0, block=2))
    seen = watched.snapshot(13.0)
    assert seen.shift_s[Role.ROLLOUT] == 2.0 and 5.0 < seen.release_s < 11.0
    assert seen.last_shift_s is None, "not between the inference roles"


def test_a_node_that_comes_back_is_no_shift() -> None:
    watched = monitor()
    watched.feed(ShiftBegun(at_s=0.0, block=0, old=None, new=Role.ROLLOUT), ShiftEnded(at_s=60.0, block=0))
    assert watched.snapshot(60.0).shift_s == believed().shift_s


def test_a_report_older_than_the_shift_brings_nothing_back() -> None:
    watched = monitor()
    watched.feed(ShiftBegun(at_s=2.0, block=0, old=Role.ROLLOUT, new=Role.REWARD))
    watched.feed(report(1.9), report(2.1))
    seen = watched.snapshot(2.1)
    assert seen.blocks[0].num_running == 0 and sum(seen.rollout.crowds[0].ages) == 0


def test_silence_is_a_signal_and_its_counts_stay() -> None:
    watched = monitor()
    watched.feed(report(1.0), BlockHeard(at_s=1.0, block=1))
    assert not block(watched, 0, 6.0).is_silent
    watched.feed(BlockHeard(at_s=6.0, block=1))
    seen = watched.snapshot(6.1)
    assert [b.is_silent for b in seen.blocks] == [True, False, True]
    assert seen.blocks[0].num_running == 3 and sum(seen.rollout.crowds[0].ages) == 3
    watched.feed(report(7.0))
    assert not block(watched, 0, 7.0).is_silent


def test_a_lost_block_is_silent_at_once_and_empty() -> None:
    watched = monitor()
    watched.feed(report(1.0), BlockLost(at_s=1.0, block=0))
    seen = watched.snapshot(1.0)
    assert seen.blocks[0].is_silent and seen.blocks[0].num_running == 0 and sum(seen.rollout.crowds[0].ages) == 0
    watched.feed(ShiftBegun(at_s=9.0, block=0, old=None, new=Role.ROLLOUT))
    assert not block(watched, 0, 9.0).is_silent


def test_a_replica_that_ended_leaves_its_block_to_the_next() -> None:
    watched = monitor()
    watched.feed(report(1.0), ReplicaEnded(at_s=2.0, replica=0, role=Role.ROLLOUT), report(3.0, replica=7))
    assert block(watched, 0, 3.0).num_running == 3


# --- training and versions -------------------------------------------------------------------------------------------


def test_training_called_begun_ended() -> None:
    watched = monitor()
    assert watched.snapshot(0.0).train.left_s is None
    watched.feed(ShiftBegun(at_s=1.0, block=2, old=Role.ROLLOUT, new=Role.TRAIN), TrainingCalled(at_s=1.0, step=0))
    assert watched.snapshot(2.0).train.left_s == 3.0 + 40.0
    watched.feed(ShiftEnded(at_s=5.0, block=2), TrainingBegun(at_s=5.0, step=0))
    assert watched.snapshot(15.0).train.left_s == 30.0
    assert watched.snapshot(95.0).train.left_s == pytest.approx(0.8), "overdue: soon"
    watched.feed(TrainingEnded(at_s=105.0, step=0))
    seen = watched.snapshot(105.0).train
    assert seen.left_s is None and 80.0 < seen.step_s < 100.0, "100 s were measured, 40 s believed: the belief fades"


def test_half_the_blocks_train_twice_as_long() -> None:
    watched = Monitor(replace(believed(), train=TrainView(block_indices=(1, 2), step_s=40.0)))
    watched.feed(TrainBlocksChosen(at_s=1.0, block_indices=(2,)))
    assert watched.snapshot(1.0).train == TrainView(block_indices=(2,), step_s=80.0)


def test_a_cycle_is_the_mean_of_the_last_two_intervals() -> None:
    watched = monitor()
    seen = []
    for version, at_s in enumerate([100.0, 120.0, 200.0, 230.0], 1):
        watched.feed(VersionPublished(at_s=at_s, version=version))
        seen.append(watched.snapshot(at_s).cycle_s)
    assert seen == [0.0, 20.0, 50.0, 55.0]


# --- what is measured ------------------------------------------------------------------------------------------------


def test_prompts_and_prefill_are_measured_in_reports() -> None:
    watched = monitor()
    work = report(num_iterations=100, decode_s=1.0, batch=3.0, context=300.0, prefill_tokens=4e5, prefill_s=8.0)
    watched.feed(replace(work, num_started=1000, started_tokens=4e5, started_prefill_tokens=1e5))
    seen = watched.snapshot(1.0).rollout
    assert seen.prompt_tokens == pytest.approx(400.0, rel=0.02)
    assert seen.prefill_tokens == pytest.approx(100.0, rel=0.02)
    assert seen.cost.prefill_s == pytest.approx(2e-5, rel=0.01), "twice the belief"
    assert seen.cost.weights_s > COST.weights_s
    assert watched.snapshot(1.0).reward.cost == COST


def test_figures_count_rates_and_caches() -> None:
    watched = monitor()
    for at_s in range(1, 301):
        watched.feed(report(at_s, num_iterations=50, decode_s=1.0, batch=3.0, context=300.0))
        watched.feed(SequencesEnded(at_s=at_s, role=Role.ROLLOUT, step=0, lengths=(12.0, 31.0)))
    found = watched.figures(300.0)
    assert found["role/rollout/tokens_per_s"] == pytest.approx(150.0, rel=0.03)
    assert found["role/rollout/finishes_per_s"] == found["role/reward/arrivals_per_s"]
    assert found["role/rollout/finishes_per_s"] == pytest.approx(2.0, rel=0.03)
    assert (found["role/rollout/kv_use"], found["role/rollout/running"]) == (0.345, 3)
    assert watched.lengths(Role.ROLLOUT) == pytest.approx((32.0, 316.0, 9.6, 306.4)), "64 sequences were believed"
    assert list(watched.iteration_table(Role.ROLLOUT)) == [(2, 256)]
