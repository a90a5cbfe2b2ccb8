"""What abort, update and sampling promise, when the reason is a shift: real workers on one slot, emulated engines."""

import zlib
from typing import Any

import numpy as np

from pipeline import wire
from pipeline.gps.segment import EMULATED_NAME, EMULATED_SIZE
from pipeline.gps.store import Store
from pipeline.wire_shift import Prepare, Sleep, Slept, Wake, WakeFailed
from stages.engines.stream import END_ID, logprob_at, token_at
from stages.serving import seed_of
from tests.slurm.tasks import here
from tests.stages.rollouts import put
from tests.stages.shared_slot import MakeRig, Shared, admit, engine, queue_of

SLOW = {"step_s": 0.02, "median_tokens": 400.0}
NUM_PROMPT = 2


def publish(rig: Shared, version: int) -> None:
    """Weights that no other version has."""

    def write() -> None:
        with here().worker.policy.write(version, 5.0) as writer:
            at = writer.entries[EMULATED_NAME].offset
            np.frombuffer(writer.buffer, np.float32, EMULATED_SIZE, at)[:] = version

    rig.call("train-0", write)
    rig.send(wire.SealVersion(version=version))
    rig.expect(wire.VersionSealed, version=version)


def content(rig: Shared, version: int) -> int:
    """Of the weights that the node's memory shows now."""

    def look() -> int:
        store: Store = here().worker.policy
        with store.read(version, 5.0) as reader:
            return zlib.crc32(reader.buffer)

    return int(rig.call("train-0", look))


def serve(rig: Shared, ids: list[str], turn: int, version: int) -> str:
    job = rig.stage("rollout-0", "rollout", "stages.rollout:rollout", version=version)
    rig.expect(wire.TaskStarted, task=job.job_id)
    rig.send(wire.DispatchTask(worker="rollout-0", task=job.job_id, ids=ids, turns=[turn] * len(ids)))
    return str(job.job_id)


def finish(rig: Shared, ids: list[str], turn: int, version: int) -> None:
    task = serve(rig, ids, turn, version)
    rig.send(wire.EndTask(worker="rollout-0", task=task))
    rig.expect(wire.TaskEnded, task=task)


def expected(row: Any, contents: dict[int, int]) -> list[np.float32]:
    return [
        np.float32(logprob_at(version, contents[version], len(row.prompt_ids) + at, token))
        for at, (token, version) in enumerate(zip(row.tokens, row.versions, strict=True))
    ]


def test_r22_roles_shift_and_each_sequence_comes_back_once_whatever_its_state(make_rig: MakeRig) -> None:
    """Two run, two wait in the engine, of which one has five tokens, and one is still on its way."""
    limits = {"max_response_length": 60, "flush_s": 60.0}
    two_at_once = {"engine": {"name": "emulated", "max_num_seqs": 2, "options": SLOW}}
    rig = make_rig(rollout=limits | two_at_once)
    with queue_of(rig) as queue:
        rig.start_all()
        ids = admit(queue, 5)
        put(queue, ids[3], 1, [40, 41, 42, 43, 44], "abort")
        kept = queue.get([ids[3]])[0]
        rig.up("rollout-0")
        task = serve(rig, ids[:4], 2, 0)
        rig.expect(wire.Counts, worker="rollout-0", running=2, waiting=2)
        rig.heard.clear()
        rig.send(Sleep(worker="rollout-0"))
        rig.send(wire.DispatchTask(worker="rollout-0", task=task, ids=ids[4:], turns=[2]))
        rig.send(Prepare(worker="reward-0", version=0))
        slept = rig.expect(Slept, worker="rollout-0")
        segments = [s for m in rig.heard if isinstance(m, wire.SegmentsClosed) for s in m.segments]
        closed = {s.id: s for s in segments}
        assert len(segments) == len(closed) and {s.finish for s in segments} == {"abort"}
        assert set(closed) in (set(ids), set(ids[:4])), "one that came after the task's end is known to be free by that"
        assert slept.num_aborted == len(closed)
        rows = queue.get(ids)
        assert [row.state for row in rows] == ["admitted"] * 5
        nums = [len(row.tokens) for row in rows]
        assert nums[0] == nums[1] > 0 and nums[2:] == [0, 5, 0]
        assert [closed[id].num_tokens for id in ids[:4]] == [*nums[:2], 0, 0]
        assert (rows[3].tokens, rows[3].logprobs) == (kept.tokens, kept.logprobs)

        rig.up("reward-0")
        rig.down("reward-0")
        rig.up("rollout-0")
        finish(rig, ids, 3, 0)
        for before, row in zip(rows, queue.get(ids), strict=True):
            num = len(before.tokens)
            assert (row.state, row.tokens[:num], row.logprobs[:num]) == ("generated", before.tokens, before.logprobs)
            assert len(row.tokens) == len(row.logprobs) == len(row.versions) == 60


