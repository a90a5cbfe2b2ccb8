"""A trainer's tensors, away from its device and back, bit for bit and in place.

What is emptied and filled again are the storages: every tensor, view, parameter and DTensor stays the object that it
is, so optimizer, tied weights, DDP's reducer and FSDP's bookkeeping never notice. No other rank is needed.

    CPU     to a file in shared memory that is not mapped: the process itself holds none of it (host_memory.py)
    CUDA    to pinned buffers; copies overlap, the caching allocator gives the memory back to the device

The shape suffix C counts bytes.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from pipeline.kill_points import kill_point
from stages.rl.host_memory import SharedFile

_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 28


class HostMemory(Protocol):
    def reserve(self, num_bytes: int) -> None: ...

    def write(self, at: int, piece_C: Tensor) -> None: ...

    def read(self, at: int, piece_C: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the bytes of a storage are."""

    storage: UntypedStorage
    at: int
    num_bytes: int


class Offload:
    """`path`: see SharedFile; not used on CUDA. Takes no memory before the first `take`. `memory`: instead of that."""

    def __init__(self, device: torch.device, path: Path | None = None, memory: HostMemory | None = None) -> None:
        self._device = device
        self._path = path
        self._memory = memory
        self._places: dict[int, _Place] | None = None
        self._scratch: list[tuple[UntypedStorage, int]] = []

    @property
    def is_holding(self) -> bool:
        return self._places is not None

    @property
    def num_bytes(self) -> int:
        """Of what is away."""
        return sum(place.num_bytes for place in (self._places or {}).values())

    def take(self, tensors: Iterable[Tensor], scratch: Iterable[Tensor] = (), to_come_bytes: int = 0) -> None:
        """Copy those of the tensors that are on the device to the host, then empty them, and `scratch` too, whose
        content nobody needs. If anything fails, nothing was emptied.

        `to_come_bytes`: by how much this will be more another time. The host's memory is taken for that at once.
        """
        assert not self.is_holding
        places = {}
        end = 0
        for storage in _storages(tensors, self._device):
            places[_key(storage)] = _Place(storage, end, storage.nbytes())
            end += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        if self._memory is None:
            self._memory = Chunks() if self._device.type == "cuda" else _File(self._path)
        self._memory.reserve(end + to_come_bytes)
        for place in places.values():
            self._memory.write(place.at, _bytes_of(place.storage))
            kill_point("down.offload")
        self._wait()
        self._scratch = [(s, s.nbytes()) for s in _storages(scratch, self._device) if _key(s) not in places]
        self._places = places
        for storage in [*(place.storage for place in places.values()), *(s for s, _ in self._scratch)]:
            storage.resize_(0)
        self.trim()

    def give_back(self) -> None:
        """Fill all tensors again. After an error they are of no use."""
        assert self._places is not None and self._memory is not None
        for place in self._places.values():
            place.storage.resize_(place.num_bytes)
            self._memory.read(place.at, _bytes_of(place.storage))
            kill_point("up.restore")
        for storage, num_bytes in self._scratch:
            storage.resize_(num_bytes)
        self._wait()
        self._places, self._scratch = None, []

    def on_host(self, tensor: Tensor) -> Tensor:
        """The tensor in host memory, or the part of it that is here, whether it is away or not. To be read only."""
        tensor = local(tensor.detach())
        place = (self._places or {}).get(_key(tensor.untyped_storage()))
        if place is None:
            return tensor.cpu()
        assert self._memory is not None
        image_C = torch.frombuffer(mmap.mmap(-1, place.num_bytes), dtype=torch.uint8)  # malloc would keep it
        self._memory.read(place.at, image_C)
        return image_C.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def trim(self) -> None:
        """Freed memory goes back to the system."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        ctypes.CDLL(None).malloc_trim(0)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class _File:
    """SharedFile, for tensors on the CPU."""

    def __init__(self, path: Path | None) -> None:
        self._file = SharedFile(path)

    def reserve(self, num_bytes: int) -> None:
        self._file.reserve(num_bytes)

    def write(self, at: int, piece_C: Tensor) -> None:
        self._file.write(at, _view(piece_C))

    def read(self, at: int, piece_C: Tensor) -> None:
        self._file.read(at, _view(piece_C))


def _view(piece_C: Tensor) -> memoryview:
    """Not by numpy(): after that torch never resizes the storage again."""
    return memoryview((ctypes.c_ubyte * len(piece_C)).from_address(piece_C.data_ptr())).cast("B")


def _pinned(num_bytes: int) -> Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


class Chunks:
    """Pinned memory in pieces of one size, a power of two: torch would round up a larger one to the next.

    Pinning is slow, so all of it is pinned at the first sleep, which is part of the start. `num_allocations` says
    whether that was so.
    """

    def __init__(self, chunk_bytes: int = _CHUNK_BYTES, allocate: Callable[[int], Tensor] = _pinned) -> None:
        self._chunk_bytes = chunk_bytes
        self._allocate = allocate
        self._chunks: list[Tensor] = []
        self.num_allocations = 0

    def reserve(self, num_bytes: int) -> None:
        while len(self._chunks) * self._chunk_bytes < num_bytes:
            self._chunks.append(self._allocate(self._chunk_bytes))
            self.num_allocations += 1

    def write(self, at: int, piece_C: Tensor) -> None:
        for chunk_C, part_C in self._parts(at, piece_C):
            chunk_C.copy_(part_C, non_blocking=True)

    def read(self, at: int, piece_C: Tensor) -> None:
        for chunk_C, part_C in self._parts(at, piece_C):
            part_C.copy_(chunk_C, non_blocking=True)

    def _parts(self, at: int, piece_C: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What of which chunk belongs to what of the piece."""
        done = 0
        while done < len(piece_C):
            number, start = divmod(at + done, self._chunk_bytes)
            length = min(self._chunk_bytes - start, len(piece_C) - done)
            yield self._chunks[number][start : start + length], piece_C[done : done + length]
            done += length


def _storages(tensors: Iterable[Tensor], device: torch.device) -> Iterator[UntypedStorage]:
    """Each once, in the order of the tensors. Raises ValueError for one that is not torch's own memory."""
    seen = set()
    for tensor in map(local, tensors):
        storage = tensor.untyped_storage()
        if storage.device.type != device.type or not storage.nbytes() or _key(storage) in seen:
            continue
        if not storage.resizable():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} lies in memory that torch cannot give back")
        seen.add(_key(storage))
        yield storage


def local(tensor: Tensor) -> Tensor:
    """The part of it that is here, if it is cut up over ranks."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _key(storage: UntypedStorage) -> int:
    """The address of its description, which stays when its memory goes."""
    return storage._cdata


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
