"""Rollout on the real queue and the real engine host, with a scripted engine: R22, R23, R24 and the order of things."""

import time
from typing import Any

import pytest

from pipeline.core.errors import NotOwner, StageFailed
from pipeline.core.events import Finish
from stages.engines.base import Output, Request
from stages.engines.host import EngineHost
from stages.rollout import Rollout, rollout
from stages.serving import GROUP_S
from stages.text import load_tokenizer
from tests.fakes.scripted import (
    FakeTask,
    FakeWorker,
    Running,
    Script,
    ScriptedEngine,
    hosted,
    make_config,
    wait_until,
)
from tests.fakes.tokenizers import make_tokenizer
from tests.stages.rollouts import EOS, PROMPT, admit, put, serving


def test_responses_become_final_segments(queue_client: Any, step: int) -> None:
    ids = admit(queue_client, step, 3)
    scripts = {
        ids[0]: Script(tokens=[10, 11, EOS]),
        ids[1]: Script(tokens=[12] * 16, finish="length"),
        ids[2]: Script(tokens=[EOS]),
    }
    with serving(queue_client, step, lambda r: scripts[r.id], version=4, run={"seed": 9}) as (task, engine, running):
        task.dispatch(ids)
        task.end()
        assert running.result() == {"metrics": {"rollout/num_tokens": 20}}
    finals = task.finals()
    assert {id: (f.num_tokens, f.finish, f.version, f.idx) for id, f in finals.items()} == {
        ids[0]: (3, Finish.STOP, 4, 0),
        ids[1]: (16, Finish.LENGTH, 4, 0),
        ids[2]: (1, Finish.STOP, 4, 0),
    }
    for id, row in zip(ids, queue_client.get(ids), strict=True):
        assert (row.state, row.finish, row.tokens) == ("generated", finals[id].finish, list(scripts[id].tokens))
        assert row.logprobs == [-0.5 - at for at in range(len(row.tokens))]
        assert set(row.versions) == {4}
    assert {tuple(r.prompt_ids) for r in engine.requests} == {tuple(PROMPT)}
    assert {(r.max_tokens, r.temperature, r.stop_ids, r.logprobs) for r in engine.requests} == {(16, 1.0, (EOS,), True)}
    assert len({r.seed for r in engine.requests}) == 3


def test_seeds_depend_on_run_step_sequence_and_tokens_only(queue_client: Any, step: int) -> None:
    (id,) = admit(queue_client, step, 1)
    seeds = []
    for turn, seed in ((1, 9), (2, 9), (3, 10)):
        with serving(queue_client, step, lambda r: Script(tokens=[5], hold_after=0), run={"seed": seed}) as (
            task,
            engine,
            running,
        ):
            task.dispatch([id], turn)
            task.abort([id])
            task.end()
            running.result()
            seeds.append(engine.requests[0].seed)
    assert seeds[0] == seeds[1] != seeds[2]


def test_r22_abort_returns_every_sequence_with_its_tokens_once(queue_client: Any, step: int) -> None:
    """Finished, running with tokens, without tokens: each is reported once, and its tokens are in the queue."""
    ids = admit(queue_client, step, 4)
    scripts = {
        ids[0]: Script(tokens=[10, EOS]),
        ids[1]: Script(tokens=[11] * 16, finish="length", hold_after=5),
        ids[2]: Script(tokens=[12] * 16, finish="length", hold_after=2),
        ids[3]: Script(tokens=[13], hold_after=0),
    }
    with serving(queue_client, step, lambda r: scripts[r.id], rollout={"flush_s": 60.0}) as (task, _, running):
        task.dispatch(ids)
        task.wait_for(lambda: ids[0] in task.finals())
        task.abort(ids)
        task.end()
        assert running.result()["metrics"]["rollout/num_tokens"] == 9
    finals = task.finals()
    assert {id: (f.num_tokens, f.finish) for id, f in finals.items()} == {
        ids[0]: (2, "stop"),
        ids[1]: (5, "abort"),
        ids[2]: (2, "abort"),
        ids[3]: (0, "abort"),
    }
    rows = queue_client.get(ids)
    assert [len(r.tokens) for r in rows] == [2, 5, 2, 0]
    assert [r.num_segments for r in rows] == [1, 1, 1, 0]  # what has no token is reported, not stored
    assert [r.state for r in rows] == ["generated", "admitted", "admitted", "admitted"]


