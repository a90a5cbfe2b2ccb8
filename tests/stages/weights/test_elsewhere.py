"""Tensors out of other nodes' memories: box by box, whatever the writer does, whoever is lost."""

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
import pytest
import torch

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.elsewhere import BUFFER_BYTES
from pipeline.gps.layout import Box, alone, cut
from pipeline.gps.store import Reader, Store
from stages.weights.boxes import all_of, read
from tests.stages.weights.fetching import World, content, world

SHAPES = {
    "down": (1500, 4001),
    "embed": (4000, 1500),
    "head": (3000, 1000),
    "norm": (7,),
    "one": (),
    "up": (4, 900, 11),
}
"""Some larger than a piece of the buffer."""
LIMIT_S = 60.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of safetensors, all zero."""
    folder = tmp_path_factory.mktemp("model")
    table, at = {}, 0
    for name, shape in SHAPES.items():
        nbytes = 4 * math.prod(shape)
        table[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    header = json.dumps(table).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(at))
    return str(folder)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[World]:
    """Nodes, each tensor on two of them. The last test loses some."""
    with world(tmp_path_factory.mktemp("nodes") / "run", model, 4, 2) as made:
        made.publish(1)
        yield made


def expected(name: str, version: int) -> np.ndarray:
    return np.frombuffer(content(name, version, 4 * math.prod(SHAPES[name])), np.float32).reshape(SHAPES[name])


def differing(reader: Reader, names: Iterable[str] = SHAPES) -> list[str]:
    """The tensors that are not, in every bit, those of the reader's version."""
    own = all_of(reader)
    return [name for name in names if own[name].numpy().tobytes() != expected(name, reader.version).tobytes()]


def box_is_right(reader: Reader, name: str, box: Box) -> bool:
    own = {name: torch.zeros(box.size)}
    read([alone(name, box)], all_of(reader), own)
    wanted = expected(name, reader.version)[tuple(map(slice, box.start, box.stop))]
    return own[name].numpy().tobytes() == wanted.tobytes()


def is_told(nodes: World, num_bytes: int) -> bool:
    """By both ends: so much has travelled, with a few bytes between boxes."""
    assert nodes.num_bytes < 2 * num_bytes + 256
    return nodes.num_bytes >= 2 * num_bytes


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.01)


def test_a_node_has_memory_for_its_piles_alone(four: World) -> None:
    taken = {name: os.stat(f"/dev/shm/{store.name}.0").st_blocks * 512 for name, store in four.stores.items()}
    for name, store in four.stores.items():
        own = sum(entry.nbytes for entry in store.in_piles(four.piles[name]).values())
        assert own <= taken[name] < own + 16 * 4096
    assert sum(taken.values()) > 2 * sum(4 * math.prod(shape) for shape in SHAPES.values())


def test_a_node_reads_what_it_does_not_hold_whole_or_box_by_box_and_nothing_else_travels(four: World) -> None:
    with four.reader("n1").read(1, 5.0) as reader:
        missing = [name for name in SHAPES if name not in reader.here]
        assert reader.here and missing
        assert differing(reader) == []
        until(partial(is_told, four, sum(4 * math.prod(SHAPES[name]) for name in missing)))
        for name in (name for name in missing if len(SHAPES[name]) == 2):
            rows, columns = SHAPES[name]
            for box in (cut((rows, columns), 0, 5, rows - 3), cut((rows, columns), 1, 2, columns // 2)):
                four.num_bytes = 0
                assert box_is_right(reader, name, box)
                until(partial(is_told, four, 4 * box.size))
    assert max(4 * math.prod(shape) for shape in SHAPES.values()) > BUFFER_BYTES // 4, "some come in several pieces"


def test_r10_under_a_writer_that_never_rests_each_read_is_one_version_and_a_lost_holder_stops_nobody(
    four: World,
) -> None:
    is_over = threading.Event()
    seen: list[int] = []
    faults: list[object] = []

    def write() -> None:
        version = 1
        while not is_over.is_set():
            version += 1
            four.publish(version)

    def look(store: Store) -> None:
        while not is_over.is_set():
            try:
                with store.read(store.current(), 5.0) as reader:
                    faults.extend((reader.version, name) for name in differing(reader))
                    seen.append(reader.version)
            except WeightsUnavailable:
                pass  # the writer was two versions ahead
            except Exception as error:
                faults.append(error)
                raise

    threads = [threading.Thread(target=look, args=(four.reader(node),)) for node in ("n0", "n1")]
    threads.append(threading.Thread(target=write))
    for thread in threads:
        thread.start()
    try:
        until(lambda: len(set(seen)) >= 3 or faults)
        four.lose("n3")
        num_seen = len(seen)
        until(lambda: len(seen) >= num_seen + 4 or faults)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert faults == []

    four.lose("n2")
    store = four.reader("n1", limit_s=0.5)
    with store.read(store.current(), 5.0) as reader:
        held = {name for node, store in four.stores.items() for name in store.in_piles(four.piles[node])}
        lost = SHAPES.keys() - held
        assert lost and differing(reader, held) == []
        with pytest.raises(WeightsUnavailable, match=r"cannot be read from other nodes: .*nobody holds"):
            all_of(reader)[min(lost)]
