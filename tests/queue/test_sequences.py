"""The durable life of a sequence: each move, each refusal, each repetition."""

import math
from pathlib import Path

import pytest

from pipeline.core.errors import NotOwner
from pipeline.queue.client import QueueClient
from tests.queue.processes import Server, prompts, segment, verdict


@pytest.fixture
def ids(queue: QueueClient, step: int) -> list[str]:
    """Four admitted sequences that turn 1 owns."""
    rows = prompts(step)
    queue.admit(rows)
    ids = [row.id for row in rows]
    queue.claim(ids, [1] * 4)
    return ids


def test_life_of_a_sequence(shared: Server, queue: QueueClient, step: int) -> None:
    rows = prompts(step)
    queue.admit(rows)
    id = rows[1].id
    (row,) = queue.claim([id], [1])
    for name in ("id", "step", "prompt_no", "member", "text", "data_source", "ground_truth", "prompt_ids"):
        assert getattr(row, name) == getattr(rows[1], name)
    assert (row.state, row.tokens, row.finish, row.num_segments) == ("admitted", [], "", 0)

    queue.put_segments([segment(id, [1, 2], "flush", version=4)])
    queue.put_segments([segment(id, [], "abort", idx=1, version=4)])
    assert queue.get([id])[0].state == "admitted"
    queue.claim([id], [2])
    queue.put_segments([segment(id, [3], "length", idx=2, turn=2, version=5)])
    (row,) = queue.claim([id], [3])
    assert (row.state, row.tokens, row.versions, row.num_segments) == ("generated", [1, 2, 3], [4, 4, 5], 3)
    assert row.logprobs == [-0.125, -0.25, -0.375]
    assert row.finish == "length"

    queue.put_verdicts([verdict(id, 0.5, turn=3)])
    (row,) = queue.get([id])
    assert (row.state, row.score, row.failure, row.critique) == ("scored", 0.5, "", f"ü {id}")
    others = [r.id for r in rows if r.id != id]
    queue.commit_batch(step, [id], [(other, "cancelled") for other in others])
    assert [(r.id, r.state) for r in queue.batch(step)] == [(id, "batched")]
    assert queue.get(others[:1])[0].reason == "cancelled"
    assert queue.commit_trained(step) == (1, 3)
    assert [r.state for r in queue.get([id, *others])] == ["trained", "dropped", "dropped", "dropped"]
    maps = Path(f"/proc/{shared.process.pid}/maps").read_text()
    assert "pyarrow" in maps
    assert "pandas" not in maps, "the server pays 0.5 s and 40 MB for pandas"


def test_rows_come_in_the_order_asked_for(queue: QueueClient, ids: list[str]) -> None:
    queue.put_segments([segment(id, [no] * (no + 1)) for no, id in enumerate(ids)])
    queue.claim(ids[1:3], [2, 2])
    queue.put_verdicts([verdict(ids[2], 0.25), verdict(ids[1], None, "timeout")])
    wanted = [ids[3], ids[1], ids[0], ids[2]]
    rows = queue.get(wanted)
    assert [row.id for row in rows] == wanted
    assert [row.tokens for row in rows] == [[3, 3, 3, 3], [1, 1], [0], [2, 2, 2]]
    assert [row.prompt_ids[0] for row in rows] == [101, 100, 100, 101]
    assert [(row.score, row.failure) for row in rows] == [(None, ""), (None, "timeout"), (None, ""), (0.25, "")]
    assert [row.critique for row in rows] == ["", f"ü {ids[1]}", "", f"ü {ids[2]}"]
    assert queue.get([]) == []


def test_repeating_changes_nothing(queue: QueueClient, step: int, ids: list[str]) -> None:
    segments = [segment(ids[0], [1, 2], "flush"), segment(ids[0], [3], "stop", idx=1), segment(ids[1], [4])]
    for _ in range(2):
        queue.admit(prompts(step))
        queue.put_segments(segments)
    queue.put_segments([*segments, segment(ids[2], [5])])  # what is new in a repeated put is stored
    queue.claim(ids[:1], [2])
    for _ in range(2):
        queue.put_verdicts([verdict(ids[0])])
        queue.put_segments(segments)  # a late repetition of what is durable says so, also to an older owner
    rows = queue.get(ids)
    assert [row.tokens for row in rows] == [[1, 2, 3], [4], [5], []]
    assert [row.num_segments for row in rows] == [2, 1, 1, 0]
    assert [row.state for row in rows] == ["scored", "generated", "generated", "admitted"]