def test_r23_length_stop_and_seed_count_from_the_whole_sequence_over_every_shift(make_rig: MakeRig) -> None:
    """Sequences of three lives each, cut wherever the shifts come; some end by length, some by a stop token."""
    num, most = 8, 64
    rig = make_rig(
        rollout={
            "max_response_length": most,
            "flush_s": 60.0,
            **engine(step_s=0.02, median_tokens=48.0),
        }
    )
    with queue_of(rig) as queue:
        rig.start_all()
        ids = admit(queue, num)
        cuts: dict[str, list[int]] = {id: [0] for id in ids}
        for turn in (1, 2):
            rig.up("rollout-0")
            left = [row.id for row in queue.get(ids) if row.state == "admitted"]
            serve(rig, left, turn, 0)
            rig.expect(wire.Counts, worker="rollout-0")
            rig.down("rollout-0")
            for row in queue.get(left):
                if row.state == "admitted":
                    cuts[row.id].append(len(row.tokens))
            rig.up("reward-0")
            rig.down("reward-0")
        rig.up("rollout-0")
        left = [row.id for row in queue.get(ids) if row.state == "admitted"]
        assert left, "all were done before the last shift: the test shows nothing"
        finish(rig, left, 3, 0)
        rows = queue.get(ids)
    for row in rows:
        assert row.state == "generated" and END_ID not in row.tokens[:-1]
        is_stopped = row.tokens[-1] == END_ID
        assert row.finish == ("stop" if is_stopped else "length")
        assert len(row.tokens) <= most and (is_stopped or len(row.tokens) == most)
        for start, end in zip(cuts[row.id], [*cuts[row.id][1:], len(row.tokens)], strict=True):
            seed = seed_of(rig.config.run.seed, 1, row.id, start)
            said = [token_at(seed, NUM_PROMPT + at, (END_ID,)) for at in range(start, end)]
            assert row.tokens[start:end] == said[: end - start - 1] + [END_ID] * is_stopped or (
                row.tokens[start:end] == said
            )


def test_r18_who_slept_through_updates_answers_with_the_version_it_wakes_with_and_no_other(make_rig: MakeRig) -> None:
    """The same prompts before and after, with caches on; what it held of the old weights is gone."""
    rig = make_rig(rollout={"max_response_length": 8, **engine(median_tokens=400.0)})
    with queue_of(rig) as queue:
        rig.start_all()
        ids, contents = admit(queue, 6), {0: content(rig, 0)}
        rig.up("rollout-0")
        finish(rig, ids[:2], 1, 0)
        rig.down("rollout-0")
        for version in (1, 2, 3):
            publish(rig, version)
        contents[3] = content(rig, 3)
        assert rig.up("rollout-0", version=3).version == 3
        finish(rig, ids[2:4], 1, 3)
        publish(rig, 4)
        contents[4] = content(rig, 4)
        rig.send(wire.LoadVersion(worker="rollout-0", version=4, keep_kv=False, probe=None))
        rig.expect(wire.VersionLoaded, worker="rollout-0", version=4)
        rig.down("rollout-0")
        assert rig.up("rollout-0", version=4).version == 4
        finish(rig, ids[4:], 1, 4)
        rows = queue.get(ids)
    assert [set(row.versions) for row in rows] == [{0}, {0}, {3}, {3}, {4}, {4}]
    assert [set(row.kv_versions) for row in rows] == [{0}, {0}, {3}, {3}, {4}, {4}]
    for row in rows:
        assert [np.float32(logprob) for logprob in row.logprobs] == expected(row, contents)


def test_r21_who_cannot_take_the_version_it_is_woken_with_answers_nothing(make_rig: MakeRig) -> None:
    """It is not awake for anybody until its successor holds the whole of it; a version that comes later is as good."""
    rig = make_rig(
        rollout={"max_response_length": 8, **engine(faults=[{"kind": "refuse", "version": 1}], median_tokens=400.0)}
    )
    with queue_of(rig) as queue:
        rig.start_all()
        ids = admit(queue, 1)
        publish(rig, 1)
        rig.send(Wake(worker="rollout-0", version=1, probe=None))
        assert "version 1 is refused" in rig.expect(WakeFailed, worker="rollout-0").reason
        task = serve(rig, ids, 1, 0)
        closed = rig.expect(wire.SegmentsClosed, task=task).segments
        assert [(s.id, s.num_tokens, s.finish) for s in closed] == [(ids[0], 0, "abort")]
        rig.send(wire.KillWorker(worker="rollout-0", reason="its wake failed"))
        rig.expect(wire.WorkerExited, worker="rollout-0")
        publish(rig, 2)
        rig.start_shared("rollout-0", version=2)
        rig.up("rollout-0", version=2)
        finish(rig, ids, 2, 2)
        (row,) = queue.get(ids)
        assert row.state == "generated" and set(row.versions) == {2}
        assert [np.float32(logprob) for logprob in row.logprobs] == expected(row, {2: content(rig, 2)})
