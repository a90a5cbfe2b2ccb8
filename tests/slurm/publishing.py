"""Versions published one after the other to real nodes whose agents are killed, and readers that check every word.

    python -m tests.slurm.publishing STORE      reads until its input ends, then prints what it saw as JSON

What is copied and sealed where is decided by the core's own `Memories`; agents, movers and copies are real.
"""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import safetensors.numpy

from pipeline import wire
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.errors import WeightsUnavailable
from pipeline.core.memories import Memories
from pipeline.core.versions import Versions
from pipeline.gps.store import Reader, Store, Writer
from pipeline.processes import python_command, python_environment
from tests.gps.stress import Seen, read_while, tensors
from tests.slurm.watch import Watch

TENSORS = 4
_PAUSE_S = 0.002  # of a reader: two cores are to be shared with those that are watched
_TRIALS = 256
_SLOT_S = 30.0


def make_model(folder: Path, nbytes: int) -> str:
    """A model of `nbytes` in equal float32 tensors, filled as version 0."""
    folder.mkdir()
    words = np.zeros(nbytes // 4 // TENSORS, np.float32)
    safetensors.numpy.save_file({f"layer.{n}": words for n in range(TENSORS)}, folder / "model.safetensors")
    return str(folder)


def look(reader: Reader, seen: Seen) -> None:
    """Every word of a version says which one it is, and which writing of it."""
    seen.reads += 1
    found = tensors(reader)
    if not all((words == words[0]).all() for words in found):
        seen.torn += 1
    elif {int(words[0]) for words in found} != {int(found[0][0])} or int(found[0][0]) // _TRIALS != reader.version:
        seen.mixed += 1


def read(name: str) -> Seen:
    """Until the input ends. A store that was removed, or two versions since it was asked, is no error."""
    store = Store.attach(name)
    print("ready", flush=True)
    return read_while(store, lambda _: not select.select([sys.stdin], [], [], _PAUSE_S)[0], look, 1.0)


class Watcher:
    """A reader of one life of a node's store, as a process of its own."""

    def __init__(self, store: str) -> None:
        self._process = subprocess.Popen(
            python_command("tests.slurm.publishing", store),
            env=python_environment(OMP_NUM_THREADS="1"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdout is not None
        self.is_there = self._process.stdout.readline() == b"ready\n"

    def end(self) -> Seen:
        out, _ = self._process.communicate()
        if not self.is_there:  # its node was killed before it could look
            return Seen()
        assert self._process.returncode == 0, f"a reader ended with {self._process.returncode}"
        return Seen(**json.loads(out))


@dataclass
class Tally:
    """`halfway`: kills that broke a copy; `again`: versions that were lost with their only holder and written again."""

    seen: list[Seen] = field(default_factory=list)
    publish_s: list[float] = field(default_factory=list)
    disturbed_s: list[float] = field(default_factory=list)
    warm_again_s: list[float] = field(default_factory=list)
    kills: int = 0
    halfway: int = 0
    again: int = 0
    failed_copies: int = 0


class Publishing:
    def __init__(self, folder: Path, num_nodes: int, nbytes: int) -> None:
        self.watch = Watch(folder / "run", num_nodes, make_model(folder / "model", nbytes))
        self.tally = Tally()
        self._versions, self._memories = Versions(), Memories()
        self._readers: dict[str, Watcher] = {}
        self._lost_at: dict[str, float] = {}
        self._num_nodes, self._trial = num_nodes, 0
        self._take_until(self._are_all_warm)

    def _are_all_warm(self) -> bool:
        return len(self._memories.warm()) == self._num_nodes

    def publish(self, version: int) -> None:
        """Write it on a warm node; returns when it is visible on all that are warm then."""
        started, num_lost, self._trial = time.monotonic(), self.tally.kills, 0
        while self._versions.current < version:
            if self._versions.written is None:
                self._write(version)
            self._take_until(lambda: self._versions.written is None)
        times = self.tally.publish_s if num_lost == self.tally.kills else self.tally.disturbed_s
        times.append(time.monotonic() - started)

    def kill(self, index: int, after_s: float) -> None:
        """The agent of a warm node, in a while. Everything of the one before is over first."""
        self._take_until(self._are_all_warm)
        pid = self.watch.nodes._lives[self.watch.cluster.nodes[index]].process.pid
        threading.Timer(after_s, os.kill, (pid, signal.SIGKILL)).start()

    def close(self) -> None:
        """Ends the readers. The last version is everywhere."""
        try:
            self._take_until(self._are_all_warm)
            for node in list(self._readers):
                self._end_reader(node)
        finally:
            self.watch.close()

    def _write(self, version: int) -> None:
        node = next(node for node in self._memories.warm() if node in self.watch.shell.nodes)
        self._trial += 1
        try:
            store = Store.attach(f"{self.watch.gps(node)}-policy")
            with self._slot(store, version) as writer:
                for words in tensors(writer):
                    words[:] = version * _TRIALS + self._trial
        except WeightsUnavailable:  # it has been killed
            self._take_until(lambda: node not in self._memories)
            return
        self._versions.write(version)
        self._memories.write([node], version)
        self._go_on()

    def _slot(self, store: Store, version: int) -> Writer:
        """A mover may hold it, for a copy to a node that was killed: until it notices, or is killed itself."""
        deadline = time.monotonic() + _SLOT_S
        while True:
            try:
                return store.write(version, 0.1)
            except WeightsUnavailable as error:
                if time.monotonic() > deadline or "was held by" not in str(error):
                    raise
                self.watch.do(asyncio.sleep(0.1))

    def _take_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._take(self.watch.next())
            self._go_on()

    def _take(self, event: ev.Event) -> None:
        match event:
            case ev.NodeJoined(node=node, num_slots=slots, version=version):
                self._memories.join(node, slots, version)
            case ev.NodeLost(node=node):
                self._lose(node, event.reason)
            case ev.VersionCopied(node=node, number=number):
                self._memories.copied(node, number)
            case ev.CopyFailed(node=node, number=number):
                self.tally.failed_copies += self._memories.failed(node, number)
            case ev.VersionSealed(node=node, version=version):
                self._memories.sealed(node, version)

    def _lose(self, node: str, reason: str) -> None:
        """As shell and core do it."""
        self._lost_at[node] = time.monotonic()
        self.tally.kills += 1
        copies = [memory.copy for memory in self._memories.values() if memory.copy is not None]
        self.tally.halfway += any(node in (copy.source, copy.node) for copy in copies)
        self.watch.nodes.copies.node_lost(node, reason)
        self._memories.lose(node)
        written = self._versions.written
        if written is not None and self._memories.is_lost(written):
            self._versions.lose(written)
            self.tally.again += 1
        self._end_reader(node)
        self.watch.start(node)

    def _go_on(self) -> None:
        written = self._versions.written
        if written is not None and self._memories.is_shown(written):
            self._versions.seal(written)
        for node in self._memories.warm_up(self._versions.current):
            self._readers[node] = Watcher(f"{self.watch.gps(node)}-policy")
            if node in self._lost_at:
                self.tally.warm_again_s.append(time.monotonic() - self._lost_at.pop(node))
        for order in self._memories.orders(self._versions):
            self._perform(order)

    def _perform(self, order: de.CopyVersion | de.SealVersion) -> None:
        """Nothing is said to a node that is lost: NodeLost is on its way."""
        nodes = self.watch.shell.nodes
        if isinstance(order, de.SealVersion):
            if order.node in nodes:
                self.watch.send(order.node, wire.SealVersion(version=order.version))
        elif order.source in nodes and order.node in nodes:
            self.watch.copy(order)

    def _end_reader(self, node: str) -> None:
        if node in self._readers:
            self.tally.seen.append(self._readers.pop(node).end())


if __name__ == "__main__":
    print(json.dumps(asdict(read(sys.argv[1]))))
