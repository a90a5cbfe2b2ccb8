"""A trainer's state as safetensors: written and read back bit for bit, whole, however it is cut up over ranks."""

from collections.abc import Iterable, Iterator, Mapping

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from stages.rl.ranks import like, whole


def image(tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype, *, is_kept: bool = True) -> bytes:
    """A safetensors file. Copies, because names may share memory (a tied head).

    With `is_kept` False the tensors, which may have to be gathered, are let go one after the other: nothing comes back.
    """
    copies = {}
    for name, tensor in tensors:
        if is_kept:
            copies[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
    return save(copies, metadata={"format": "pt"}) if is_kept else b""


def optimizer_tensors(model: Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """(`<parameter>/<moment>`, whole tensor); nothing for a parameter that was never updated."""
    for name, parameter in model.named_parameters():
        # Sorted: after a load their order is the file's, which is another on each rank, and all gather the same one.
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            yield f"{name}/{key}", whole(value)


def restore_optimizer(model: Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse. Settings such as the learning rate stay those that the optimizer was made with."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition("/")
        states.setdefault(parameter, {})[key] = tensor
    index_of = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    parameters = dict(model.named_parameters())
    by_index = {
        index_of[name]: {key: like(parameters[name], tensor) for key, tensor in state.items()}
        for name, state in states.items()
    }
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
