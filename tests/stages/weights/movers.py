"""Movers as an agent's zygote forks them, each a process of its own, and what they are told.

python -m tests.stages.weights.movers FD,... PARENT GPS,... RUN     FD: the socket to the agent, GPS: name of the
node's memory; of several, each is a fork of one that has imported all
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from pipeline import wire, wire_gps
from pipeline.gps.store import confine
from pipeline.processes import SHIELD, die_with_parent, python_command, python_environment
from stages.weights.mover import main

LIMIT_S = 20.0
Answer = wire_gps.Moved | wire_gps.MoveFailed


class MoverProcess:
    """`gps`: what the name of the node's store begins with. `num_alive` counts its signs of life so far."""

    def __init__(self, gps: str, **env: str) -> None:
        (self.socket,), self.process, _ = _start([gps], "", **env)
        self._begin()

    def _begin(self) -> None:
        self.socket.settimeout(2 * LIMIT_S)
        self._stream = self.socket.makefile("rb")
        self.num_alive = 0

    def tell(self, message: wire.ToWorker) -> None:
        self.socket.sendall(wire.encode_message(message))

    def answer(self) -> Answer:
        """Raises ConnectionError if it is dead."""
        while True:
            message = self.hear()
            if isinstance(message, Answer):
                return message
            assert isinstance(message, wire.Alive), message
            self.num_alive += 1

    def hear(self) -> wire.ToItsAgent:
        size = int.from_bytes(self._stream.read(4), "little")
        data = self._stream.read(size)
        if not data:
            raise ConnectionError("the mover is dead")
        return wire.decode_from_worker(data)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._stream.close()
        self.socket.close()


class ForkedMover(MoverProcess):
    """One of several that share a parent, which has imported all: `start_movers`."""

    def __init__(self, sock: socket.socket, process: "subprocess.Popen[bytes]", pid: int) -> None:
        self.socket, self.process, self.pid = sock, process, pid
        self._begin()

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self._stream.close()
        self.socket.close()


def start_movers(gps: list[str], run: str) -> tuple[list[ForkedMover], "subprocess.Popen[bytes]"]:
    """And their parent, which ends with them and they with it."""
    sockets, process, pids = _start(gps, run)
    return [ForkedMover(sock, process, pid) for sock, pid in zip(sockets, pids, strict=True)], process


def _start(gps: list[str], run: str, **env: str) -> tuple[list[socket.socket], "subprocess.Popen[bytes]", list[int]]:
    pairs = [socket.socketpair() for _ in gps]
    theirs = [its for _, its in pairs]
    args = (",".join(str(its.fileno()) for its in theirs), str(os.getpid()), ",".join(gps), run)
    process = subprocess.Popen(
        [*SHIELD, *python_command("tests.stages.weights.movers", *args)],
        env=python_environment(OMP_NUM_THREADS="1", **env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE if len(gps) > 1 else subprocess.DEVNULL,
        pass_fds=[its.fileno() for its in theirs],
    )
    for its in theirs:
        its.close()
    pids = [int(process.stdout.readline()) for _ in gps] if process.stdout else []
    return [own for own, _ in pairs], process, pids


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
) -> wire_gps.Move:
    """A rendezvous file makes a pair."""
    return wire_gps.Move(
        worker=wire_gps.MOVER,
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


def _run(sock: socket.socket, gps: str, run: str) -> NoReturn:
    confine(f"{gps}-")
    options = {"host": "127.0.0.1", "alive_s": 0.2}
    start = wire.StartWorker(
        worker=wire_gps.MOVER, role="mover", index=0, life=0, slots=[], version=0, main="", options=options
    )
    main(sock, wire.WorkerOrder(start=start, run=run, node="n", attempt=1, gps=gps, host="127.0.0.1", env={}))


if __name__ == "__main__":
    die_with_parent(signal.SIGKILL, int(sys.argv[2]))
    sockets, names = [socket.socket(fileno=int(fd)) for fd in sys.argv[1].split(",")], sys.argv[3].split(",")
    if len(names) == 1:
        _run(sockets[0], names[0], sys.argv[4])
    for mine, name in zip(sockets, names, strict=True):
        if (pid := os.fork()) == 0:
            die_with_parent(signal.SIGKILL, os.getppid())
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            for other in sockets:
                if other is not mine:
                    other.close()
            _run(mine, name, sys.argv[4])
        print(pid, flush=True)
    for _ in names:
        os.wait()
