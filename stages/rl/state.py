"""A trainer's state as safetensors: written and read back bit for bit."""

from collections.abc import Mapping

import torch
from safetensors.torch import save
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer


def image(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> bytes:
    """A safetensors file. Copies, because names may share memory (a tied head)."""
    copies = {name: tensor.detach().to("cpu", dtype, copy=True).contiguous() for name, tensor in tensors.items()}
    data: bytes = save(copies, metadata={"format": "pt"})
    return data


def optimizer_tensors(model: Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """`<parameter>/<moment>` to tensor; nothing for a parameter that was never updated."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(model: Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse. Settings such as the learning rate stay those that the optimizer was made with."""
    states: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        parameter, _, key = name.rpartition("/")
        states.setdefault(parameter, {})[key] = tensor
    index_of = {name: i for i, (name, _) in enumerate(model.named_parameters())}
    by_index = {index_of[name]: state for name, state in states.items()}
    optimizer.load_state_dict({"state": by_index, "param_groups": optimizer.state_dict()["param_groups"]})