def test_r22_task_that_leaves_returns_all_that_it_has_and_all_that_still_comes(queue_client: Any, step: int) -> None:
    ids = admit(queue_client, step, 4)
    scripts = {
        ids[0]: Script(tokens=[10, EOS]),
        ids[1]: Script(tokens=[11] * 16, finish="length", hold_after=5),
        ids[2]: Script(tokens=[13], hold_after=0),
    }
    with serving(queue_client, step, lambda r: scripts[r.id], version=2, rollout={"flush_s": 60.0}) as (
        task,
        engine,
        running,
    ):
        task.dispatch(ids[:3])
        task.wait_for(lambda: ids[0] in task.finals())
        wait_until(lambda: engine.counts().num_tokens == 7)
        task.leave()
        task.dispatch(ids[3:])
        running.result()
        assert not engine.has_unfinished()
    assert {id: (f.num_tokens, f.finish) for id, f in task.finals().items()} == {
        ids[0]: (2, "stop"),
        ids[1]: (5, "abort"),
        ids[2]: (0, "abort"),
        ids[3]: (0, "abort"),
    }
    assert [(r.state, len(r.tokens)) for r in queue_client.get(ids)] == [
        ("generated", 2),
        ("admitted", 5),
        ("admitted", 0),
        ("admitted", 0),
    ]
    with serving(queue_client, step, lambda r: Script(tokens=[EOS]), version=2) as (other, _, running):
        other.dispatch(ids[1:3], turn=2)
        other.dispatch(ids[3:], turn=2)
        other.end()
        running.result()
    assert {r.state for r in queue_client.get(ids)} == {"generated"}


def test_r23_continuation_counts_from_the_whole_sequence(queue_client: Any, step: int) -> None:
    """At most 16 tokens: 10 before the abort, so 6 remain; tokens go in as they came out."""
    (id,) = admit(queue_client, step, 1)

    def script(request: Request) -> Script:
        num_before = len(request.prompt_ids) - len(PROMPT)
        return Script(tokens=[20 + num_before + i for i in range(request.max_tokens)], finish="length", hold_after=10)

    with serving(queue_client, step, script, rollout={"flush_s": 60.0}) as (task, engine, running):
        task.dispatch([id], turn=1)
        wait_until(lambda: engine.counts().num_tokens == 10)
        task.abort([id])
        task.wait_for(lambda: id in task.finals())
        first = engine.requests[0]
        task.segments.clear()
        engine.released.set()
        task.dispatch([id], turn=2)
        task.end()
        running.result()
    second = engine.requests[1]
    assert second.prompt_ids == [*PROMPT, *range(20, 30)]
    assert (first.max_tokens, second.max_tokens) == (16, 6)
    assert first.seed != second.seed  # the rest must not repeat the beginning's random stream
    (final,) = task.segments
    assert (final.idx, final.num_tokens, final.finish) == (1, 6, "length")
    (row,) = queue_client.get([id])
    assert row.tokens == list(range(20, 36))
    assert (row.num_segments, row.state, len(row.logprobs), len(row.versions)) == (2, "generated", 16, 16)


@pytest.mark.parametrize(
    ("tokens", "finish"), [([7] * 16, Finish.LENGTH), ([7, 7, EOS], Finish.STOP), ([7] * 20, Finish.LENGTH)]
)
def test_r23_rules_that_earlier_tokens_have_met_end_the_sequence(
    queue_client: Any, step: int, tokens: list[int], finish: Finish
) -> None:
    """A killed worker had flushed the last token, and nobody had said that it was the last."""
    (id,) = admit(queue_client, step, 1)
    put(queue_client, id, 1, tokens, "flush")
    with serving(queue_client, step, lambda r: Script(tokens=[9])) as (task, engine, running):
        task.dispatch([id], turn=2)
        task.end()
        running.result()
    assert engine.requests == []
    assert [(s.idx, s.num_tokens, s.finish) for s in task.segments] == [(1, 0, finish)]
    (row,) = queue_client.get([id])
    assert (row.state, row.tokens, row.finish) == ("generated", tokens, finish)


