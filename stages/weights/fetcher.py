"""The mover's side of reads from other nodes: readers of its node ask here, and get pieces through a buffer.

    door thread      waits for readers of this node
    reader threads   one per reader: its wants are planned over those who hold them, and fetched from all at once
    pair threads     the mover's; each fills the halves that its source has in the reader's buffer, as they are emptied

A source serves one reader of a node at a time; who wants several waits for all of them, in their order.
"""

import itertools
import os
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from pipeline import wire_gps
from pipeline.core.errors import WeightsUnavailable
from pipeline.gps.elsewhere import BUFFER_BYTES, Ask, Begun, Emptied, End, Failed, Filled, address, half_bytes
from pipeline.gps.layout import Layout, Part, Place, Shapes
from pipeline.gps.loads import Ends
from pipeline.gps.placement import held_by
from pipeline.gps.plan_cache import PlanCache
from pipeline.gps.segment import ITEM_BYTES
from pipeline.gps.store import Store
from pipeline.gps.wants import Piece, Want, cut_up, read_wants, write_wants

_NOWHERE = Place("", 0, ())
_END_S = 2.0


@dataclass
class Stream:
    """What comes from one source into the halves of a reader's buffer. `over`: the controller has been told how it
    ended; only then the source is asked again, so that the pair of movers is still one."""

    ask: int
    number: int
    pieces: Sequence[Piece]
    halves: tuple[Tensor, Tensor]
    say: Callable[[Filled | Failed], None]
    emptied: "queue.SimpleQueue[bool]" = field(default_factory=queue.SimpleQueue)
    over: threading.Event = field(default_factory=threading.Event)

    def places(self) -> Iterator[Tensor]:
        """Where the pieces go, one after the other; waits until the half is empty. RuntimeError if nobody reads."""
        for i, piece in enumerate(self.pieces):
            if i >= 2 and not self.emptied.get():
                raise RuntimeError("nobody reads it any more")
            yield self.halves[i % 2][: piece.nbytes]

    def fail(self, reason: str, *, is_gone: bool = False) -> None:
        """The reader hears of it, if it is still there, and of nothing after it."""
        with suppress(OSError):
            self.say(Failed(reason, is_gone))

    def end(self) -> None:
        """Nobody reads the rest. Waits for its pair, unless that hangs: then the next read gets another."""
        self.emptied.put(False)
        self.over.wait(_END_S)


