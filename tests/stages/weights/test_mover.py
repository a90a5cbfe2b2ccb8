"""Versions from one node's memory to another's: what arrives, what is refused, and what a death leaves."""

import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline import wire_gps
from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.ranges import byte_ranges, read_share, write_share
from pipeline.gps.store import Store
from pipeline.gps.trainer_layout import fsdp2
from tests.stages.weights.movers import LIMIT_S, MoverProcess, move, order, two_movers

POLICY = "configs/quickstart/policy"
Movers = tuple[MoverProcess, MoverProcess]


@pytest.fixture(scope="module")
def names() -> tuple[str, str]:
    run = f"pivot-{os.getuid()}-test{uuid.uuid4().hex[:8]}"
    return f"{run}-1-n0-policy", f"{run}-1-n1-policy"


@pytest.fixture(scope="module")
def stores(names: tuple[str, str]) -> Iterator[tuple[Store, Store]]:
    """Two nodes' memories with the same model."""
    made: list[Store] = []
    try:
        made.extend(Store.create(name, POLICY, "float32", 0) for name in names)
        yield made[0], made[1]
    finally:
        for store in made:
            store.unlink()


@pytest.fixture(scope="module")
def movers(names: tuple[str, str]) -> Iterator[Movers]:
    with two_movers(names) as both:
        yield both


@pytest.fixture(autouse=True)
def nothing_there(stores: tuple[Store, Store]) -> None:
    """Each test begins with empty memories."""
    for store in stores:
        store.hide()


def write(store: Store, version: int, seed: int = 0) -> bytes:
    """A whole version, not sealed; returns its bytes."""
    with store.write(version, 5.0) as writer:
        first = min(entry.offset for entry in writer.entries.values())
        body = np.frombuffer(writer.buffer, np.uint8)[first:]
        body[:] = np.random.default_rng((version, seed)).integers(0, 256, len(body), np.uint8)
        return bytes(writer.buffer)


def held(store: Store, version: int) -> bytes:
    with store.read(version, 1.0) as reader:
        return bytes(reader.buffer)


