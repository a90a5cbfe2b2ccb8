"""The store under a writer that never rests, with processes that die at any moment. `benchmarks/gps.py` has the full
size: 100,000 reads of 1 MiB and 1,000 of 64 MiB."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.gps.store import Store
from tests.gps import cycle, stress

MIB = 1 << 20


@pytest.fixture
def small(store_name: str, tmp_path: Path) -> Iterator[Store]:
    store = Store.create(store_name, str(stress.make_model(tmp_path / "model", MIB)), "float32", 0)
    yield store
    store.unlink()


@pytest.mark.parametrize(("nbytes", "reads"), [(MIB, 4000), (64 * MIB, 40)])
def test_every_word_of_every_read_is_of_one_version(store_name: str, tmp_path: Path, nbytes: int, reads: int) -> None:
    store = Store.create(store_name, str(stress.make_model(tmp_path / "model", nbytes)), "float32", 0)
    seen = stress.read_under_a_writer(store_name, reads, readers=2)
    store.unlink()
    assert sum(s.reads for s in seen) == reads
    assert [(s.torn, s.mixed, s.backward) for s in seen] == [(0, 0, 0)] * 2
    assert all(s.num_versions > 5 for s in seen)  # it never rested


def test_a_look_finds_what_is_torn_or_mixed(small: Store) -> None:
    stress.publish(small, 1)
    entry = list(small.entries.values())[2]
    words = np.memmap(f"/dev/shm/{small.name}.1", np.uint32, "r+", entry.offset, entry.nbytes // 4)
    for index, value, expected in ((-1, 5, (1, 0)), (slice(None), stress.word_of(0), (0, 1))):
        words[index] = value
        seen = stress.Seen()
        with small.read(1, 0) as reader:
            stress.look(reader, seen)
        assert (seen.torn, seen.mixed) == expected


def test_a_writer_killed_while_writing_leaves_the_visible_version(small: Store) -> None:
    states = stress.killed_writers(small.name, 5)
    assert "damaged" not in states
    assert "half written" in states, states
    stress.publish(small, small.current() + 1)  # and its slot is free


def test_a_reader_killed_while_reading_lets_the_writer_go_on(small: Store) -> None:
    assert max(stress.killed_reader(small.name) for _ in range(3)) < 0.05


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_from_publish_to_serving_no_file_is_opened_but_shared_memory(tmp_path: Path) -> None:
    with cycle.publishing(tmp_path / "run") as publishing:
        publishing.run()
        try:
            opened = cycle.opened_by(publishing, tmp_path / "strace")
        except PermissionError as error:
            pytest.skip(f"strace may not attach here: {error}")
        publishing.run()  # they were left as they were
    assert len(opened) >= 2, opened  # the writer's and the reader's lock
    assert [path for path in opened if not path.startswith("/dev/shm/pivot-")] == []
