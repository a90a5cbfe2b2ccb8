import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.core.errors import RunError
from pipeline.queue import fork
from pipeline.queue.fork import Recorded, fork_queue, recorded
from tests.queue.processes import Server, make_run, prompts, score_all


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_fork_holds_what_was_there_then_and_the_old_queue_stays_as_it_is(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = server.client()
    for step in (1, 2, 3):
        ids = score_all(queue, step)
        queue.commit_batch(step, ids, [], {"queue_depth": step})
        queue.record_step(step, {"a": float(step)})
    queue.admit(prompts(4))
    monkeypatch.setattr(fork, "_WAIT_S", 0.1)
    with pytest.raises(RunError, match="a queue server still has"):
        recorded(server.run.queue)
    server.kill()
    before = contents(server.run.queue)
    assert recorded(server.run.queue) == Recorded(finished=3, begun=4)

    made = make_run(tmp_path / "fork")
    fork_queue(server.run.queue, made.queue, 2)
    assert contents(server.run.queue) == before
    assert recorded(made.queue) == Recorded(finished=2, begun=2)
    forked = Server(made)
    try:
        mine = forked.client()
        assert [row.tokens for row in mine.batch(2)] == [[2, 0], [2, 1], [2, 2], [2, 3]]
        assert mine.step_rows(0) == [(1, {"a": 1.0}), (2, {"a": 2.0})]
        assert mine.batch_parts(1) == {2: {"queue_depth": 2}}
        stats = mine.stats()
        assert (stats["batched"], stats["admitted"], stats["segments"], stats["batches"]) == (8, 0, 8, 2)
        score_all(mine, 3)  # it goes on
    finally:
        forked.kill()


def test_a_run_that_died_before_its_queue_was_made_has_recorded_nothing(tmp_path: Path) -> None:
    run, made = make_run(tmp_path / "run"), make_run(tmp_path / "fork")
    assert recorded(run.queue) == Recorded(0, 0)
    fork_queue(run.queue, made.queue, 0)
    assert recorded(made.queue) == Recorded(0, 0)


def test_an_index_that_was_made_before_a_column_existed_is_served_and_forked(server: Server, tmp_path: Path) -> None:
    ids = score_all(server.client(), 1)
    server.kill()
    with closing(sqlite3.connect(server.run.queue / "index.db")) as db:
        db.execute("ALTER TABLE seg DROP COLUMN kv_version")
    made = make_run(tmp_path / "fork")
    fork_queue(server.run.queue, made.queue, 1)
    for run in (server.run, made):
        again = Server(run)
        try:
            assert [row.kv_versions for row in again.client().get(ids)] == [[0, 0]] * 4
        finally:
            again.kill()