def test_a_repetition_must_be_the_same(queue: QueueClient, step: int, ids: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{ids[0]} was admitted before with another prompt"):
        queue.admit(prompts(step, text="sort 9 8 7"))
    queue.put_segments([segment(ids[0], [1, 2], "flush")])
    with pytest.raises(ValueError, match=f"{ids[0]}: segment 0 does not follow, it has 1 segments"):
        queue.put_segments([segment(ids[0], [1, 2, 3], "flush")])
    queue.put_segments([segment(ids[1], [1])])
    queue.claim(ids[1:2], [2])
    queue.put_verdicts([verdict(ids[1], 1.0)])
    with pytest.raises(ValueError, match=rf"{ids[1]} \(verdict\) is scored, wanted generated"):
        queue.put_verdicts([verdict(ids[1], 0.0)])


def test_only_the_owner_writes(queue: QueueClient, ids: list[str]) -> None:
    queue.claim(ids[:2], [2, 2])
    with pytest.raises(NotOwner, match=f"{ids[1]} belongs to attempt 1 turn 2; attempt 1 turn 1 wrote"):
        queue.put_segments([segment(ids[2], [9]), segment(ids[1], [9])])
    assert queue.get(ids[2:3])[0].num_segments == 0, "part of a refused put was stored"
    with pytest.raises(NotOwner):
        queue.put_segments([segment(ids[2], [9], turn=3)])
    with pytest.raises(NotOwner):
        queue.claim(ids[:1], [1])
    queue.claim(ids[:1], [2])
    queue.put_segments([segment(ids[0], [1], turn=2)])
    queue.claim(ids[:1], [3])
    with pytest.raises(NotOwner):
        queue.put_verdicts([verdict(ids[0], turn=2)])
    assert queue.get(ids[:1])[0].state == "generated"


def test_illegal_moves_name_id_state_and_what_was_wanted(queue: QueueClient, step: int, ids: list[str]) -> None:
    with pytest.raises(ValueError, match=rf"{ids[0]} \(verdict\) is admitted, wanted generated"):
        queue.put_verdicts([verdict(ids[0], turn=1)])
    queue.put_segments([segment(ids[0], [1])])
    with pytest.raises(ValueError, match=rf"{ids[0]} \(segment 1\) is generated, wanted admitted"):
        queue.put_segments([segment(ids[0], [2], idx=1)])
    with pytest.raises(ValueError, match=f"{ids[1]}: segment 1 does not follow, it has 0 segments"):
        queue.put_segments([segment(ids[1], [2], idx=1)])
    with pytest.raises(ValueError, match="1 unknown sequences: nobody"):
        queue.claim([ids[0], "nobody"], [1, 1])
    with pytest.raises(ValueError, match="1 unknown sequences: nobody"):
        queue.get(["nobody", ids[0]])
    with pytest.raises(ValueError, match="2 ids, 1 turns"):
        queue.claim(ids[:2], [1])
    queue.commit_batch(step, [], [(id, "cancelled") for id in ids])
    with pytest.raises(ValueError, match=f"{ids[0]} is dropped, wanted admitted or generated or scored"):
        queue.claim(ids[:1], [2])


def test_lengths_and_values_are_checked(queue: QueueClient, ids: list[str]) -> None:
    row = segment(ids[0], [1, 2, 3])
    row.logprobs.pop()
    with pytest.raises(ValueError, match=f"{ids[0]} segment 0: 3 tokens, 2 logprobs"):
        queue.put_segments([segment(ids[1], [1]), row])
    with pytest.raises(ValueError, match=f"{ids[0]} segment 0: of version 3, from caches of version 4"):
        queue.put_segments([segment(ids[0], [1], version=3, kv_version=4)])
    with pytest.raises(ValueError, match="'over' is not a valid Finish"):
        queue.put_segments([segment(ids[0], [1], "over")])
    assert [r.num_segments for r in queue.get(ids)] == [0, 0, 0, 0]
    queue.put_segments([segment(ids[0], [1])])
    for score, failure in ((None, ""), (1.0, "timeout"), (math.nan, ""), (math.inf, "")):
        with pytest.raises(ValueError, match="a finite score or a failure"):
            queue.put_verdicts([verdict(ids[0], score, failure, turn=1)])


def test_restart_forgets_earlier_turns_of_unfinished_sequences(queue: QueueClient, ids: list[str]) -> None:
    queue.put_segments([segment(ids[0], [1, 2], "flush"), segment(ids[1], [3])])
    kept = queue.claim(ids[:2], [2, 2])
    assert [row.tokens for row in kept] == [[1, 2], [3]]
    rows = queue.claim(ids[:2], [3, 3], restart=True)
    assert [(row.state, row.tokens) for row in rows] == [("admitted", []), ("generated", [3])]
    queue.put_segments([segment(ids[0], [7], "flush", turn=3)])
    assert queue.claim(ids[:1], [3], restart=True)[0].tokens == [7], "a repeated claim took the new turn's tokens"
    with pytest.raises(NotOwner):
        queue.put_segments([segment(ids[0], [1, 2], "flush")])
