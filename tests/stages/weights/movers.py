"""Movers as an agent starts them, and what they are told."""

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from pipeline.processes import SHIELD, python_command, python_environment
from stages.weights.mover import MAX_MESSAGE_BYTES, Failed, Move, Moved

LIMIT_S = 20.0


class MoverProcess:
    def __init__(self) -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            self.process = subprocess.Popen(
                [*SHIELD, *python_command("stages.weights.mover", str(its.fileno()), str(os.getpid()))],
                env=python_environment(OMP_NUM_THREADS="1"),
                stdin=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )
        mine.settimeout(2 * LIMIT_S)
        self._socket = mine

    def tell(self, **order: Any) -> None:
        self._socket.send(msgspec.msgpack.encode(Move(**{"host": "127.0.0.1", "limit_s": LIMIT_S, **order})))

    def answer(self) -> Moved | Failed:
        """Raises ConnectionResetError or DecodeError if it is dead."""
        answer: Moved | Failed = msgspec.msgpack.decode(self._socket.recv(MAX_MESSAGE_BYTES), type=Moved | Failed)
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()


@contextmanager
def two_movers() -> Iterator[tuple[MoverProcess, MoverProcess]]:
    sender, receiver = MoverProcess(), MoverProcess()
    try:
        yield sender, receiver
    finally:
        sender.close()
        receiver.close()


def move(
    movers: tuple[MoverProcess, MoverProcess], stores: tuple[str, str], version: int, rendezvous: Path, number: int = 0
) -> tuple[Moved | Failed, Moved | Failed]:
    """Have the first send a version to the second; what both answer. A rendezvous file makes a pair."""
    for rank, (mover, store) in enumerate(zip(movers, stores, strict=True)):
        mover.tell(
            number=number or version,
            pair=rendezvous.name,
            rank=rank,
            rendezvous=str(rendezvous),
            store=store,
            version=version,
        )
    return movers[0].answer(), movers[1].answer()
