"""What carries bytes between two movers: pieces of an image one way, a few words in either direction.

    GlooLine     from memory into memory: what is sent and what is received is the weight store itself
    StagedLine   over one buffer on a device with two halves: one is copied while the other travels. For NCCL, which
                 knows device memory alone; any process group will do

Both ends make the same calls in the same order, one sends where the other receives. gloo ends a wait at the line's
limit; NCCL does not: there the agent's limit on a move is the only one.

The shape suffix C counts the bytes of a piece.
"""

import datetime
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Backend, ProcessGroupGloo, Store, Work

from pipeline.gps.wants import PIECE_BYTES

_IN_FLIGHT = 2
_TALK = 1 << 20
"""Tag of everything that is not a piece."""


class Line(Protocol):
    def say(self, words: Tensor) -> None: ...

    def hear(self, words: Tensor) -> Tensor:
        """Fills `words`, and returns it."""

    def send(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yields each piece when it is under way. All are sent when, and only when, this is exhausted. The next but one
        is asked for when a piece has left: two buffers are enough."""

    def receive(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """Fills the pieces in their order; yields each when it is there, while the next one arrives: that is asked for
        before."""


class GlooLine:
    """One of the two ends. Raises RuntimeError, here and in each wait, if the other does not come within `limit_s`."""

    def __init__(self, store: Store, rank: int, host: str, limit_s: float) -> None:
        """`host`: the own address, for the other to connect to."""
        self._group = gloo_group(store, rank, host, limit_s)
        self._other = 1 - rank

    def say(self, words: Tensor) -> None:
        self._group.send([words], self._other, _TALK).wait()

    def hear(self, words: Tensor) -> Tensor:
        self._group.recv([words], self._other, _TALK).wait()
        return words

    def send(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        works: deque[Work] = deque()
        for tag, piece_C in enumerate(pieces):
            works.append(self._group.send([piece_C], self._other, tag))
            yield piece_C
            if len(works) == _IN_FLIGHT:
                works.popleft().wait()
        for work in works:
            work.wait()

    def receive(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        coming: deque[tuple[Tensor, Work]] = deque()
        for tag, piece_C in enumerate(pieces):
            coming.append((piece_C, self._group.recv([piece_C], self._other, tag)))
            if len(coming) == _IN_FLIGHT:
                yield _come(*coming.popleft())
        while coming:
            yield _come(*coming.popleft())


class StagedLine:
    """An end of a group of two; or the only member of a group of one, which can but `loop`."""

    def __init__(self, group: Backend, device: torch.device, piece_bytes: int = PIECE_BYTES) -> None:
        self._group = group
        self._other = 1 - group.rank() if group.size() == 2 else 0
        self._device = device
        self._halves_2C = torch.empty((2, piece_bytes), dtype=torch.uint8, device=device)

    def say(self, words: Tensor) -> None:
        self._group.send([words.to(self._device)], self._other, _TALK).wait()
        self._finish()

    def hear(self, words: Tensor) -> Tensor:
        arrived = torch.empty_like(words, device=self._device)
        self._group.recv([arrived], self._other, _TALK).wait()
        return words.copy_(arrived)

    def send(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        """A half is filled again when what it held has left: NCCL's wait is the stream's, and the copy is on it."""
        works = []
        for i, piece_C in enumerate(pieces):
            if i >= 2:
                works[i - 2].wait()
            half_C = self._half(i, piece_C)
            half_C.copy_(piece_C, non_blocking=True)
            works.append(self._group.send([half_C], self._other, 0))
            yield piece_C
        for work in works[-2:]:
            work.wait()
        self._finish()

    def receive(self, pieces: Iterable[Tensor]) -> Iterator[Tensor]:
        coming: deque[tuple[Tensor, Tensor, Work]] = deque()
        for i, piece_C in enumerate(pieces):  # its half was copied from in the last round
            half_C = self._half(i, piece_C)
            coming.append((piece_C, half_C, self._group.recv([half_C], self._other, 0)))
            if len(coming) == _IN_FLIGHT:
                yield _copied(*coming.popleft())
        while coming:
            yield _copied(*coming.popleft())

    def loop(self, pieces: Sequence[Tensor], into: Sequence[Tensor]) -> None:
        """In a group of one: each piece goes out of one half and comes in by the other."""
        for source_C, target_C in zip(pieces, into, strict=True):
            out_C, in_C = self._half(0, source_C), self._half(1, target_C)
            out_C.copy_(source_C, non_blocking=True)
            self._group._start_coalescing()  # a send to oneself waits for its receive
            self._group.send([out_C], 0, 0)
            self._group.recv([in_C], 0, 0)
            self._group._end_coalescing().wait()
            target_C.copy_(in_C)

    def _half(self, i: int, piece_C: Tensor) -> Tensor:
        return self._halves_2C[i % 2, : len(piece_C)]

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _come(piece_C: Tensor, work: Work) -> Tensor:
    work.wait()
    return piece_C


def _copied(piece_C: Tensor, half_C: Tensor, work: Work) -> Tensor:
    work.wait()
    return piece_C.copy_(half_C)


def gloo_group(store: Store, rank: int, host: str, limit_s: float) -> ProcessGroupGloo:
    options = ProcessGroupGloo._Options()
    options._timeout = datetime.timedelta(seconds=limit_s)
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    return ProcessGroupGloo(store, rank, 2, options)


def nccl_group(store: Store, rank: int, size: int, limit_s: float) -> Backend:
    """Its device is the one that the first tensor is on. NCCL takes no two ranks on one device."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(seconds=limit_s)
    return ProcessGroupNCCL(store, rank, size, options)
