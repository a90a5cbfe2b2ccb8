"""Versions from one node's memory to another's: what arrives, what is refused, and what a death leaves."""

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.store import Store
from stages.weights.mover import Failed, Moved
from tests.stages.weights.movers import MoverProcess, move, two_movers

POLICY = "configs/quickstart/policy"


@pytest.fixture
def stores() -> Iterator[tuple[Store, Store]]:
    """Two nodes' memories with the same model."""
    made = []
    try:
        for node in ("n0", "n1"):
            made.append(
                Store.create(f"pivot-{os.getuid()}-test{uuid.uuid4().hex[:8]}-1-{node}-policy", POLICY, "float32", 0)
            )
        yield made[0], made[1]
    finally:
        for store in made:
            store.unlink()


@pytest.fixture(scope="module")
def movers() -> Iterator[tuple[MoverProcess, MoverProcess]]:
    with two_movers() as both:
        yield both


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


def names(stores: tuple[Store, Store]) -> tuple[str, str]:
    return stores[0].name, stores[1].name


def test_a_version_arrives_bit_for_bit_and_can_then_be_sealed(
    stores: tuple[Store, Store], movers: tuple[MoverProcess, MoverProcess], tmp_path: Path
) -> None:
    for version in (1, 2, 3):
        written = write(stores[0], version)
        answers = move(movers, names(stores), version, tmp_path / "pair")
        assert [type(answer) for answer in answers] == [Moved, Moved]
        with pytest.raises(WeightsUnavailable):
            held(stores[1], version)
        for store in stores:
            store.seal(version)
        assert held(stores[1], version) == held(stores[0], version) == written


def test_several_pairs_of_one_mover_do_not_mind_each_other(
    stores: tuple[Store, Store], movers: tuple[MoverProcess, MoverProcess], tmp_path: Path
) -> None:
    write(stores[0], 1)
    assert isinstance(move(movers, names(stores), 1, tmp_path / "first")[1], Moved)
    movers[0].tell(
        number=7, pair="alone", rank=0, rendezvous=str(tmp_path / "alone"), store=stores[0].name, version=1, limit_s=1.0
    )
    assert isinstance(move(movers, names(stores), 1, tmp_path / "second")[1], Moved)
    lonely = movers[0].answer()
    assert isinstance(lonely, Failed) and lonely.number == 7, "nobody came within the limit"


def test_another_version_or_layout_is_refused_and_nothing_can_be_sealed(
    stores: tuple[Store, Store], movers: tuple[MoverProcess, MoverProcess], tmp_path: Path
) -> None:
    write(stores[0], 1)
    other = Store.create(f"{stores[1].name}-other", "emulated", "float32", 0)
    try:
        sent, received = move(movers, (stores[0].name, other.name), 1, tmp_path / "layout")
        assert isinstance(sent, Failed) and "version 1 was refused" in sent.reason
        assert isinstance(received, Failed) and "(version, bytes, layout)" in received.reason
        with pytest.raises(WeightsUnavailable):
            other.seal(1)
    finally:
        other.unlink()


def test_a_version_that_is_not_there_is_not_sent(
    stores: tuple[Store, Store], movers: tuple[MoverProcess, MoverProcess], tmp_path: Path
) -> None:
    movers[0].tell(
        number=1, pair="none", rank=0, rendezvous=str(tmp_path / "none"), store=stores[0].name, version=5, limit_s=1.0
    )
    answer = movers[0].answer()
    assert isinstance(answer, Failed) and "does not hold version 5" in answer.reason


def test_the_death_of_one_end_is_told_by_the_other_and_a_new_pair_goes_on(
    stores: tuple[Store, Store], tmp_path: Path
) -> None:
    write(stores[0], 1)
    with two_movers() as (sender, receiver):
        assert isinstance(move((sender, receiver), names(stores), 1, tmp_path / "pair")[0], Moved)
        sender.close()
        receiver.tell(number=2, pair="pair", rank=1, rendezvous=str(tmp_path / "pair"), store=stores[1].name, version=1)
        answer = receiver.answer()
        assert isinstance(answer, Failed) and answer.number == 2
        with pytest.raises(WeightsUnavailable):
            stores[1].seal(1)
        fresh = MoverProcess()
        try:
            written = write(stores[0], 1, seed=1)
            assert isinstance(move((fresh, receiver), names(stores), 1, tmp_path / "anew")[1], Moved)
            stores[1].seal(1)
            assert held(stores[1], 1) == written
        finally:
            fresh.close()
