"""Who had which slot when, from the lines that a run leaves; and where the time of the slots went."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.core.events import Role
from pipeline.report.spent import covered, shares, slot_seconds, tail_share
from pipeline.report.timeline import Row, Step, Timeline, bounded, clock_offsets, read_timeline, thinned
from pipeline.watching.book import Book, read_book
from pipeline.watching.slots import DOINGS

CODES = "".join(DOINGS)
_PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


def line(kind: str, at: float, attempt: int = 1, late: float = 0.0, **more: Any) -> dict[str, Any]:
    """The controller's clock was 10 when it was 1,000 in attempt 1, and 20 in attempt 2."""
    return {"kind": kind, "attempt": attempt, "at": at - 1000 + 10 * attempt, "wall": at + late, **more}


def timeline(*lines: dict[str, Any]) -> Timeline:
    return read_timeline(lines, clock_offsets(lines))


def load(at: float, running: float = 0, waiting: float = 0, **more: Any) -> dict[str, Any]:
    return line("load", at, rollout=[running, waiting, 5.0], reward=[1, 2, 3.0], **more)


def row(*changes: tuple[float, str]) -> Row:
    return Row("n0:0", [at for at, _ in changes], [code for _, code in changes])


# --- reading ----------------------------------------------------------------------------------------------------------


def test_changes_of_slots_become_stretches_by_the_time_of_day() -> None:
    found = timeline(
        line("slots", 1001.0, late=0.7, names={"0": "n0:1", "1": "n0:0"}, changes=[[0, 0, "S"], [500, 1, "R"]]),
        load(1002.0),
        line("slots", 1003.0, late=0.5, names={}, changes=[[0, 0, "R"], [250, 1, "r"]]),
        load(1005.0, late=0.01),
    )
    assert [(r.name, r.times, r.codes) for r in found.rows] == [
        ("n0:0", [1001.5, 1003.25, 1005.0], ["R", "r", "."]),
        ("n0:1", [1001.0, 1003.0, 1005.0], ["S", "R", "."]),
    ]
    assert (found.began, found.ended) == (1001.0, 1005.0) and found.load_times == [1002.0, 1005.0]
    assert found.loads[Role.ROLLOUT].tokens_per_s == [5.0, 5.0] and found.loads[Role.REWARD].waiting == [2, 2]


def test_an_attempt_that_was_killed_ends_with_its_last_sign_and_the_next_goes_on() -> None:
    found = timeline(
        line("slots", 1000.0, names={"0": "n0:0"}, changes=[[0, 0, "R"]]),
        load(1004.0),
        line("slots", 1100.0, attempt=2, names={"0": "n0:1", "1": "n0:0"}, changes=[[0, 0, "J"], [0, 1, "T"]]),
        load(1107.0, attempt=2),
    )
    assert [(r.name, list(r.spans())) for r in found.rows] == [
        ("n0:0", [(1000.0, 1004.0, "R"), (1004.0, 1100.0, "."), (1100.0, 1107.0, "T")]),
        ("n0:1", [(1100.0, 1107.0, "J")]),
    ]
    assert found.attempts == [(1000.0, 1004.0), (1100.0, 1107.0)]


def test_a_step_has_its_spans_and_lengths() -> None:
    told = {"step": 4, "spans": [["rollout", -2500, -500]], "lengths": {"rollout": {"12": 3}, "reward": {}}}
    (step,) = timeline(line("step", 1010.0, **told)).steps.values()
    assert step == Step(
        number=4,
        recorded=1010.0,
        spans=[("rollout", 1007.5, 1009.5)],
        lengths={Role.ROLLOUT: {12: 3}, Role.REWARD: {}},
    )


def test_slots_of_a_node_stand_in_their_order() -> None:
    names = {str(i): name for i, name in enumerate(("a:10", "b:0", "a:2", "a:1"))}
    found = timeline(line("slots", 1000.0, names=names, changes=[[0, i, "R"] for i in range(4)]), load(1001.0))
    assert [r.name for r in found.rows] == ["a:1", "a:2", "a:10", "b:0"]


def test_lines_that_are_torn_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    path.write_text(json.dumps(load(1001.0)) + "\n" + json.dumps(load(1002.0))[:20])
    Book(path, 1, print).write("load", 1002.0, {"rollout": [0, 0, 0], "reward": [0, 0, 0]})
    assert len(list(read_book(path))) == 2
    assert timeline().rows == [] and timeline().began == 0.0