class Fetcher:
    """`gps`: base name of the node's shared memory; `folder`: for the files of wants; `send` reaches the controller."""

    def __init__(self, gps: str, folder: Path, send: Callable[[wire_gps.FetchAsked], None]) -> None:
        self._gps, self._folder, self._send = gps, folder, send
        self._piles: dict[str, list[int]] = {}
        self._asks = itertools.count(1)
        self._streams: dict[int, Stream] = {}
        self._sources: dict[str, threading.Lock] = {}
        self._planning = threading.Lock()
        self.store = cache(self._attached)
        self._plans = cache(self._plans_of)

    def serve(self) -> NoReturn:
        """Endless: the door thread."""
        door = socket.socket(socket.AF_UNIX)
        door.bind(address(self._gps))
        door.listen()
        while True:
            sock, _ = door.accept()
            _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid == os.getuid():
                threading.Thread(target=self._read_for, args=(sock,), name="reader", daemon=True).start()
            else:
                sock.close()

    def hear(self, message: wire_gps.Holders | wire_gps.FetchFailed) -> None:
        """From the main thread."""
        match message:
            case wire_gps.Holders(piles=piles):
                self._piles = piles
            case wire_gps.FetchFailed(ask=ask, reason=reason):
                if stream := self._streams.get(ask):
                    stream.over.set()
                    stream.fail(reason)

    def stream(self, ask: int) -> Stream:
        """What was asked for under this number. Raises LookupError if nobody waits for it any more."""
        return self._streams[ask]

    def told(self, move: wire_gps.Move) -> None:
        """The controller has heard how it ended."""
        if stream := self._streams.get(move.ask):
            stream.over.set()

    # --- a reader ----------------------------------------------------------------------------------------------------

    def _read_for(self, sock: socket.socket) -> None:
        """The thread of a reader: one wish after the other, until it goes."""
        fd = os.memfd_create("elsewhere")
        os.ftruncate(fd, BUFFER_BYTES)
        buffer = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=BUFFER_BYTES, dtype=torch.uint8)
        end = End(sock)
        try:
            socket.send_fds(sock, [b"b"], [fd])
            while True:
                asked = end.hear()
                if isinstance(asked, Ask):
                    self._fetch(asked, end, buffer)
        except (OSError, EOFError):
            pass  # it has gone
        finally:
            os.close(fd)
            end.close()

    def _fetch(self, ask: Ask, end: End, buffer: Tensor) -> None:
        try:
            wants, _ = read_wants(Path(ask.want))
            by_source, is_known = self._plan(ask.store, wants)
        except (WeightsUnavailable, KeyError) as error:
            end.say(Failed(str(error)))
            return
        saying = threading.Lock()

        def say(message: Filled | Failed) -> None:
            with saying:
                end.say(message)

        half = half_bytes(len(by_source))
        streams: list[Stream] = []
        with ExitStack() as held:
            for source in sorted(by_source):
                held.enter_context(self._sources.setdefault(source, threading.Lock()))
            end.say(Begun(list(by_source.values())))
            for number, (source, numbers) in enumerate(by_source.items()):
                own = [wants[i] for i in numbers]
                at = 2 * number * half
                halves = (buffer[at : at + half], buffer[at + half : at + 2 * half])
                pieces = cut_up(own, self.store(ask.store).entries, half)
                stream = Stream(next(self._asks), number, pieces, halves, say)
                streams.append(stream)
                self._streams[stream.ask] = stream
                path = write_wants(self._folder, own, half)
                self._send(
                    wire_gps.FetchAsked(
                        worker=wire_gps.MOVER,
                        ask=stream.ask,
                        source=source,
                        store=ask.store,
                        version=ask.version,
                        want=str(path),
                        is_known=is_known,
                    )
                )
            try:
                self._attend(end, streams)
            finally:
                for stream in streams:
                    stream.end()
                    del self._streams[stream.ask]

    def _attend(self, end: End, streams: Sequence[Stream]) -> None:
        """Until the reader has all pieces. Of a source that fails it hears, goes, and comes again."""
        for _ in range(sum(len(stream.pieces) for stream in streams)):
            emptied = end.hear()
            if not isinstance(emptied, Emptied):
                raise EOFError(f"{emptied} from a reader")
            streams[emptied.source].emptied.put(True)

    # --- plans -------------------------------------------------------------------------------------------------------

    def _plan(self, store: str, wants: Sequence[Want]) -> tuple[dict[str, list[int]], bool]:
        """Which wants come from which node, ascending; and whether that was known. Raises WeightsUnavailable where
        nobody has one of them."""
        piles = self._piles
        nodes = sorted(piles)
        if not nodes:
            raise WeightsUnavailable("no other node holds anything yet")
        with self._planning:
            plans = self._plans(store)
            before = plans.cache.hits
            sources = plans.sources(tuple(tuple(piles[node]) for node in nodes), tuple(wants))
            is_known = plans.cache.hits > before
        found: dict[str, list[int]] = {}
        for number, source in enumerate(sources):
            found.setdefault(nodes[source], []).append(number)
        return found, is_known

    def _attached(self, store: str) -> Store:
        return Store.attach(f"{self._gps}-{store}")

    def _plans_of(self, store: str) -> "_Plans":
        return _Plans(self.store(store))


class _Plans:
    """Of one store's model."""

    def __init__(self, store: Store) -> None:
        self._shapes: Shapes = {name: entry.shape for name, entry in store.entries.items()}
        self._pile_of = store.pile_of
        item_bytes = max(ITEM_BYTES[entry.dtype] for entry in store.entries.values())
        self.cache = PlanCache(self._shapes, item_bytes)
        self._have, self._want = cache(self._held_by), cache(self._wanted)

    def sources(self, piles: tuple[tuple[int, ...], ...], wants: tuple[Want, ...]) -> list[int]:
        """Of each want, the number of the node that gives it; `piles` are what the nodes have."""
        have = self._have(piles)
        ends = Ends(sources=tuple(range(len(piles))), replicas=((len(piles),),))
        givers: dict[str, list[tuple[int, Want]]] = {}
        for share in self.cache.plan(have, self._want(wants), ends).shares:
            for name in share.names:
                givers.setdefault(name, []).append((share.source, Want(name, share.box)))
        return [next(source for source, of in givers[want.name] if want.box.contains(of.box)) for want in wants]

    def _held_by(self, piles: tuple[tuple[int, ...], ...]) -> Layout:
        return held_by(self._shapes, self._pile_of, piles)

    def _wanted(self, wants: tuple[Want, ...]) -> Layout:
        return Layout((tuple(Part(name, box, _NOWHERE) for name, box in dict.fromkeys(wants)),), ({},))
