"""Workers that share a slot, forked by a real agent: down in the middle of their work, up with other weights."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline import wire
from pipeline.memory import has_gpus
from pipeline.wire_shift import Prepare, Sleep, Slept, Wake, WakeFailed, Woken
from tests.slurm.rig import children, start_order
from tests.slurm.tasks import here
from tests.stages.shared_slot import ROLES, MakeRig, Shared, admit, engine, publish, queue_of

SLOW = {"step_s": 0.01, "median_tokens": 400.0}
MIB = 1 << 20


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """For tests which leave all workers asleep."""
    rig = Shared(tmp_path_factory.mktemp("shared") / "run")
    try:
        yield rig.start_all()
    finally:
        rig.close()


def test_down_in_the_middle_of_a_generation_and_up_with_another_version(make_rig: MakeRig) -> None:
    rig = make_rig(rollout={"max_response_length": 500, "flush_s": 60.0, **engine(**SLOW)})
    with queue_of(rig) as queue:
        rig.start_all()
        ids = admit(queue, 4)
        assert rig.up("rollout-0").version == 0 and rig.awake() == {"rollout-0"}
        job = rig.stage("rollout-0", "rollout", "stages.rollout:rollout")
        rig.expect(wire.TaskStarted, task=job.job_id)
        rig.send(wire.DispatchTask(worker="rollout-0", task=job.job_id, ids=ids, turns=[1] * 4))
        rig.expect(wire.Counts, worker="rollout-0", running=4)
        rig.heard.clear()
        rig.send(Sleep(worker="rollout-0"))
        rig.send(Prepare(worker="reward-0", version=0))
        slept = rig.expect(Slept, worker="rollout-0")
        said = [kind for kind in rig.kinds("rollout-0") if kind != "Counts"]
        assert said == ["SegmentsClosed", "TaskEnded"], "before it slept"
        closed = rig.expect(wire.SegmentsClosed).segments
        assert [(s.id, s.finish, s.version) for s in closed] == [(id, "abort", 0) for id in ids]
        assert rig.result(job)["metrics"]["rollout/num_tokens"] == sum(s.num_tokens for s in closed)
        assert slept.num_aborted == 4 and set(slept.seconds) == {"tasks", "release"} and rig.awake() == set()
        rows = queue.get(ids)
        assert [len(row.tokens) for row in rows] == [s.num_tokens for s in closed] and min(
            s.num_tokens for s in closed
        ) > 0
        assert {row.state for row in rows} == {"admitted"}

        assert rig.up("reward-0").version == 0 and rig.awake() == {"reward-0"}
        rig.down("reward-0")
        publish(rig, 1)
        rig.send(Prepare(worker="rollout-0", version=1))
        woken = rig.up("rollout-0", version=1)
        assert woken.version == 1 and set(woken.seconds) == {"read", "cache"}
        job = rig.stage("rollout-0", "rollout", "stages.rollout:rollout", version=1)
        rig.send(wire.DispatchTask(worker="rollout-0", task=job.job_id, ids=ids, turns=[2] * 4))
        rig.send(wire.EndTask(worker="rollout-0", task=job.job_id))
        rig.result(job)
        for before, row in zip(rows, queue.get(ids), strict=True):
            num = len(before.tokens)
            assert row.state == "generated" and row.tokens[:num] == before.tokens
            assert row.logprobs[:num] == before.logprobs
            assert set(row.versions[:num]) == {0} and set(row.versions[num:]) == {1}


def test_what_is_ordered_before_its_task_has_begun_goes_back(make_rig: MakeRig) -> None:
    """Task, sequences and sleep in one breath: whatever the task has seen of them, all of it is free afterwards."""
    rig = make_rig(rollout={"max_response_length": 500, **engine(**SLOW)})
    with queue_of(rig) as queue:
        rig.start_shared("rollout-0")
        ids = admit(queue, 2)
        for turn in range(1, 6):
            rig.up("rollout-0")
            job = rig.stage("rollout-0", "rollout", "stages.rollout:rollout")
            of_task = {"worker": "rollout-0", "task": job.job_id}
            rig.send(wire.DispatchTask(ids=ids[:1], turns=[turn], **of_task))
            rig.send(Sleep(worker="rollout-0"))
            rig.send(wire.DispatchTask(ids=ids[1:], turns=[turn], **of_task))
            rig.result(job)
            rig.expect(Slept, worker="rollout-0")
            said = [s for m in rig.heard if isinstance(m, wire.SegmentsClosed) for s in m.segments]
            assert {s.finish for s in said} <= {"abort", "flush"} and {s.id for s in said} <= set(ids)
            rig.heard.clear()
        assert {row.state for row in queue.get(ids)} == {"admitted"}


def test_a_slot_is_refused_while_another_is_awake_there(shared: Shared) -> None:
    shared.up("reward-0")
    shared.send(Wake(worker="rollout-0", version=0, probe=None))
    assert shared.expect(WakeFailed, worker="rollout-0").reason == "refused: rollout-0 wants slot 0: reward-0"
    shared.send(start_order("rollout-1", shares=[0, 1]))
    reason = shared.expect(wire.WorkerExited, worker="rollout-1").reason
    assert reason == "refused: rollout-1 wants slot 0: reward-0"
    shared.down("reward-0")
    shared.up("rollout-0")
    assert shared.awake() == {"rollout-0"}
    shared.down("rollout-0")


def test_the_processes_stay_over_50_shifts(shared: Shared) -> None:
    pids = dict(shared.pids)
    assert {b.worker: b.pid for b in shared.last_bindings()} == pids
    zygote = shared.call("rollout-0", os.getppid)
    held = {worker: set() for worker in ROLES}
    for n in range(50):
        worker = list(ROLES)[n % 3]
        shared.up(worker)
        assert shared.awake() == {worker}
        held[worker].add(shared.down(worker).held_bytes >> 22)
        shared.heard[:-1] = []
    assert sorted(children(zygote)) == sorted(pids.values())
    assert {worker: shared.call(worker, os.getpid) for worker in ROLES} == pids
    assert all(max(seen) - min(seen) <= 2 for seen in held.values()), held  # 4 MiB each


def test_prompts_are_made_by_a_sleeper_and_while_it_falls_asleep(shared: Shared) -> None:
    assert shared.result(shared.stage("rollout-0", "prompts", "tests.slurm.tasks:clock"))["at"] < time.monotonic()
    shared.up("rollout-0")
    prompts = shared.stage("rollout-0", "prompts", "tests.slurm.tasks:obey")
    shared.expect(wire.TaskStarted, task=prompts.job_id)
    other = shared.stage("rollout-0", "rollout", "tests.slurm.tasks:obey")
    assert shared.down("rollout-0").num_aborted == 0
    assert shared.result(other)["orders"] == ["leave"]
    shared.send(wire.EndTask(worker="rollout-0", task=prompts.job_id))
    assert shared.result(prompts)["orders"] == ["end"]


def test_a_trainer_saves_while_it_sleeps_and_falls_asleep_after_a_save(shared: Shared) -> None:
    def look() -> bool:
        time.sleep(0.05)
        return bool(here().worker.trainer._is_asleep)

    asleep = shared.result(shared.stage("train-0", "checkpoint", "stages.train:checkpoint"))
    assert asleep["version"] == 0 and Path(asleep["path"], "state.json").exists()
    shared.up("train-0")
    held = shared.stage("train-0", "checkpoint", "tests.slurm.tasks:obey")
    shared.expect(wire.TaskStarted, task=held.job_id)
    waiting = [shared.submit("train-0", look) for _ in range(20)]
    shared.send(Sleep(worker="train-0"))
    shared.send(wire.EndTask(worker="train-0", task=held.job_id))
    shared.expect(Slept, worker="train-0")
    assert [shared.result(job) for job in waiting][-1], "a shift goes before tasks that wait"


def test_a_sleeper_is_not_taken_for_a_dead_one(make_rig: MakeRig) -> None:
    rig = make_rig(limits={"engine_s": 0.5})
    rig.start_all()
    time.sleep(2.0)
    assert {worker: rig.call(worker, os.getpid) for worker in ROLES} == rig.pids


def test_a_sleeper_that_holds_memory_is_killed_and_its_slots_are_free(make_rig: MakeRig) -> None:
    leak = engine(holds_bytes=200 * MIB, faults=[{"kind": "leak", "nth": 2}])
    rig = make_rig(rollout=leak, workers=("rollout-0", "reward-0")).start_all()
    rig.up("rollout-0")
    rig.heard.clear()
    rig.send(Sleep(worker="rollout-0"))
    reason = rig.expect(wire.WorkerExited, worker="rollout-0").reason
    assert reason.startswith("it says that it sleeps, and holds 2") and "rollout-0 on local-0" in reason
    assert "Slept" not in rig.kinds("rollout-0")
    rig.up("reward-0")
    assert [(b.worker, b.is_awake) for b in rig.last_bindings()] == [("reward-0", True)]
    rig.down("reward-0")
    rig.start_shared("rollout-0")


def test_where_devices_are_numbers_alone_the_memory_of_the_host_counts(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_gpus():
        pytest.skip("this machine has GPUs")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as Slurm says it of files that it was told are GPUs
    leak = engine(holds_bytes=200 * MIB, faults=[{"kind": "leak", "nth": 2}])
    rig = make_rig(rollout=leak, workers=("rollout-0",)).start_all()
    assert rig.up("rollout-0").held_bytes > 200 * MIB
    rig.send(Sleep(worker="rollout-0"))
    assert "it says that it sleeps" in rig.expect(wire.WorkerExited, worker="rollout-0").reason


def test_who_is_awake_may_hold_what_its_slots_have(make_rig: MakeRig) -> None:
    rig = make_rig(
        cluster={"slot_memory": 150 * MIB},
        rollout=engine(holds_bytes=200 * MIB),
        workers=("rollout-0", "reward-0"),
    ).start_all()
    rig.up("reward-0")
    rig.down("reward-0")
    rig.send(Wake(worker="rollout-0", version=0, probe=None))
    reason = rig.expect(wire.WorkerExited, worker="rollout-0").reason
    assert reason.startswith("it holds 2") and "cluster.slot_memory is 150 MiB for each of its 1 slots" in reason
    rig.send(start_order("rollout-9"))
    assert rig.expect(wire.WorkerExited, worker="rollout-9").reason.startswith("it holds 2")


def test_a_wake_that_fails_is_said_and_the_slots_stay_taken_until_its_end(make_rig: MakeRig) -> None:
    refuses = engine(faults=[{"kind": "refuse_wake", "nth": 1}])
    rig = make_rig(rollout=refuses, trainer={"options": {"fault": "refuse_wake"}}).start_all()
    for worker in ("rollout-0", "train-0"):
        rig.send(Wake(worker=worker, version=0, probe=None))
        assert "options" in rig.expect(WakeFailed, worker=worker).reason
        rig.send(Wake(worker="reward-0", version=0, probe=None))
        assert rig.expect(WakeFailed, worker="reward-0").reason == f"refused: reward-0 wants slot 0: {worker}"
        rig.send(wire.KillWorker(worker=worker, reason="the test says so"))
        rig.expect(wire.WorkerExited, worker=worker)
    rig.up("reward-0")


def test_a_version_that_is_not_there_wakes_nobody(make_rig: MakeRig) -> None:
    rig = make_rig(workers=("rollout-0",)).start_all()
    rig.send(Prepare(worker="rollout-0", version=7))
    rig.send(Wake(worker="rollout-0", version=7, probe=None))
    assert "does not hold version 7" in rig.expect(WakeFailed, worker="rollout-0").reason


def test_a_sleep_that_fails_ends_the_worker(make_rig: MakeRig) -> None:
    rig = make_rig().start_all()
    for worker in ("rollout-0", "train-0"):
        rig.send(Sleep(worker=worker))  # it sleeps already
        reason = rig.expect(wire.WorkerExited, worker=worker).reason
        assert reason.startswith("exit code 1") and "sleeps" in reason


@pytest.mark.parametrize("point", ["down.begin", "down.aborted", "down.release:2", "up.begin", "up.weights", "up.done"])
def test_a_kill_in_each_phase_is_reported_and_frees_the_slots(
    make_rig: MakeRig, point: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also with a task that serves."""
    monkeypatch.setenv("PIVOT_KILL_POINT", point)
    monkeypatch.setenv("PIVOT_KILL_MARKER", str(tmp_path / "killed"))
    rig = make_rig(workers=("rollout-0", "reward-0")).start_all()
    rig.send(Wake(worker="rollout-0", version=0, probe=None))
    if point.startswith("down"):
        rig.expect(Woken, worker="rollout-0")
        task = rig.stage("rollout-0", "rollout", "tests.slurm.tasks:obey")
        rig.expect(wire.TaskStarted, task=task.job_id)
        rig.send(Sleep(worker="rollout-0"))
    assert rig.expect(wire.WorkerExited, worker="rollout-0").reason.startswith("killed by SIGKILL")
    assert not {"Slept", "Woken"} & set(rig.kinds("rollout-0"))
    rig.up("reward-0")
    assert [(b.worker, b.is_awake) for b in rig.last_bindings()] == [("reward-0", True)]
    rig.down("reward-0")
    rig.start_shared("rollout-0")
    rig.up("rollout-0")
    assert rig.down("rollout-0").num_aborted == 0
