"""Copies between nodes: one event for each, and a pair of its own after whatever went wrong."""

from pathlib import Path

import msgspec
import pytest

from pipeline import wire_gps
from pipeline.copies import Copies
from pipeline.core import decisions as de
from pipeline.core import events as ev

LIVES = {"a": b"a-1", "b": b"b-1", "c": b"c-1"}


def moved(copies: Copies, node: str, number: int) -> list[ev.Event]:
    return copies.moved(node, wire_gps.Moved(worker=wire_gps.MOVER, number=number, num_bytes=100 * number, seconds=0.5))


class Told(Copies):
    """`told`: the rendezvous of each copy, by number."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, 3, 9.0)
        self.told: dict[int, str] = {}

    def start(self, number: int, source: str = "a", node: str = "b", **lives: bytes) -> dict[str, wire_gps.Move]:
        known = LIVES | lives
        copy = de.CopyVersion(number=number, version=10 + number, source=source, node=node, is_first=number == 1)
        moves = self.begin(copy, (known[source], known[node]))
        self.told[number] = moves[source].rendezvous
        return moves

    def finish(self, number: int, source: str = "a", node: str = "b") -> None:
        assert moved(self, node, number) == [ev.VersionCopied(number=number, node=node)]
        assert moved(self, source, number) == []


@pytest.fixture
def copies(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_both_ends_are_told_the_same(copies: Told, tmp_path: Path) -> None:
    moves = copies.start(1)
    assert list(moves) == ["a", "b"]
    assert moves["a"] == wire_gps.Move(
        worker=wire_gps.MOVER,
        number=1,
        pair="a>b",
        rank=0,
        rendezvous=str(tmp_path / "move-3-1"),
        version=11,
        is_first=True,
        limit_s=9.0,
    )
    assert moves["b"] == msgspec.structs.replace(moves["a"], rank=1)


def test_a_pair_is_used_again_while_it_works(copies: Told) -> None:
    copies.start(1)
    copies.start(2, "b", "c")
    copies.finish(1)
    copies.finish(2, "b", "c")
    copies.start(3)
    copies.start(4, "b", "a")  # the other way round it is another one
    assert copies.told[3] == copies.told[1]
    assert len({copies.told[n] for n in (1, 2, 4)}) == 3


def test_a_pair_whose_sender_has_not_said_that_it_is_through_is_not_used_again(copies: Told) -> None:
    copies.start(1)
    assert moved(copies, "b", 1)
    copies.start(2)
    assert copies.told[2] != copies.told[1]
    assert copies.move_failed("a", 1, "the receiver went") == []  # what is of the old one does not touch the new one
    copies.finish(2)


@pytest.mark.parametrize("end", ["a", "b"])
def test_a_failure_of_either_end_is_told_once_and_ends_the_pair(copies: Told, end: str) -> None:
    copies.start(1)
    Path(copies.told[1]).touch()
    failed = copies.move_failed(end, 1, "a wire broke")
    assert failed == [ev.CopyFailed(number=1, node="b", reason=f"the mover of {end}: a wire broke")]
    assert copies.move_failed("ab".replace(end, ""), 1, "the other went") == []
    assert moved(copies, "b", 1) == [] == copies.mover_ended(end, "it went")
    assert not Path(copies.told[1]).exists()
    copies.start(2)
    assert copies.told[2] != copies.told[1]
    copies.finish(2)


def test_a_failure_after_the_receiver_was_through_is_no_event_but_ends_the_pair(copies: Told) -> None:
    copies.start(1)
    assert moved(copies, "b", 1)
    assert copies.move_failed("a", 1, "it went too early") == []
    copies.start(2)
    assert copies.told[2] != copies.told[1]


def test_the_end_of_a_mover_fails_what_it_sends_and_receives(copies: Told) -> None:
    copies.start(1)
    copies.start(2, "b", "c")
    copies.start(3, "c", "a")
    failed = copies.mover_ended("b", "killed")
    assert [(f.number, f.node) for f in failed if isinstance(f, ev.CopyFailed)] == [(1, "b"), (2, "c")]
    copies.finish(3, "c", "a")
    assert copies.mover_ended("c", "killed") == []  # its pair was idle, and is gone
    copies.start(4, "c", "a")
    assert copies.told[4] != copies.told[3]


def test_a_lost_node_fails_what_it_sent_and_nothing_is_said_of_what_it_was_sent(copies: Told) -> None:
    copies.start(1)
    copies.start(2, "b", "c")
    assert copies.node_lost("b", "silent") == [ev.CopyFailed(number=2, node="c", reason="b is lost: silent")]
    assert moved(copies, "c", 2) == [] == copies.move_failed("a", 1, "nobody there")
    assert copies.ends("b") == ()


def test_a_new_copy_to_a_node_takes_the_place_of_the_one_before(copies: Told) -> None:
    copies.start(1)
    copies.start(2, "c", "b")
    assert copies.ends("b") == ("c", "b")
    assert moved(copies, "b", 1) == [] == copies.move_failed("a", 1, "nobody there")
    copies.finish(2, "c", "b")


def test_another_life_of_a_node_gets_another_pair(copies: Told) -> None:
    copies.start(1)
    copies.finish(1)
    copies.start(2, b=b"b-2")
    assert copies.told[2] != copies.told[1]
    copies.finish(2)
    copies.start(3, b=b"b-2")
    assert copies.told[3] == copies.told[2]


def test_the_ends_of_a_copy_are_known_while_it_is_on_its_way(copies: Told) -> None:
    assert copies.ends("b") == ()
    copies.start(1)
    copies.start(2, "b", "c")
    assert copies.ends("b") == ("a", "b") and copies.ends("c") == ("b", "c") and copies.ends("a") == ()
    assert moved(copies, "b", 1)
    assert copies.ends("b") == ()


def test_a_mover_that_goes_on_with_a_copy_that_is_over_is_found_once(copies: Told) -> None:
    copies.start(1)
    assert copies.node_lost("b", "silent") == [] and copies.overdue(0.0, 2.0) == []
    assert copies.overdue(1.9, 2.0) == [] and copies.overdue(2.1, 2.0) == ["a"] and copies.overdue(9.0, 2.0) == []


def test_a_mover_that_says_so_or_ends_is_not_looked_for(copies: Told) -> None:
    copies.start(1)
    copies.node_lost("b", "silent")
    copies.move_failed("a", 1, "closed by peer")
    copies.start(2)
    assert copies.mover_ended("b", "killed")
    copies.mover_ended("a", "killed")
    copies.overdue(0.0, 2.0)
    assert copies.overdue(9.0, 2.0) == []
