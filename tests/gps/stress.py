"""A writer that never rests and readers that check every word, each a process of its own.

python -m tests.gps.stress write NAME           publishes version after version until it is killed
python -m tests.gps.stress read NAME COUNT      reads COUNT times, then prints what it saw as JSON
python -m tests.gps.stress hold NAME VERSION    holds a version for reading until it is killed
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import safetensors.numpy

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.store import Reader, Store, Writer

REPOSITORY = Path(__file__).parents[2]
TENSORS = 4
PATIENCE_S = 30.0


@dataclass
class Seen:
    """What a reader saw. `torn`: a tensor with words of two versions (or of none); `mixed`: whole tensors, but not all
    of the version that was asked for; `backward`: an older version than before; `late`: asked again, because the
    version was written over before it was held."""

    reads: int = 0
    torn: int = 0
    mixed: int = 0
    backward: int = 0
    late: int = 0
    num_versions: int = 0


def make_model(folder: Path, nbytes: int) -> Path:
    """A model of `nbytes` in equal float32 tensors, filled as version 0."""
    folder.mkdir()
    words = np.full(nbytes // 4 // TENSORS, word_of(0), np.uint32).view(np.float32)
    safetensors.numpy.save_file({f"layer.{n}": words for n in range(TENSORS)}, folder / "model.safetensors")
    return folder


def word_of(version: int) -> int:
    """Neighbouring versions differ in many bits."""
    return version * 0x9E3779B1 & 0xFFFFFFFF


def tensors(held: Reader | Writer) -> list[np.ndarray]:
    return [np.frombuffer(held.buffer, np.uint32, e.nbytes // 4, e.offset) for e in held.entries.values()]


def publish(store: Store, version: int) -> None:
    with store.write(version, PATIENCE_S) as writer:
        for words in tensors(writer):
            words[:] = word_of(version)
    store.seal(version)


def look(reader: Reader, seen: Seen) -> None:
    """Compare every word with the version's."""
    seen.reads += 1
    expected = word_of(reader.version)
    found = tensors(reader)
    if all((words == expected).all() for words in found):
        return
    if all((words == words[0]).all() for words in found):
        seen.mixed += 1
    else:
        seen.torn += 1


def read(name: str, count: int) -> Seen:
    return read_while(Store.attach(name), lambda seen: seen.reads < count, look, PATIENCE_S)


def read_while(
    store: Store, goes_on: Callable[[Seen], bool], look: Callable[[Reader, Seen], None], patience_s: float
) -> Seen:
    """One visible version after the other; `look` counts what is wrong with it."""
    seen, last = Seen(), -1
    while goes_on(seen):
        try:
            reader = store.read(store.current(), patience_s)
        except WeightsUnavailable:  # two versions were published between the two calls, or the store was removed
            seen.late += 1
            continue
        with reader:
            look(reader, seen)
            seen.backward += reader.version < last
            seen.num_versions += reader.version != last
            last = reader.version
    return seen


def start(*arguments: object) -> "subprocess.Popen[str]":
    """Returns when the process has attached to the store."""
    command = [sys.executable, "-m", "tests.gps.stress", *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return process


def read_under_a_writer(name: str, reads: int, readers: int) -> list[Seen]:
    """Several processes read while one writes without rest."""
    writer = start("write", name)
    processes = [start("read", name, -(-reads // readers)) for _ in range(readers)]
    try:
        found = []
        for process in processes:
            out, _ = process.communicate()
            assert process.returncode == 0, f"a reader ended with {process.returncode}"
            found.append(Seen(**json.loads(out)))
        assert writer.poll() is None, "the writer ended"
        return found
    finally:
        kill(writer, *processes)


def kill(*processes: "subprocess.Popen[str]") -> None:
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def killed_writers(name: str, kills: int) -> list[str]:
    """Kill a busy writer again and again. How each left the store: the next version "half written", "whole" or not
    "begun"; or "damaged" if the visible version is not what it was."""
    store, found = Store.attach(name), []
    for _ in range(kills):
        writer, first = start("write", name), store.current()
        while store.current() < first + 3:
            time.sleep(0.0005)
        kill(writer)
        found.append(state_after_death(store))
    return found


def state_after_death(store: Store) -> str:
    if not is_whole(store):
        return "damaged"
    try:
        store.seal(store.current() + 1)
    except WeightsUnavailable as error:
        return "half written" if "WRITING" in str(error) else "not begun"
    return "whole" if is_whole(store) else "damaged"


def is_whole(store: Store) -> bool:
    """The visible version can be read, at once, and every word is its own."""
    seen = Seen()
    try:
        with store.read(store.current(), 0.0) as reader:
            look(reader, seen)
    except WeightsUnavailable:
        return False
    return seen == Seen(reads=1)


def killed_reader(name: str) -> float:
    """Kill a reader that is in the writer's way: seconds until the writer goes on."""
    store = Store.attach(name)
    publish(store, store.current() + 1)
    reader = start("hold", name, store.current() - 1)
    died: list[float] = []

    def end() -> None:
        reader.kill()
        died.append(time.monotonic())

    timer = threading.Timer(0.05, end)  # in the middle of the writer's wait
    timer.start()
    with store.write(store.current() + 1, PATIENCE_S):
        going_on = time.monotonic()
    timer.join()
    kill(reader)
    return going_on - died[0]


def main(verb: str, name: str, *rest: str) -> None:
    store = Store.attach(name)
    if verb == "hold":
        held = store.read(int(rest[0]), PATIENCE_S)
    print("ready", flush=True)
    if verb == "write":
        while True:
            publish(store, store.current() + 1)
    elif verb == "read":
        print(json.dumps(asdict(read(name, int(rest[0])))))
    else:
        threading.Event().wait()
        held.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
