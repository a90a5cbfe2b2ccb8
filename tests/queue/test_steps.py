"""The durable life of a step: batch, trained, metric row; and what a restart finds."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.core.events import RestoredSequence
from pipeline.queue.client import QueueClient
from tests.queue.processes import Server, prompts, score_all, segment


def test_a_batch_is_all_of_its_step(queue: QueueClient, step: int) -> None:
    ids = score_all(queue, step)
    (foreign,) = prompts(step + 10_000, 1)
    queue.admit([foreign])
    dropped = [(ids[0], "no verdict")]
    with pytest.raises(ValueError, match=rf"step {step} has 4 sequences.*missing \['{ids[3]}'\]"):
        queue.commit_batch(step, ids[1:3], dropped)
    with pytest.raises(ValueError, match=rf"not of this step \['{foreign.id}'\]"):
        queue.commit_batch(step, [*ids[1:], foreign.id], dropped)
    with pytest.raises(ValueError, match="twice 1"):
        queue.commit_batch(step, ids, dropped)
    with pytest.raises(ValueError, match=f"step {step} has no recorded batch"):
        queue.commit_trained(step)
    order = [ids[3], ids[1], ids[2]]
    for _ in range(2):
        queue.commit_batch(step, order, dropped)
    with pytest.raises(ValueError, match="another batch is recorded"):
        queue.commit_batch(step, ids[1:], dropped)
    assert [row.id for row in queue.batch(step)] == order
    for _ in range(2):
        assert queue.commit_trained(step) == (3, 1)
    queue.commit_batch(step, order, dropped)
    assert [row.state for row in queue.get(ids)] == ["dropped", "trained", "trained", "trained"]


def test_all_ranks_get_the_same_batch_and_later_ones_what_became_of_it(shared: Server, step: int) -> None:
    ids = score_all(shared.client(), step)
    other = score_all(shared.client(), step + 1)
    with pytest.raises(ValueError, match=f"step {step} has no recorded batch"):
        shared.client().batch(step)
    shared.client().commit_batch(step, ids, [])
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda client: client.batch(step), [shared.client() for _ in range(6)]))
    assert all(rows == found[0] for rows in found) and [row.id for row in found[0]] == ids
    assert {row.state for row in found[0]} == {"batched"}
    shared.client().commit_batch(step + 1, other, [])
    assert [row.id for row in shared.client().batch(step + 1)] == other
    shared.client().commit_trained(step)
    assert {row.state for row in shared.client().batch(step)} == {"trained"}, "what is kept is not older than that"


def test_only_scored_sequences_are_batched(queue: QueueClient, step: int) -> None:
    ids = score_all(queue, step, 2)
    queue.admit(prompts(step, 3))
    late = prompts(step, 3)[2].id
    with pytest.raises(ValueError, match=f"{late} .* is admitted, wanted scored"):
        queue.commit_batch(step, [*ids, late], [])
    assert [row.state for row in queue.get([*ids, late])] == ["scored", "scored", "admitted"]
    queue.commit_batch(step, ids, [(late, "cancelled")])
    assert queue.commit_trained(step) == (2, 1)


def test_trained_and_dropped_must_be_what_was_submitted(queue: QueueClient, step: int) -> None:
    queue.commit_batch(step, score_all(queue, step, 2), [])
    queue.admit(prompts(step, 3))
    with pytest.raises(ValueError, match=r"2 trained \+ 0 dropped are not 3 submitted"):
        queue.commit_trained(step)
    assert [row.state for row in queue.batch(step)] == ["batched", "batched"]


def test_the_first_row_of_a_step_stays(queue: QueueClient, step: int) -> None:
    assert queue.record_step(step, {"training/global_step": step, "critic/score/mean": 0.5})
    assert not queue.record_step(step, {"critic/score/mean": 0.7})
    assert queue.record_step(step + 10_000, {})
    rows = [row for row in queue.step_rows(step - 1) if row[0] in (step, step + 10_000)]
    assert rows == [(step, {"training/global_step": step, "critic/score/mean": 0.5}), (step + 10_000, {})]
    assert queue.step_rows(step + 10_000) == []


def test_stats_count_states(queue: QueueClient, step: int) -> None:
    before = queue.stats()
    ids = score_all(queue, step)
    after = queue.stats()
    assert after["scored"] - before["scored"] == len(ids)
    assert after["segments"] - before["segments"] == len(ids)
    assert after["syncs"] - before["syncs"] == 3
    assert {"admitted", "generated", "batched", "trained", "dropped", "batches", "steps", "commits"} <= set(after)


@pytest.fixture
def crashed(queue: QueueClient, step: int) -> tuple[list[str], list[str], list[str]]:
    """After checkpoint `step`: one step trained, one recorded, one that is half generated. The ids of each."""
    queue.commit_batch(step, score_all(queue, step), [])
    trained, recorded = score_all(queue, step + 1), score_all(queue, step + 2)
    queue.commit_batch(step + 1, trained[1:], [(trained[0], "no verdict")])
    for done in (step, step + 1):
        queue.commit_trained(done)
    queue.commit_batch(step + 2, recorded[::-1], [])
    rows = prompts(step + 3)
    unfinished = [row.id for row in rows]
    queue.admit(rows)
    queue.claim(unfinished, [1] * 4)
    queue.put_segments([segment(unfinished[0], [1, 2], "flush", version=5), segment(unfinished[1], [3], version=5)])
    queue.put_segments([segment(unfinished[0], [3], "flush", idx=1, version=6)])
    return trained, recorded, unfinished


def test_restore_keeps_what_is_durable(queue: QueueClient, step: int, crashed: tuple[list[str], ...]) -> None:
    trained, recorded, unfinished = crashed
    for _ in range(2):
        steps = [found for found in queue.restore(step, strict=False) if found.step <= step + 3]
        assert [(found.step, found.batched) for found in steps] == [
            (step + 1, True), (step + 2, True), (step + 3, False),
        ]  # fmt: skip
        assert [[s.id for s in found.sequences] for found in steps] == [trained, recorded, unfinished]
        assert [s.state for s in steps[0].sequences] == ["dropped", "batched", "batched", "batched"]
        assert [s.state for s in steps[1].sequences] == ["batched"] * 4
        assert steps[1].sequences[0].score == 1.0
        half, whole = {"num_segments": 2, "num_tokens": 3}, {"num_segments": 1, "num_tokens": 1}
        assert steps[2].sequences[:3] == (
            RestoredSequence(id=unfinished[0], state="admitted", **half, min_version=5, max_version=6),
            RestoredSequence(id=unfinished[1], state="generated", **whole, min_version=5, max_version=5),
            RestoredSequence(id=unfinished[2], state="admitted"),
        )
    assert queue.get([queue.batch(step)[0].id])[0].state == "trained", "the checkpoint's own step was touched"
    assert [row.id for row in queue.batch(step + 2)] == recorded[::-1]
    assert queue.commit_trained(step + 1) == (3, 1)


def test_strict_restore_forgets_unrecorded_steps(queue: QueueClient, step: int, crashed: tuple[list[str], ...]) -> None:
    trained, _, unfinished = crashed
    for _ in range(2):
        steps = queue.restore(step, strict=True)
        assert [(found.step, found.batched) for found in steps if found.step <= step + 3] == [
            (step + 1, True), (step + 2, True),
        ]  # fmt: skip
    assert [row.tokens for row in queue.get(trained)] == [[step + 1, no] for no in range(4)]
    with pytest.raises(ValueError, match="4 unknown"):
        queue.get(unfinished)
    assert score_all(queue, step + 3) == unfinished
    assert [row.num_segments for row in queue.get(unfinished)] == [1, 1, 1, 1]