def test_sequence_that_was_put_but_not_reported_is_reported(queue_client: Any, step: int) -> None:
    """Its engine had cut it off, at its own limit."""
    (id,) = admit(queue_client, step, 1)
    put(queue_client, id, 1, [7, 7], "length")
    with serving(queue_client, step, lambda r: Script(tokens=[9])) as (task, engine, running):
        task.dispatch([id], turn=2)
        task.end()
        running.result()
    assert engine.requests == []
    assert [(s.num_tokens, s.finish) for s in task.segments] == [(0, "length")]
    assert queue_client.get([id])[0].tokens == [7, 7]


def test_unfinished_tokens_are_flushed(queue_client: Any, step: int) -> None:
    """And only the new ones: each flush is a segment of its own, and the final one continues the count."""
    ids = admit(queue_client, step, 2)
    script = {ids[0]: Script(tokens=[10, 11, 12, EOS], hold_after=2), ids[1]: Script(tokens=[13, EOS], hold_after=0)}
    with serving(queue_client, step, lambda r: script[r.id], rollout={"flush_s": 0.01}) as (task, engine, running):
        task.dispatch(ids)
        task.wait_for(lambda: sum(s.num_tokens for s in task.segments) == 2)
        assert {(s.id, s.finish) for s in task.segments} == {(ids[0], "flush")}
        durable = queue_client.get(ids)
        assert (durable[0].state, durable[0].tokens, durable[0].finish) == ("admitted", [10, 11], "flush")
        assert durable[1].num_segments == 0  # nothing to flush
        engine.released.set()
        task.end()
        assert running.result()["metrics"]["rollout/num_tokens"] == 6
    of_first = [s for s in task.segments if s.id == ids[0]]
    assert [s.idx for s in of_first] == list(range(len(of_first)))
    assert queue_client.get(ids)[0].tokens == [10, 11, 12, EOS]
    assert {f.finish for f in task.finals().values()} == {"stop"}


def test_strict_mode_keeps_nothing_of_an_interrupted_response(queue_client: Any, step: int) -> None:
    """And what another attempt left behind is forgotten: the response starts again from the prompt, same seed."""
    (id,) = admit(queue_client, step, 1)
    put(queue_client, id, 1, [7, 7], "abort")
    script = Script(tokens=[10, 11, 12, EOS], hold_after=2)
    uncached = {"enable_prefix_caching": False}
    sections = {
        "run": {"determinism": "strict"},
        "model": {"policy": {"dtype": "float32"}, "genrm": {"dtype": "float32"}},
        "rollout": {"flush_s": 0.005, "engine": uncached},
        "reward": {"genrm": {"engine": uncached}},
    }
    with serving(queue_client, step, lambda r: script, **sections) as (task, engine, running):
        task.dispatch([id], turn=2)
        wait_until(lambda: engine.counts().num_tokens == 2)
        time.sleep(0.03)  # several flush periods, in which nothing may be put
        task.abort([id])
        task.wait_for(lambda: id in task.finals())
        assert [(s.num_tokens, s.finish) for s in task.segments] == [(0, "abort")]
        task.segments.clear()
        engine.released.set()
        task.dispatch([id], turn=3)
        task.end()
        running.result()
    first, second = engine.requests
    assert first.seed == second.seed
    assert first.prompt_ids == second.prompt_ids == PROMPT
    (row,) = queue_client.get([id])
    assert (row.tokens, row.num_segments) == ([10, 11, 12, EOS], 1)


def test_r24_ids_are_kept_though_their_text_would_be_other_ids(queue_client: Any, step: int, tmp_path: Any) -> None:
    """The engine samples `a`, `b`, `c` one by one; the tokenizer would write one token for their text."""
    tokenizer = load_tokenizer(str(make_tokenizer(tmp_path)))
    spelt = [i for letter in "abc" for i in tokenizer.encode(letter)]
    assert tokenizer.encode(tokenizer.decode(spelt)) != spelt
    (id,) = admit(queue_client, step, 1)
    engine = ScriptedEngine(lambda r: Script(tokens=[*spelt, *spelt, EOS], hold_after=3))
    with hosted(engine) as host:
        worker = FakeWorker(config=make_config(), queue=queue_client, engine=host, tokenizer=tokenizer)
        task = FakeTask(worker, step=step)
        running = Running(rollout, task)
        task.dispatch([id])
        wait_until(lambda: engine.counts().num_tokens == 3)
        task.abort([id])
        task.wait_for(lambda: bool(task.finals()))
        task.segments.clear()
        task.dispatch([id], turn=2)
        wait_until(lambda: len(engine.requests) == 2)
        assert engine.requests[1].prompt_ids == [*PROMPT, *spelt]
        task.abort([id])
        task.end()
        running.result()
    assert queue_client.get([id])[0].tokens[:3] == spelt


