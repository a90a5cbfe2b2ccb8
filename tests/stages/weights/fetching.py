"""Nodes that hold some of a model's tensors each: real movers and memories, the controller's `Fetches` between them."""

import os
import select
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from pipeline import wire, wire_gps
from pipeline.fetches import Fetches, Orders
from pipeline.gps.elsewhere import Elsewhere
from pipeline.gps.placement import num_piles, piles_of
from pipeline.gps.store import Store
from pipeline.run_folder import RunFolder
from tests.stages.weights.movers import LIMIT_S, ForkedMover, start_movers


class World:
    """`stores`: by node; `movers`: those that live."""

    def __init__(self, run: RunFolder, model: str, dtype: str, num_nodes: int, replication: int) -> None:
        base = f"pivot-{os.getuid()}-test{uuid.uuid4().hex[:8]}-1"
        self.names = [f"n{number}" for number in range(num_nodes)]
        self.gps = {name: f"{base}-{name}" for name in self.names}
        num = num_piles(num_nodes, replication)
        self.piles = {name: piles_of(i, num, replication) for i, name in enumerate(self.names)}
        self.stores: dict[str, Store] = {}
        self.movers: dict[str, ForkedMover] = {}
        self.num_bytes = 0
        self._run = run
        self.fetches = Fetches(run.rendezvous, 1, LIMIT_S)
        self._ends = False
        self._publishing = threading.Lock()
        self._readers: list[Elsewhere] = []
        for name in self.names:
            self.stores[name] = Store.create(f"{self.gps[name]}-policy", model, dtype, 0, 2, num, self.piles[name])
        self._made, self._parent = start_movers([self.gps[name] for name in self.names], str(run.path))
        self.movers = dict(zip(self.names, self._made, strict=True))
        self._tell_holders()
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()

    def reader(self, name: str, limit_s: float = LIMIT_S) -> Store:
        """The node's store, as a worker there has it."""
        others = Elsewhere(self.gps[name], "policy", self._run.rendezvous, limit_s)
        self._readers.append(others)
        return Store.attach(f"{self.gps[name]}-policy", others)

    def publish(self, version: int, made: Callable[[str, int, int], bytes] | None = None) -> None:
        """Every node gets its piles of what `made` says (`content`, if nothing is given), and shows them."""
        with self._publishing:
            self._publish(version, made or content)

    def _publish(self, version: int, made: Callable[[str, int, int], bytes]) -> None:
        for name, store in self.stores.items():
            with store.write(version, LIMIT_S) as writer:
                for tensor, entry in store.in_piles(self.piles[name]).items():
                    writer.buffer[entry.offset : entry.offset + entry.nbytes] = made(tensor, version, entry.nbytes)
            store.seal(version, self.piles[name])

    def lose(self, name: str) -> None:
        """Its mover is killed, its memory is gone."""
        with self._publishing:
            self.movers.pop(name).kill()
            self.stores.pop(name).unlink()
        self._perform(self.fetches.node_failed(name, "it is lost"))
        self._tell_holders()

    def close(self) -> None:
        self._ends = True
        self._thread.join()
        for reader in self._readers:
            reader.close()
        self._parent.kill()
        self._parent.communicate()
        for mover in self._made:
            mover.close()
        for store in self.stores.values():
            store.unlink()

    def _tell_holders(self) -> None:
        for name in self.movers:
            others = {other: list(self.piles[other]) for other in self.movers if other != name}
            self._perform([(name, wire_gps.Holders(worker=wire_gps.MOVER, piles=others))])

    def _perform(self, orders: "Orders | list[tuple[str, wire_gps.Holders]]") -> None:
        for name, message in orders:
            if name in self.movers:
                self.movers[name].tell(message)

    def _relay(self) -> None:
        """As agents and controller do."""
        while not self._ends:
            living = dict(self.movers)
            ready, _, _ = select.select([mover.socket for mover in living.values()], [], [], 0.05)
            for name, mover in living.items():
                if mover.socket in ready:
                    self._hear(name, mover)

    def _hear(self, name: str, mover: ForkedMover) -> None:
        try:
            message = mover.hear()
        except (ConnectionError, OSError):
            return  # `lose` has seen to it
        match message:
            case wire_gps.FetchAsked(source=source):
                lives = (source.encode() if source in self.movers else b"", name.encode())
                self._perform(self.fetches.begin(name, message, lives))
            case wire_gps.Moved():
                self.num_bytes += message.num_bytes
                self.fetches.moved(name, message)
            case wire_gps.MoveFailed(number=number, reason=reason):
                self._perform(self.fetches.move_failed(name, number, reason))
            case wire.Alive():
                pass


def content(tensor: str, version: int, nbytes: int) -> bytes:
    """The same wherever it is made."""
    seed = [version, *tensor.encode()]
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


@contextmanager
def world(path: Path, model: str, num_nodes: int, replication: int, dtype: str = "float32") -> Iterator[World]:
    run = RunFolder(path)
    run.create()
    made = World(run, model, dtype, num_nodes, replication)
    try:
        yield made
    finally:
        made.close()