# --- thinning ---------------------------------------------------------------------------------------------------------


def test_short_stretches_give_way_to_those_before_them() -> None:
    whole = row((0.0, "R"), (5.0, "X"), (5.2, "J"), (9.0, "j"), (9.1, "J"), (12.0, "."))
    found = thinned(whole, 0.5)
    assert list(found.spans()) == [(0.0, 5.2, "R"), (5.2, 12.0, "J")]
    assert list(thinned(whole, 0.0).spans()) == list(whole.spans())


@_PATIENT
@given(st.lists(st.floats(0.01, 3.0), min_size=1, max_size=60), st.integers(4, 40))
def test_rows_are_bounded_and_keep_their_ends(lengths: list[float], most: int) -> None:
    times = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    whole = Row("n0:0", times, [CODES[i % 3] for i in range(len(times))])
    (found,) = bounded([whole], most)
    assert len(found.times) <= max(most, 3) and found.times == sorted(found.times)
    assert (found.times[0], found.times[-1]) == (times[0], times[-1])


# --- where the time went ----------------------------------------------------------------------------------------------


def test_seconds_of_slots_are_counted_between_edges() -> None:
    rows = [row((0.0, "R"), (6.0, "r"), (10.0, ".")), row((2.0, "J"), (10.0, "."))]
    found = {code: list(seconds) for code, seconds in slot_seconds(rows, [0.0, 5.0, 10.0, 12.0]).items()}
    assert {code: values for code, values in found.items() if any(values)} == {
        "R": [5.0, 1.0, 0.0],
        "r": [0.0, 4.0, 0.0],
        "J": [3.0, 5.0, 0.0],
        ".": [2.0, 0.0, 4.0],
    }


@_PATIENT
@given(st.lists(st.lists(st.tuples(st.integers(1, 40), st.sampled_from(CODES)), max_size=20), min_size=1, max_size=5))
def test_every_second_of_every_slot_is_somewhere(slots: list[list[tuple[int, str]]]) -> None:
    rows = []
    for i, changes in enumerate(slots):
        made, at = Row(f"n0:{i}"), 0.0
        for length, code in changes:
            made.change(at, code)
            at += length / 4
        made.change(at, ".")
        rows.append(made)
    edges = [0.0, 1.0, 4.5, 30.0, 300.0]
    found = slot_seconds(rows, edges)
    for i, (a, b) in enumerate(pairwise(edges)):
        assert sum(seconds[i] for seconds in found.values()) == pytest.approx(len(rows) * (b - a))
        assert min(seconds[i] for seconds in found.values()) >= -1e-9


def test_what_is_even_in_itself_is_shared_out_by_time() -> None:
    import numpy as np

    starts, ends, rates = (np.asarray(v, dtype=float) for v in ([0, 4], [8, 6], [1, 10]))
    assert list(covered(starts, ends, rates, np.asarray([0.0, 5.0, 6.0, 20.0]))) == [15.0, 11.0, 2.0]


def test_shares_leave_the_start_out() -> None:
    steps = {n: Step(number=n, recorded=10.0 * n, spans=[], lengths={}) for n in (1, 2, 3)}
    rows = [row((0.0, "S"), (10.0, "R"), (25.0, "r"), (30.0, "."))]
    found = shares(Timeline(rows=rows, steps=steps, attempts=[(0.0, 30.0)]))
    assert {code: share for code, share in found.items() if share} == {"R": 0.75, "r": 0.25}
    assert shares(Timeline()) == {}


def test_the_tail_is_the_time_in_which_few_are_left() -> None:
    times = [float(t) for t in range(11)]
    running = [100.0, 100, 100, 50, 20, 9, 9, 1, 100, 100, 0]
    lines = [load(1000 + t, running=num) for t, num in zip(times, running, strict=True)]
    spans = [["rollout", -10000, -1000]]
    found = timeline(*lines, line("step", 1010.0, step=1, spans=spans, lengths={}))
    assert tail_share(found) == pytest.approx(0.3)
    waits = [load(1000 + t, running=num, waiting=5) for t, num in zip(times, running, strict=True)]
    assert tail_share(timeline(*waits, line("step", 1010.0, step=1, spans=spans, lengths={}))) == 0.0
    assert tail_share(Timeline()) is None
