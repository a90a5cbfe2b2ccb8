"""Rollout while weights change: which version made which token, and what becomes of a sequence that was running."""

from typing import Any

from stages.engines.base import Request
from stages.rollout import rollout
from tests.fakes.scripted import (
    FakeTask,
    FakeWorker,
    Running,
    Script,
    ScriptedEngine,
    hosted,
    load,
    make_config,
    wait_until,
)
from tests.stages.rollouts import EOS, PROMPT, admit, serving


def to_twenty(request: Request) -> Script:
    """Token `20 + n` as the n-th of the sequence, wherever it was cut; held at the tenth."""
    num_before = len(request.prompt_ids) - len(PROMPT)
    tokens = [20 + num_before + i for i in range(request.max_tokens)]
    return Script(tokens=tokens, finish="length", hold_after=10)


def test_r22_r23_an_update_closes_the_segment_and_the_sequence_goes_on(queue_client: Any, step: int) -> None:
    """Recompute: the load aborts it; the same task, with the same limits, goes on with it under the new version."""
    ids = admit(queue_client, step, 2)
    scripts = {ids[0]: to_twenty, ids[1]: lambda r: Script(tokens=[9], hold_after=0)}
    with serving(queue_client, step, lambda r: scripts[r.id](r), 3, rollout={"flush_s": 60.0}) as (
        task,
        engine,
        running,
    ):
        task.dispatch(ids, turn=1)
        wait_until(lambda: engine.counts().num_tokens == 10)
        load(task.worker.engine, 4)
        task.wait_for(lambda: len(task.finals()) == 2)
        assert {(s.id, s.version, s.num_tokens, s.finish) for s in task.segments} == {
            (ids[0], 3, 10, "abort"),
            (ids[1], 3, 0, "abort"),
        }
        task.segments.clear()
        engine.released.set()
        task.dispatch(ids, turn=2)
        task.end()
        running.result()
    requests = [r for r in engine.requests if r.id == ids[0]]
    assert [r.max_tokens for r in requests] == [16, 6] and requests[0].seed != requests[1].seed
    assert {(s.id, s.idx, s.version) for s in task.segments} == {(ids[0], 1, 4), (ids[1], 0, 4)}
    row, other = queue_client.get(ids)
    assert row.tokens == list(range(20, 36)) and row.versions == row.kv_versions == [3] * 10 + [4] * 6
    assert other.versions == [4]


def test_tokens_from_kept_caches_are_a_segment_of_their_own(queue_client: Any, step: int) -> None:
    """keep_kv: the request goes on; its tokens say which weights made them and whose caches they saw."""
    ids = admit(queue_client, step, 3)
    scripts = {
        ids[0]: Script(tokens=list(range(20, 36)), finish="length", hold_after=10),
        ids[1]: Script(tokens=[7, EOS], hold_after=0),
        ids[2]: Script(tokens=[8, EOS], hold_after=1),
    }
    with serving(queue_client, step, lambda r: scripts[r.id], 3, rollout={"flush_s": 60.0}) as (task, engine, running):
        task.dispatch(ids)
        wait_until(lambda: engine.counts().num_tokens == 11)
        load(task.worker.engine, 4, keep_kv=True)
        assert task.segments == []
        engine.released.set()
        task.end()
        assert running.result()["metrics"]["rollout/num_tokens"] == 20
    assert len(engine.requests) == 3
    assert sorted((s.id, s.idx, s.version, s.num_tokens, s.finish) for s in task.segments) == [
        (ids[0], 0, 3, 10, "flush"),
        (ids[0], 1, 4, 6, "length"),
        (ids[1], 0, 4, 2, "stop"),
        (ids[2], 0, 3, 1, "flush"),
        (ids[2], 1, 4, 1, "stop"),
    ]
    first, second, third = queue_client.get(ids)
    assert first.tokens == list(range(20, 36))
    assert (first.versions, first.kv_versions) == ([3] * 10 + [4] * 6, [3] * 16)
    assert (second.versions, second.kv_versions) == ([4, 4], [4, 4])
    assert (third.versions, third.kv_versions) == ([3, 4], [3, 3])


def test_an_engine_that_is_ahead_serves_and_its_version_is_what_counts(queue_client: Any, step: int) -> None:
    """The claim was under way when the update came: the task's version is only the lowest one allowed."""
    (id,) = admit(queue_client, step, 1)
    engine = ScriptedEngine(lambda r: Script(tokens=[5, EOS]), version=6)
    with hosted(engine) as host:
        task = FakeTask(FakeWorker(config=make_config(), queue=queue_client, engine=host), step=step, version=4)
        task.dispatch([id])
        task.end()
        Running(rollout, task).result()
    assert [(s.version, s.finish) for s in task.segments] == [(6, "stop")]
    assert queue_client.get([id])[0].versions == [6, 6]
