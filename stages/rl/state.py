"""A trainer's state as safetensors: written and read back bit for bit, whole, however it is cut up over ranks."""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from stages.rl.offload import local
from stages.rl.ranks import like, whole

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_MOMENTS = 2
_STEP_BYTES = 64
"""What the count of updates takes at most, with what it is aligned to."""


Gather = Callable[[Tensor], Tensor]
Named = Callable[[Gather], Iterator[tuple[str, Tensor]]]
"""The tensors of a file by name, each as what the argument makes of one that a rank holds."""


def image(named: Named, gather: Gather, dtype: torch.dtype, *, is_kept: bool = True) -> bytes:
    """A safetensors file, byte for byte as the library writes it, in memory for itself and for one tensor.

    With `is_kept` False the tensors, which may have to be gathered, are let go one after the other: nothing comes back.
    """
    if not is_kept:
        for _ in named(gather):
            pass
        return b""
    shapes = {name: tensor.shape for name, tensor in named(_described)}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in sorted(shapes):
        start, end = end, end + shapes[name].numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(shapes[name]), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    base = 8 + len(text)
    file = io.BytesIO()
    file.write(len(text).to_bytes(8, "little") + text)
    if end:
        file.seek(base + end - 1)  # one allocation, and no copy of it
        file.write(b"\0")
    with file.getbuffer() as buffer:
        for name, tensor in named(gather):
            start, stop = header[name]["data_offsets"]
            if stop > start:
                target = torch.frombuffer(buffer[base + start : base + stop], dtype=dtype).view(shapes[name])
                target.copy_(tensor.detach())
                del target
    return file.getvalue()


def _described(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, device="meta")


def trained_parameters(model: Module) -> dict[str, Parameter]:
    """What the optimizer is given, in its order: all that is not frozen."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def optimizer_tensors(model: Module, optimizer: Optimizer, gather: Gather = whole) -> Iterator[tuple[str, Tensor]]:
    """(`<parameter>/<moment>`, whole tensor); nothing for a parameter that was never updated."""
    for name, parameter in trained_parameters(model).items():
        # Sorted: after a load their order is the file's, which is another on each rank, and all gather the same one.
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"{name}/{key}", gather(value)


def held_moments(optimizer: Optimizer) -> tuple[list[Tensor], int]:
    """AdamW's tensors, and the bytes of those that it will make at the first update of each parameter."""
    held = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p not in optimizer.state]
    return held, sum(_MOMENTS * local(p).nbytes + _STEP_BYTES for p in parameters)


def restore_optimizer(model: Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse, in memory of the optimizer's own. Settings such as the learning rate stay those that it was made
    with."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition("/")
        states.setdefault(parameter, {})[key] = tensor
    parameters = trained_parameters(model)
    index_of = {name: i for i, name in enumerate(parameters)}
    by_index = {
        index_of[name]: {key: like(parameters[name], tensor).clone() for key, tensor in state.items()}
        for name, state in states.items()
    }
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
