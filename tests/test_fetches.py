"""Reads from other nodes: both ends are told the same, and who asked hears of whatever ends it."""

from pathlib import Path

import pytest

from pipeline import wire_gps
from pipeline.copies import Made
from pipeline.fetches import Fetches


@pytest.fixture
def fetches(tmp_path: Path) -> Fetches:
    return Fetches(tmp_path, 2, 9.0)


def ask(fetches: Fetches, number: int, source: str = "a", node: str = "b", life: bytes = b"1") -> dict[str, object]:
    asked = wire_gps.FetchAsked(
        worker=wire_gps.MOVER, ask=number, source=source, store="policy", version=7, want="/w", is_known=number > 1
    )
    return dict(fetches.begin(node, asked, (source.encode() + life if life else b"", node.encode())))


def moved(fetches: Fetches, number: int, *nodes: str) -> None:
    for node in nodes:
        said = wire_gps.Moved(worker=wire_gps.MOVER, number=number, num_bytes=10, seconds=0.5)
        fetches.moved(node, said)


def test_a_pair_is_used_again_while_all_arrives_and_what_came_is_kept(fetches: Fetches) -> None:
    first = ask(fetches, 1)
    assert [(node, move.rank, move.number, move.ask, move.want) for node, move in first.items()] == [
        ("a", 0, -1, 1, "/w"),
        ("b", 1, -1, 1, "/w"),
    ]
    moved(fetches, -1, "b", "a")
    second = ask(fetches, 2)
    assert second["a"].rendezvous == first["a"].rendezvous and second["a"].number == -2
    moved(fetches, -2, "b")
    assert ask(fetches, 3)["a"].rendezvous == first["a"].rendezvous, "what is sent has been received"
    moved(fetches, -3, "a")
    assert ask(fetches, 4)["a"].rendezvous != first["a"].rendezvous, "it has not been received"
    assert list(fetches.made) == [Made(7, "a", "b", 10, 0.5)] * 2
    assert (fetches.num_asked, fetches.num_known) == (4, 3)


def test_another_life_of_an_agent_gets_another_pair(fetches: Fetches) -> None:
    first = ask(fetches, 1)
    moved(fetches, -1, "a", "b")
    assert ask(fetches, 2, life=b"2")["a"].rendezvous != first["a"].rendezvous


def test_who_asked_hears_of_a_source_that_is_not_there_fails_or_is_lost(fetches: Fetches) -> None:
    assert ask(fetches, 1, life=b"")["b"] == _failed(1, "a is not there")
    ask(fetches, 2)
    assert fetches.move_failed("a", -9, "older") == []
    assert fetches.move_failed("a", -1, "no") == [("b", _failed(2, "the mover of a: no"))]
    ask(fetches, 3)
    ask(fetches, 4, source="c")
    assert fetches.node_failed("c", "it is lost") == [("b", _failed(4, "c: it is lost"))]
    moved(fetches, -2, "b")
    assert fetches.node_failed("a", "it is lost") == [], "all had come"


def _failed(number: int, reason: str) -> wire_gps.FetchFailed:
    return wire_gps.FetchFailed(worker=wire_gps.MOVER, ask=number, reason=reason)