@pytest.mark.parametrize("num_logprobs", [0, 2])
def test_r24_unequal_numbers_of_ids_and_logprobs_stop_the_stage(
    queue_client: Any, step: int, num_logprobs: int
) -> None:
    (id,) = admit(queue_client, step, 1)
    with serving(queue_client, step, lambda r: Script(tokens=[10, EOS], num_logprobs=num_logprobs)) as (
        task,
        _,
        running,
    ):
        task.dispatch([id])
        with pytest.raises(StageFailed, match=f"1 tokens and {num_logprobs} logprobs of {id}"):
            running.result()


def test_refused_request_stops_the_stage_and_names_the_sequence(queue_client: Any, step: int) -> None:
    ids = admit(queue_client, step, 2)
    with serving(queue_client, step, lambda r: Script(tokens=[EOS], is_refused=r.id == ids[1])) as (task, _, running):
        task.dispatch(ids)
        with pytest.raises(StageFailed, match=rf"refused sequence {ids[1]}: prompt of 3 tokens"):
            running.result()


def test_engine_of_an_older_version_gets_nothing(queue_client: Any, step: int) -> None:
    ids = admit(queue_client, step, 1)
    engine = ScriptedEngine(lambda r: Script(tokens=[EOS]), version=3)
    with hosted(engine) as host:
        task = FakeTask(FakeWorker(config=make_config(), queue=queue_client, engine=host), step=step, version=4)
        task.dispatch(ids)
        with pytest.raises(StageFailed, match="is for version 4 or newer, the engine has 3"):
            Running(rollout, task).result()
    assert engine.requests == []


def test_task_that_lost_its_sequences_cannot_write(queue_client: Any, step: int) -> None:
    """Its worker was slow and believed lost: another task claimed the sequence with a later turn."""
    (id,) = admit(queue_client, step, 1)
    with serving(queue_client, step, lambda r: Script(tokens=[10, EOS], hold_after=1)) as (task, engine, running):
        task.dispatch([id], turn=1)
        wait_until(lambda: engine.counts().num_tokens == 1)
        queue_client.claim([id], [2])
        engine.released.set()
        with pytest.raises(NotOwner):
            running.result()
    assert queue_client.get([id])[0].tokens == []
    assert task.segments == []


def test_what_ends_together_is_put_together(queue_client: Any, step: int) -> None:
    """Each put is a synced write: what has ended waits a little for others, but never for nothing."""
    ids = admit(queue_client, step, 3)
    host = EngineHost(ScriptedEngine(lambda r: Script(tokens=[EOS])), lambda counts: None)  # it never runs
    task = FakeTask(FakeWorker(config=make_config(), queue=queue_client, engine=host), step=step)
    service = Rollout(task, task.spec)
    service.dispatch(ids, [1, 1, 1])
    for id in ids[:2]:
        service.take(Output(id=id, version=0, tokens=[EOS], logprobs=[-0.1], finish="stop"))
    now = time.monotonic()
    due = service.settle(now)
    assert due is not None and now - 1.0 < due <= now + GROUP_S
    assert task.num_reports == 0
    service.settle(due)
    assert (task.num_reports, len(task.finals()), service.num_open) == (1, 2, 1)
    service.take(Output(id=ids[2], version=0, tokens=[EOS], logprobs=[-0.1], finish="stop"))
    assert service.settle(now) is None  # nothing runs any more: at once
    assert (task.num_reports, len(task.finals()), service.num_open) == (2, 3, 0)


def test_orders_are_answered_at_once(queue_client: Any, step: int) -> None:
    """No polling period lies between an order and the engine, nor between an output and its report."""
    ids = admit(queue_client, step, 20)
    times = []
    with serving(queue_client, step, lambda r: Script(tokens=[EOS])) as (task, _, running):
        for id in ids:
            start = time.perf_counter()
            task.dispatch([id])
            task.wait_for(lambda id=id: id in task.finals())  # type: ignore[misc]
            times.append(time.perf_counter() - start)
        task.end()
        running.result()
    assert sorted(times)[10] < 0.15  # two calls to the queue, each with a sync; a poll would add its period
