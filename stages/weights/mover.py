"""Moves weight versions between the shared memories of two nodes: the worker that every node's agent keeps for it.

    main thread      consumes the agent's orders; end of file is the end of the mover
    pair threads     one per pair: makes one move after the other, and answers Moved or MoveFailed
    alive thread     says that this process is not stopped

A *pair* is a process group of two movers, an object of its own over a rendezvous file: it can be made and dropped
while others go on, and no group has to shrink when a node is lost. Nothing here waits for ever: gloo ends a wait after
the move's limit, and the agent kills a mover whose move takes too long, and starts it again. What carries the bytes is
a line (lines.py): gloo; with the option `device` NCCL, over a buffer on that device.

The sender reads its own node's slot, the receiver writes into its own: no byte is held twice. What moves is the whole
of a version, or the ranges of it that the training ranks of one node wrote. With each MiB goes the
sum of its words, so a version that was changed on its way is not whole, and can never be sealed.

Shape suffixes: N bytes of an image, C bytes of a piece of it, S MiB.
"""

import hashlib
import os
import queue
import socket
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed import FileStore, PrefixStore

from pipeline import wire, wire_gps
from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.elsewhere import Filled
from pipeline.gps.ranges import Range, common, read_share
from pipeline.gps.store import Joined, Reader, Store, Writer
from pipeline.gps.wants import PIECE_BYTES, Piece, Want, cut_up, read_wants
from pipeline.kill_points import kill_point
from pipeline.run_folder import RunFolder
from stages.weights.boxes import box_of, copy
from stages.weights.fetcher import Fetcher, Stream
from stages.weights.lines import GlooLine, Line, StagedLine, nccl_group
from stages.weights.tensors import views

_MIB = 1 << 20
_SENDER = 0
_WORDS_IN_HEAD = 5
_HERE, _NOT_HERE, _GONE = 1, 0, -1


class Pair:
    """This mover's end of a process group of two."""

    def __init__(self, first: wire_gps.Move, host: str, device: str = "") -> None:
        """`host`: the own address, for the other to connect to; `device`: that of NCCL, if it is to be that. Raises
        RuntimeError if the other does not come in time."""
        store = PrefixStore(first.pair, FileStore(first.rendezvous, 2))
        self._line: Line
        if device:
            self._line = StagedLine(nccl_group(store, first.rank, 2, first.limit_s), torch.device(device))
        else:
            self._line = GlooLine(store, first.rank, host, first.limit_s)

    def send(self, held: Reader, ranges: Sequence[Range]) -> int:
        """Returns the number of bytes. Raises RuntimeError if the other one refused or did not get what was sent."""
        self._line.say(torch.tensor([held.version, *_words_of(held, ranges)]))
        self._require(held.version, "was refused")
        sums = []
        for piece_C in self._line.send(_pieces(held, ranges)):
            sums.append(_sums(piece_C))
            kill_point("copy.sending")
        self._line.say(_together(sums))
        self._require(held.version, "did not arrive as it was sent")
        return _size(ranges)

    def receive(self, held: Writer | Joined, ranges: Sequence[Range]) -> int:
        """Returns the number of bytes. Raises WeightsUnavailable for another version, layout or share, and for bytes
        that are not those sent."""
        wanted = torch.tensor([held.version, *_words_of(held, ranges)])
        offered = self._line.hear(torch.empty(_WORDS_IN_HEAD, dtype=torch.int64))
        is_wanted = torch.equal(offered, wanted)
        self._line.say(torch.tensor([int(is_wanted)]))
        if not is_wanted:
            raise WeightsUnavailable(
                f"offered was {offered.tolist()}, wanted {wanted.tolist()} (version, bytes, layout, ranges)"
            )
        found = []
        for piece_C in self._line.receive(_pieces(held, ranges)):
            found.append(_sums(piece_C))
            kill_point("copy.receiving")
        sums_S = _together(found)
        is_whole = torch.equal(sums_S, self._line.hear(torch.empty_like(sums_S)))
        self._line.say(torch.tensor([int(is_whole)]))
        if not is_whole:
            raise WeightsUnavailable(f"version {held.version} was changed on its way")
        return _size(ranges)

    def send_boxes(self, held: Reader, wants: Sequence[Want], most: int) -> int:
        """As the other end's `receive_boxes`. The bytes are those of the version: its slot is held meanwhile."""
        if lost := sorted({name for name, _ in wants} - held.here.keys()):
            raise WeightsUnavailable(f"this node does not hold {lost[0]} of version {held.version}")
        pieces = cut_up(wants, held.entries, most)
        self._line.say(torch.tensor([_HERE, len(pieces)]))
        for _ in self._line.send(_packed(held, pieces)):
            kill_point("fetch.sending")
        return sum(piece.nbytes for piece in pieces)

    def send_none(self, *, is_gone: bool) -> None:
        """What a `receive_boxes` hears if the version is not there."""
        self._line.say(torch.tensor([_GONE if is_gone else _NOT_HERE, 0]))

    def receive_boxes(self, version: int, stream: Stream) -> int:
        """Returns the number of bytes. The stream fails where the other does not have the version."""
        state, num_pieces = self._line.hear(torch.empty(2, dtype=torch.int64)).tolist()
        if state != _HERE:
            stream.fail(f"version {version} is {'gone' if state == _GONE else 'not'} there", is_gone=state == _GONE)
            return 0
        if num_pieces != len(stream.pieces):
            raise WeightsUnavailable(f"{num_pieces} pieces were offered, {len(stream.pieces)} are wanted")
        for _ in self._line.receive(stream.places()):
            kill_point("fetch.receiving")
            stream.say(Filled(stream.number))
        return sum(piece.nbytes for piece in stream.pieces)

    def _require(self, version: int, otherwise: str) -> None:
        if not self._line.hear(torch.empty(1, dtype=torch.int64)).item():
            raise RuntimeError(f"version {version} {otherwise}")


