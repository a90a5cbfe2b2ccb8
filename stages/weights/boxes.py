"""What a layout says, carried out on tensors: boxes between canonical tensors and a rank's own."""

from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from pipeline.gps.layout import Box, Part, Place

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


@torch.no_grad()
def read(parts: Iterable[Part], canonical: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Fill a rank's own tensors, converting to their dtype. KeyError for a tensor that is not there."""
    for name, box, place in parts:
        copy(at(own[place.tensor], place, box), box_of(canonical[name], box))


@torch.no_grad()
def write(parts: Iterable[Part], own: Mapping[str, Tensor], canonical: Mapping[str, Tensor]) -> None:
    """The other way."""
    for name, box, place in parts:
        copy(box_of(canonical[name], box), at(own[place.tensor], place, box))
