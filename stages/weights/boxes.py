"""What a layout says, carried out on tensors: boxes between canonical tensors and a rank's own."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from pipeline.gps.layout import Box, Part, Place, alone, part_of, whole
from pipeline.gps.store import Reader
from pipeline.gps.wants import Want
from stages.weights.tensors import dtype_of, views

_SHORT_BYTES = 1024
_WORDS = {2: torch.int16, 4: torch.int32}


def box_of(tensor: Tensor, box: Box) -> Tensor:
    """A view of the box."""
    for axis, (start, stop) in enumerate(zip(box.start, box.stop, strict=True)):
        if stop - start != tensor.shape[axis]:
            tensor = tensor.narrow(axis, start, stop - start)
    return tensor


def at(tensor: Tensor, place: Place, box: Box) -> Tensor:
    """A view of where the box lies in a rank's tensor, which is contiguous."""
    return tensor.as_strided(box.shape, place.strides, tensor.storage_offset() + place.offset)


def copy(target: Tensor, source: Tensor) -> None:
    """Converting, where dtypes differ. Of short runs of neighbours numpy copies twice as many in a second as torch."""
    if _has_short_runs(source) and target.dtype == source.dtype and target.device == source.device:
        words = _WORDS[source.dtype.itemsize]
        np.copyto(target.view(words).numpy(), source.view(words).numpy())
    else:
        target.copy_(source)


def _has_short_runs(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.dim() == 2
        and tensor.stride(1) == 1
        and tensor.stride(0) != tensor.shape[1]
        and tensor.shape[1] * tensor.dtype.itemsize <= _SHORT_BYTES
        and tensor.dtype.itemsize in _WORDS
    )


class Held(Mapping[str, Tensor]):
    """All tensors of a version. Those that this node holds are views; others are brought from other nodes when they are
    asked for, whole, or box by box in `pieces`."""

    def __init__(self, reader: Reader) -> None:
        self._reader, self._here = reader, views(reader)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.entries)

    def __len__(self) -> int:
        return len(self._reader.entries)

    def __getitem__(self, name: str) -> Tensor:
        if name in self._here:
            return self._here[name]
        entry = self._reader.entries[name]
        tensor = torch.empty(entry.shape, dtype=dtype_of(entry))
        for part, piece in self.pieces([alone(name, whole(entry.shape))]):
            box_of(tensor, part.box).copy_(piece)
        return tensor

    def pieces(self, parts: Sequence[Part]) -> Iterator[tuple[Part, Tensor]]:
        wants = [Want(name, box) for name, box, _ in parts if name not in self._here]
        coming = self._reader.fetch(wants) if wants else iter(())
        for part in parts:
            if part.name in self._here:
                yield part, box_of(self._here[part.name], part.box)
                continue
            dtype = dtype_of(self._reader.entries[part.name])
            while True:
                packed, data = next(coming)
                box = packed.want.box
                yield part_of([part], box), torch.frombuffer(data, dtype=dtype).view(box.shape)
                if box.stop == part.box.stop:
                    break
        assert next(coming, None) is None  # at its end, what it came through is free for the next read


def all_of(reader: Reader) -> Mapping[str, Tensor]:
    """Of the version that is held for reading."""
    return views(reader) if reader.is_whole else Held(reader)


def pieces(parts: Sequence[Part], canonical: Mapping[str, Tensor]) -> Iterator[tuple[Part, Tensor]]:
    """Each part with what is in it, in their order; what comes from another node in parts of it, each there only until
    the next is asked for, perhaps more than once, the one with its last element last."""
    if isinstance(canonical, Held):
        yield from canonical.pieces(parts)
    else:
        yield from ((part, box_of(canonical[part.name], part.box)) for part in parts)


@torch.no_grad()
def fill(own: Mapping[str, Tensor], given: Iterable[tuple[Part, Tensor]]) -> None:
    """A rank's own tensors, converting to their dtype."""
    for (_, box, place), tensor in given:
        copy(at(own[place.tensor], place, box), tensor)


def read(parts: Sequence[Part], canonical: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """KeyError for a tensor that is not there."""
    fill(own, pieces(parts, canonical))


@torch.no_grad()
def write(parts: Iterable[Part], own: Mapping[str, Tensor], canonical: Mapping[str, Tensor]) -> None:
    """The other way."""
    for name, box, place in parts:
        copy(box_of(canonical[name], box), at(own[place.tensor], place, box))