def _pieces(held: Reader | Writer | Joined, ranges: Sequence[Range]) -> list[Tensor]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        image_N = torch.frombuffer(held.buffer, dtype=torch.uint8)
    return [piece_C for at, length in ranges for piece_C in image_N[at : at + length].split(PIECE_BYTES)]


@torch.no_grad()
def _packed(held: Reader, pieces: Sequence[Piece]) -> Iterator[Tensor]:
    """One after the other; those that lie in one run of the image as they lie there, others in two buffers in turn."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        image_N = torch.frombuffer(held.buffer, dtype=torch.uint8)
    tensors = views(held)
    most = max((piece.nbytes for piece in pieces if piece.at < 0), default=0)
    halves_2C = torch.empty((2, most), dtype=torch.uint8)
    for i, piece in enumerate(pieces):
        if piece.at >= 0:
            yield image_N[piece.at : piece.at + piece.nbytes]
            continue
        half_C = halves_2C[i % 2]
        for _, (name, box), offset, nbytes in piece.boxes:
            source = box_of(tensors[name], box)
            copy(half_C[offset : offset + nbytes].view(source.dtype).view(source.shape), source)
        yield half_C[: piece.nbytes]


def _size(ranges: Sequence[Range]) -> int:
    return sum(length for _, length in ranges)


def _words_of(held: Reader | Writer | Joined, ranges: Sequence[Range]) -> Iterator[int]:
    """The number of bytes, then words that differ where names, types, shapes, places or ranges do."""
    yield _size(ranges)
    layout = repr(sorted((name, entry) for name, entry in held.entries.items()))
    digest = hashlib.sha256(layout.encode()).digest()
    yield from (int.from_bytes(digest[at : at + 8], "little", signed=True) for at in (0, 8))
    yield int.from_bytes(hashlib.sha256(repr(list(ranges)).encode()).digest()[:8], "little", signed=True)


def _together(sums: Sequence[Tensor]) -> Tensor:
    """Of piles without a tensor there are none."""
    return torch.cat(tuple(sums)) if sums else torch.zeros(1, dtype=torch.int64)


def _sums(piece_C: Tensor) -> Tensor:
    """Of each MiB (and of what is left at the end, zeros behind it) the sum of its 64-bit words; they may wrap."""
    if piece_C.data_ptr() % 8:
        piece_C = piece_C.clone()  # words are read where words may lie
    whole = len(piece_C) // _MIB * _MIB
    sums_S = piece_C[:whole].view(torch.int64).view(-1, _MIB // 8).sum(1)
    if whole == len(piece_C):
        return sums_S
    rest = torch.zeros(_MIB, dtype=torch.uint8)
    rest[: len(piece_C) - whole] = piece_C[whole:]
    return torch.cat([sums_S, rest.view(torch.int64).sum().view(1)])


@dataclass(frozen=True, slots=True)
class _Making:
    """One making of a pair: the orders for its thread, None for its end."""

    rendezvous: str
    inbox: "queue.SimpleQueue[wire_gps.Move | None]"


class Mover:
    """`store`: name of the node's store, which need not be there before the first move; `host`, `device`: see Pair."""

    def __init__(
        self,
        sock: socket.socket,
        store: str,
        host: str,
        fetcher: Fetcher,
        say: Callable[[wire.ToItsAgent], None],
        device: str = "",
    ) -> None:
        self._sock = sock
        self._say = say
        self._name = store
        self._host = host
        self._device = device
        self.fetcher = fetcher
        self._pairs: dict[str, _Making] = {}

    def serve(self) -> NoReturn:
        """Consumes the agent's orders; endless. A pair that is made anew (its rendezvous is another) ends the thread
        of the old one, which may still wait for a mover that is gone."""
        stream = self._sock.makefile("rb")
        while head := stream.read(4):
            move = wire.decode_to_worker(stream.read(int.from_bytes(head, "little")))
            if isinstance(move, wire_gps.Holders | wire_gps.FetchFailed):
                self.fetcher.hear(move)
                continue
            assert isinstance(move, wire_gps.Move), move
            making = self._pairs.get(move.pair)
            if making is None or making.rendezvous != move.rendezvous:
                if making is not None:
                    making.inbox.put(None)
                making = self._pairs[move.pair] = _Making(move.rendezvous, queue.SimpleQueue())
                name = f"pair {move.pair}"
                threading.Thread(target=self._work, args=(making.inbox,), name=name, daemon=True).start()
            making.inbox.put(move)
        os._exit(0)  # the agent is gone

    def live(self, period_s: float) -> NoReturn:
        """Says that this process is not stopped, and that nothing holds it as a whole; endless."""
        while True:
            self._say(wire.Alive(worker=wire_gps.MOVER))
            time.sleep(period_s)

    def _work(self, inbox: "queue.SimpleQueue[wire_gps.Move | None]") -> None:
        """The thread of a pair. It holds no slot while it waits for the other mover to come."""
        pair: Pair | None = None
        while (move := inbox.get()) is not None:
            started = time.monotonic()
            try:
                pair = pair or Pair(move, self._host, self._device)
                num_bytes = self._give_or_take(pair, move)
            except Exception:
                pair = None  # dropped, so that the other one fails at once, too
                reason = traceback.format_exc()
                print(f"version {move.version} was not moved: {reason}", flush=True)
                self._say(wire_gps.MoveFailed(worker=wire_gps.MOVER, number=move.number, reason=reason))
            else:
                seconds = time.monotonic() - started
                moved = wire_gps.Moved(worker=wire_gps.MOVER, number=move.number, num_bytes=num_bytes, seconds=seconds)
                self._say(moved)
            if move.want and move.rank != _SENDER:
                self.fetcher.told(move)

    def _give_or_take(self, pair: Pair, move: wire_gps.Move) -> int:
        if move.want and move.rank == _SENDER:
            store, (wants, most) = self.fetcher.store(move.store), read_wants(Path(move.want))
            try:
                held = store.read(move.version, move.limit_s)
            except WeightsUnavailable:
                pair.send_none(is_gone=move.version < store.current())
                return 0
            with held:
                return pair.send_boxes(held, wants, most)
        if move.want:
            stream = self.fetcher.stream(move.ask)
            try:
                return pair.receive_boxes(move.version, stream)
            except Exception as error:
                stream.fail(f"{type(error).__name__}: {error}")
                raise
        with self._hold(move) as slot:
            ranges = self._ranges(move, slot)
            return pair.send(slot, ranges) if isinstance(slot, Reader) else pair.receive(slot, ranges)

    def _ranges(self, move: wire_gps.Move, held: Reader | Writer | Joined) -> list[Range]:
        """What is moved of the image; both ends say the same."""
        ranges = read_share(Path(move.shares), move.share) if move.shares else [(0, len(held.buffer))]
        return common(ranges, self._store.ranges(move.piles)) if move.piles else ranges

    def _hold(self, move: wire_gps.Move) -> Reader | Writer | Joined:
        if move.rank == _SENDER:
            return self._store.read(move.version, move.limit_s, is_sealed=False)
        if move.is_first:
            self._store.hide()
        if move.shares or move.piles:
            return self._store.write_more(move.version, move.limit_s)
        return self._store.write(move.version, move.limit_s)

    @cached_property
    def _store(self) -> Store:
        """Attached once: the page tables of its mappings are built once, too."""
        return Store.attach(self._name)


def main(sock: socket.socket, order: wire.WorkerOrder) -> NoReturn:
    """Called in a fresh fork of the zygote, with the socket to the agent. Options: `host`, the node's own address,
    `alive_s`, how often to say that it lives, and perhaps `device`, such as cuda:0, the same on both ends."""
    print(f"--- {order.start.worker} on {order.node}, attempt {order.attempt}, pid {os.getpid()}", flush=True)
    torch.set_num_threads(1)
    options = order.start.options
    saying = threading.Lock()

    def say(message: wire.ToItsAgent) -> None:
        """From any thread."""
        with saying:
            sock.sendall(wire.encode_message(message))

    fetcher = Fetcher(order.gps, RunFolder(Path(order.run)).rendezvous, say)
    mover = Mover(sock, f"{order.gps}-policy", options["host"], fetcher, say, options.get("device", ""))
    threading.Thread(target=fetcher.serve, name="door", daemon=True).start()
    threading.Thread(target=mover.live, args=(options["alive_s"],), name="alive", daemon=True).start()
    mover.serve()