def test_a_version_arrives_bit_for_bit_and_can_then_be_sealed(
    stores: tuple[Store, Store], movers: Movers, tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        written = write(stores[0], version)
        answers = move(movers, version, tmp_path / "pair")
        assert [type(answer) for answer in answers] == [wire_gps.Moved, wire_gps.Moved], answers
        with pytest.raises(WeightsUnavailable):
            held(stores[1], version)
        for store in stores:
            store.seal(version)
        assert held(stores[1], version) == held(stores[0], version) == written


def test_the_first_one_hides_what_the_receiver_shows_whatever_its_version(
    stores: tuple[Store, Store], movers: Movers, tmp_path: Path
) -> None:
    for version in (6, 5, 0):
        for store in stores:
            store.hide()
        write(stores[1], 8)
        stores[1].seal(8)
        written = write(stores[0], version)
        assert isinstance(move(movers, version, tmp_path / f"later{version}")[1], wire_gps.MoveFailed)
        assert stores[1].current() == 8
        assert isinstance(move(movers, version, tmp_path / f"first{version}", is_first=True)[1], wire_gps.Moved)
        assert stores[1].current() == -1
        stores[1].seal(version)
        assert held(stores[1], version) == written
        with pytest.raises(WeightsUnavailable):
            stores[1].read(8, 0.0, is_sealed=False)


def test_a_pair_that_waits_in_vain_holds_nothing_up(
    stores: tuple[Store, Store], movers: Movers, tmp_path: Path
) -> None:
    write(stores[0], 1)
    movers[1].tell(order(1, 1, tmp_path / "alone", number=7, limit_s=1.0))
    started = time.monotonic()
    assert isinstance(move(movers, 1, tmp_path / "anew")[1], wire_gps.Moved)
    assert time.monotonic() - started < 1
    lonely = movers[1].answer()
    assert isinstance(lonely, wire_gps.MoveFailed) and lonely.number == 7, "nobody came within the limit"
    assert movers[1].num_alive > 0


def test_another_version_or_layout_is_refused_and_nothing_can_be_sealed(
    stores: tuple[Store, Store], movers: Movers, tmp_path: Path
) -> None:
    write(stores[0], 1)
    node = stores[1].name.removesuffix("1-policy") + "2"
    other, mover = Store.create(f"{node}-policy", "emulated", "float32", 0), MoverProcess(node)
    try:
        sent, received = move((movers[0], mover), 1, tmp_path / "layout")
        assert isinstance(sent, wire_gps.MoveFailed) and "version 1 was refused" in sent.reason
        assert isinstance(received, wire_gps.MoveFailed) and "(version, bytes, layout, ranges)" in received.reason
        with pytest.raises(WeightsUnavailable):
            other.seal(1)
    finally:
        mover.close()
        other.unlink()


def test_a_version_that_is_not_there_is_not_sent_and_its_receiver_is_told_at_once(
    stores: tuple[Store, Store], movers: Movers, tmp_path: Path
) -> None:
    started = time.monotonic()
    sent, received = move(movers, 5, tmp_path / "none")
    assert isinstance(sent, wire_gps.MoveFailed) and "does not hold version 5" in sent.reason
    assert isinstance(received, wire_gps.MoveFailed)
    assert time.monotonic() - started < LIMIT_S / 2
    stores[1].write(5, 0.0).close()  # its slot is free


@pytest.mark.parametrize("place", ["copy.sending", "copy.receiving"])
def test_a_mover_killed_in_the_middle_leaves_nothing_that_can_be_sealed_and_a_new_pair_goes_on(
    stores: tuple[Store, Store], movers: Movers, names: tuple[str, str], tmp_path: Path, place: str
) -> None:
    written = write(stores[0], 1)
    rank = 0 if place == "copy.sending" else 1
    doomed = MoverProcess(names[rank].removesuffix("-policy"), PIVOT_KILL_POINT=place)
    try:
        both = (doomed, movers[1]) if rank == 0 else (movers[0], doomed)
        for end, mover in enumerate(both):
            mover.tell(order(end, 1, tmp_path / "pair"))
        assert doomed.process.wait(LIMIT_S) == -9
        assert isinstance(both[1 - rank].answer(), wire_gps.MoveFailed)
        with pytest.raises(WeightsUnavailable):
            stores[1].seal(1)
    finally:
        doomed.close()
    assert isinstance(move(movers, 1, tmp_path / "anew")[1], wire_gps.Moved)
    stores[1].seal(1)
    assert held(stores[1], 1) == written


# --- shares -----------------------------------------------------------------------------------------------------------


def halves(store: Store, prefix: Path) -> list[list[tuple[int, int]]]:
    """Every tensor's rows dealt to two nodes, and written down."""
    shapes = {name: entry.shape for name, entry in store.entries.items()}
    found = []
    for node, parts in enumerate(fsdp2(shapes, 2).ranks):
        write_share(prefix, node, node, (r for name, box, _ in parts for r in byte_ranges(store.entries[name], box)))
        found.append(read_share(prefix, node))
    return found


def write_part(store: Store, version: int, image: bytes, ranges: list[tuple[int, int]]) -> None:
    with store.write_more(version, 5.0) as writer:
        for offset, length in ranges:
            writer.buffer[offset : offset + length] = image[offset : offset + length]


def test_shares_are_exchanged_and_make_the_whole(movers: Movers, stores: tuple[Store, Store], tmp_path: Path) -> None:
    image = write(stores[0], 3)
    prefix = tmp_path / "share-1"
    shares = halves(stores[0], prefix)
    assert sum(length for share in shares for _, length in share) == sum(e.nbytes for e in stores[0].entries.values())
    for store, ranges in zip(stores, shares, strict=True):
        store.hide()
        write_part(store, 4, bytes(len(image)), [(offset, length) for share in shares for offset, length in share])
        store.hide()
        write_part(store, 4, image, ranges)
    for share, pair in enumerate((movers, movers[::-1])):
        answers = move(pair, 4, tmp_path / f"pair{share}", number=share + 1, share=share, shares=str(prefix))
        size = sum(length for _, length in shares[share])
        assert all(isinstance(answer, wire_gps.Moved) and answer.num_bytes == size for answer in answers), answers
    for store in stores:
        store.seal(4)
        with store.read(4, 1.0) as reader:
            assert bytes(reader.buffer) == image


def test_what_is_there_stays_when_a_share_does_not_come(
    movers: Movers, stores: tuple[Store, Store], tmp_path: Path
) -> None:
    image, prefix = write(stores[0], 3), tmp_path / "share-1"
    shares = halves(stores[0], prefix)
    stores[1].hide()
    write_part(stores[1], 3, image, shares[1])
    (tmp_path / "share-1-0").unlink()
    answers = move(movers, 3, tmp_path / "pair", share=0, shares=str(prefix))
    assert all(isinstance(answer, wire_gps.MoveFailed) for answer in answers)
    assert "no rank of node 0 has said" in answers[0].reason
    with stores[1].read(3, 1.0, is_sealed=False) as reader:  # whole enough to give what it has
        for offset, length in shares[1]:
            assert bytes(reader.buffer[offset : offset + length]) == image[offset : offset + length]
