"""What slots are used for, added up from what the monitor is told."""

import pytest

from pipeline.core.events import Role
from pipeline.core.reports import (
    BlockBound,
    BlockLost,
    ReplicaReport,
    ShiftBegun,
    ShiftEnded,
    TrainBlocksChosen,
    TrainingBegun,
    TrainingEnded,
)
from pipeline.watching.usage import Usage

SLOTS = {Role.ROLLOUT: 1, Role.REWARD: 4, Role.TRAIN: 4}


def worked(role: Role, at_s: float, decode_s: float, prefill_s: float = 0.0) -> ReplicaReport:
    return ReplicaReport(
        at_s=at_s,
        replica=0,
        block=0,
        role=role,
        num_running=1,
        ages={},
        kv_tokens=0.0,
        decode_s=decode_s,
        prefill_s=prefill_s,
    )


def test_slots_are_counted_while_a_role_has_them_and_not_on_the_way() -> None:
    usage = Usage(SLOTS, 4, now=0.0)
    usage.take([BlockBound(at_s=0.0, block=0, role=Role.ROLLOUT), BlockBound(at_s=0.0, block=1, role=Role.REWARD)])
    usage.take([ShiftBegun(at_s=4.0, block=0, old=Role.ROLLOUT, new=Role.REWARD), ShiftEnded(at_s=5.0, block=0)])
    usage.take([worked(Role.ROLLOUT, 4.0, 3.0, 1.0), worked(Role.REWARD, 10.0, 6.0)])
    found = usage.since(10.0)
    assert (found["alloc/rollout_slots"], found["alloc/reward_slots"]) == pytest.approx((1.6, 6.0))
    assert found["role/rollout/util"] == pytest.approx(4 / 16), "one replica of four that the block holds"
    assert found["role/reward/util"] == pytest.approx(24 / 60)
    assert usage.since(20.0)["alloc/reward_slots"] == pytest.approx(8.0), "it goes on from there"


def test_training_computes_from_its_begin_to_its_end_over_rows() -> None:
    usage = Usage(SLOTS, 4, now=0.0)
    usage.take([TrainBlocksChosen(at_s=0.0, block_indices=(-1,)), BlockBound(at_s=0.0, block=-1, role=Role.TRAIN)])
    usage.take([TrainingBegun(at_s=6.0, step=0)])
    assert usage.since(10.0)["role/train/util"] == pytest.approx(0.4)
    usage.take([TrainingEnded(at_s=12.0, step=0)])
    found = usage.since(20.0)
    assert (found["role/train/util"], found["alloc/train_slots"]) == pytest.approx((0.2, 4.0))


def test_lost_slots_are_nobodys() -> None:
    usage = Usage(SLOTS, 1, now=0.0)
    usage.take([BlockBound(at_s=0.0, block=-1, role=Role.ROLLOUT), BlockLost(at_s=5.0, block=-1)])
    found = usage.since(10.0)
    assert found["alloc/rollout_slots"] == pytest.approx(0.5) and found["role/reward/util"] == 0.0
