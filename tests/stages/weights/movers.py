"""Movers as an agent's zygote forks them, each a process of its own, and what they are told.

python -m tests.stages.weights.movers FD PARENT GPS     FD: the socket to the agent, GPS: name of the node's memory
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline import wire
from pipeline.gps.store import confine
from pipeline.processes import SHIELD, die_with_parent, python_command, python_environment
from stages.weights.mover import main

LIMIT_S = 20.0
Answer = wire.Moved | wire.MoveFailed


class MoverProcess:
    """`gps`: what the name of the node's store begins with. `num_alive` counts its signs of life so far."""

    def __init__(self, gps: str, **env: str) -> None:
        self._socket, its = socket.socketpair()
        with its:
            args = (str(its.fileno()), str(os.getpid()), gps)
            self.process = subprocess.Popen(
                [*SHIELD, *python_command("tests.stages.weights.movers", *args)],
                env=python_environment(OMP_NUM_THREADS="1", **env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )
        self._socket.settimeout(2 * LIMIT_S)
        self._stream = self._socket.makefile("rb")
        self.num_alive = 0

    def tell(self, move: wire.Move) -> None:
        self._socket.sendall(wire.encode_message(move))

    def answer(self) -> Answer:
        """Raises ConnectionError if it is dead."""
        while True:
            message = self._hear()
            if isinstance(message, Answer):
                return message
            assert isinstance(message, wire.Alive), message
            self.num_alive += 1

    def _hear(self) -> wire.ToItsAgent:
        size = int.from_bytes(self._stream.read(4), "little")
        data = self._stream.read(size)
        if not data:
            raise ConnectionError("the mover is dead")
        return wire.decode_from_worker(data)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stream.close()
        self._socket.close()


@contextmanager
def two_movers(stores: tuple[str, str]) -> Iterator[tuple[MoverProcess, MoverProcess]]:
    """Of the two nodes with these stores."""
    sender, receiver = (MoverProcess(store.removesuffix("-policy")) for store in stores)
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def order(
    rank: int,
    version: int,
    rendezvous: Path,
    *,
    is_first: bool = False,
    number: int = 0,
    limit_s: float = LIMIT_S,
    share: int = -1,
    shares: str = "",
) -> wire.Move:
    """A rendezvous file makes a pair."""
    return wire.Move(
        worker=wire.MOVER,
        number=number or version,
        pair="one>other",
        rank=rank,
        rendezvous=str(rendezvous),
        version=version,
        is_first=is_first,
        limit_s=limit_s,
        share=share,
        shares=shares,
    )


def move(
    movers: tuple[MoverProcess, MoverProcess], version: int, rendezvous: Path, **options: Any
) -> tuple[Answer, Answer]:
    """Have the first send a version to the second; what both answer. `options` as those of an order."""
    for rank, mover in enumerate(movers):
        mover.tell(order(rank, version, rendezvous, **options))
    return movers[0].answer(), movers[1].answer()


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, int(sys.argv[2]))
    confine(f"{sys.argv[3]}-")
    options = {"host": "127.0.0.1", "alive_s": 0.2}
    start = wire.StartWorker(
        worker=wire.MOVER, role="mover", index=0, life=0, slots=[], version=0, main="", options=options
    )
    main(
        socket.socket(fileno=int(sys.argv[1])),
        wire.WorkerOrder(start=start, run="", node="n", attempt=1, gps=sys.argv[3], host="127.0.0.1", env={}),
    )
