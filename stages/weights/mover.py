"""Moves weight versions between the shared memories of two nodes: the process that a node's agent keeps for it.

    python -m stages.weights.mover FD PARENT      FD: the SEQPACKET socket to the agent, PARENT: the agent's pid
                                                  (behind processes.SHIELD: signals are ignored from the start)

The agent sends Move, the mover answers Moved or Failed. A *pair* is a process group of two movers, an object of its
own over a rendezvous file: it can be made and dropped while others go on, and no group has to shrink when a node is
lost. Each pair has a thread, and does one move after the other. Nothing here waits for ever: gloo ends a wait after
the move's limit, and the agent kills a mover that does not answer.

The sender reads its own node's slot, the receiver writes into its own: no byte is held twice. With each MiB goes the
sum of its words, so a version that was changed on its way is not whole, and can never be sealed.

Shape suffixes: N bytes of an image, C bytes of a piece of it, S MiB.
"""

import datetime
import hashlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Iterator
from functools import cache
from typing import NoReturn

import msgspec
import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore, ProcessGroup, ProcessGroupGloo

from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.store import Reader, Store, Writer
from pipeline.processes import die_with_parent

MAX_MESSAGE_BYTES = 1 << 16
PIECE_BYTES = 32 << 20
_MIB = 1 << 20
_SENDER = 0
_WORDS_IN_HEAD = 4


class Move(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Send `version` of `store` to the other mover of the pair (rank 0), or receive it (rank 1).

    `rendezvous`: a file, new for each pair, that both can reach; `host`: the own address, for the other to connect to.
    """

    number: int
    pair: str
    rank: int
    rendezvous: str
    host: str
    store: str
    version: int
    limit_s: float


class Moved(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    num_bytes: int
    seconds: float


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    reason: str


class Pair:
    """This mover's end of a process group of two."""

    def __init__(self, first: Move) -> None:
        options = ProcessGroupGloo._Options()
        options._timeout = datetime.timedelta(seconds=first.limit_s)
        options._devices = [ProcessGroupGloo.create_device(hostname=first.host)]
        store = PrefixStore(first.pair, FileStore(first.rendezvous, 2))
        self._group: ProcessGroup = ProcessGroupGloo(store, first.rank, 2, options)
        self._other = 1 - first.rank

    def send(self, held: Reader) -> int:
        """Returns the number of bytes. Raises RuntimeError if the other one refused or did not get what was sent."""
        image_N = _bytes_of(held)
        self._send(torch.tensor([held.version, len(image_N), *_layout(held)]))
        self._require(held.version, "was refused")
        pieces = list(image_N.split(PIECE_BYTES))
        works = [self._group.send([piece_C], self._other, tag) for tag, piece_C in enumerate(pieces)]
        self._send(torch.cat([_sums(piece_C) for piece_C in pieces]))
        for work in works:
            work.wait()
        self._require(held.version, "did not arrive as it was sent")
        return len(image_N)

    def receive(self, held: Writer) -> int:
        """Returns the number of bytes. Raises WeightsUnavailable for another version or layout, and for bytes that are
        not those sent."""
        image_N = _bytes_of(held)
        wanted = torch.tensor([held.version, len(image_N), *_layout(held)])
        offered = self._receive(torch.empty(_WORDS_IN_HEAD, dtype=torch.int64))
        is_wanted = torch.equal(offered, wanted)
        self._send(torch.tensor([int(is_wanted)]))
        if not is_wanted:
            raise WeightsUnavailable(
                f"offered was {offered.tolist()}, wanted {wanted.tolist()} (version, bytes, layout)"
            )
        pieces = list(image_N.split(PIECE_BYTES))
        works = [self._group.recv([piece_C], self._other, tag) for tag, piece_C in enumerate(pieces)]
        sums_S = self._receive(torch.empty(sum(-(-len(p) // _MIB) for p in pieces), dtype=torch.int64))
        found = []
        for piece_C, work in zip(pieces, works, strict=True):
            work.wait()
            found.append(_sums(piece_C))  # while the next one arrives
        is_whole = torch.equal(torch.cat(found), sums_S)
        self._send(torch.tensor([int(is_whole)]))
        if not is_whole:
            raise WeightsUnavailable(f"version {held.version} was changed on its way")
        return len(image_N)

    def _send(self, words: Tensor) -> None:
        self._group.send([words], self._other, _TALK).wait()

    def _receive(self, words: Tensor) -> Tensor:
        self._group.recv([words], self._other, _TALK).wait()
        return words

    def _require(self, version: int, otherwise: str) -> None:
        if not self._receive(torch.empty(1, dtype=torch.int64)).item():
            raise RuntimeError(f"version {version} {otherwise}")


_TALK = 1 << 20
"""Tag of everything that is not a piece."""


def _bytes_of(held: Reader | Writer) -> Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(held.buffer, dtype=torch.uint8)


def _layout(held: Reader | Writer) -> Iterator[int]:
    """Two words that differ where names, types, shapes or places do."""
    text = repr(sorted((name, entry) for name, entry in held.entries.items()))
    digest = hashlib.sha256(text.encode()).digest()
    yield from (int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8))


def _sums(piece_C: Tensor) -> Tensor:
    """Of each MiB (and of what is left at the end, zeros behind it) the sum of its 64-bit words; they may wrap."""
    whole = len(piece_C) // _MIB * _MIB
    sums_S = piece_C[:whole].view(torch.int64).view(-1, _MIB // 8).sum(1)
    if whole == len(piece_C):
        return sums_S
    rest = torch.zeros(_MIB, dtype=torch.uint8)
    rest[: len(piece_C) - whole] = piece_C[whole:]
    return torch.cat([sums_S, rest.view(torch.int64).sum().view(1)])


class Mover:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._saying = threading.Lock()
        self._inboxes: dict[str, queue.SimpleQueue[Move]] = {}

    def serve(self) -> NoReturn:
        """Consumes the agent's orders; end of file is its end."""
        decoder = msgspec.msgpack.Decoder(Move)
        while data := self._control.recv(MAX_MESSAGE_BYTES):
            move = decoder.decode(data)
            if move.pair not in self._inboxes:
                inbox = self._inboxes[move.pair] = queue.SimpleQueue()
                threading.Thread(target=self._work, args=(inbox,), name=f"pair {move.pair}", daemon=True).start()
            self._inboxes[move.pair].put(move)
        os._exit(0)

    def _work(self, inbox: "queue.SimpleQueue[Move]") -> None:
        """The thread of a pair: endless. A pair that failed is made anew by the next move, which names a new file."""
        pair: Pair | None = None
        while True:
            move, started = inbox.get(), time.monotonic()
            try:
                with _hold(move) as held:
                    pair = pair or Pair(move)
                    num_bytes = pair.send(held) if isinstance(held, Reader) else pair.receive(held)
            except Exception:
                pair = None
                self._say(Failed(number=move.number, reason=traceback.format_exc()))
            else:
                self._say(Moved(number=move.number, num_bytes=num_bytes, seconds=time.monotonic() - started))

    def _say(self, answer: Moved | Failed) -> None:
        with self._saying:
            self._control.send(msgspec.msgpack.encode(answer))


@cache
def _attached(name: str) -> Store:
    """Once: the page tables of its mappings are built once, too."""
    return Store.attach(name)


def _hold(move: Move) -> Reader | Writer:
    store = _attached(move.store)
    if move.rank == _SENDER:
        return store.read(move.version, move.limit_s, is_sealed=False)
    return store.write(move.version, move.limit_s)


def main(fd: int, parent: int) -> NoReturn:
    die_with_parent(signal.SIGKILL, parent)
    torch.set_num_threads(1)
    Mover(socket.socket(fileno=fd)).serve()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
