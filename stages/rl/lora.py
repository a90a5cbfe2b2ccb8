"""Low-rank adapters beside a model's linear layers, by peft: they are trained, the weights are frozen.

Whoever reads weights sees none of it: what is published and saved has each adapter added to its layer's weight,
W + scale B A, under the base model's names. The frozen weights stay as they are, and are the KL reference.

Shape legend: O, I a layer's outputs and inputs, R the adapter's rank.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

from pipeline.config import Config
from pipeline.config_trainer import ALL_LINEAR, Lora
from pipeline.core.errors import ConfigError, RunError
from stages.rl.offload import local
from stages.rl.ranks import like, whole
from stages.weights.compare import differing

_NAME = "default"
_BASE, _A, _B = "base_layer.", f"lora_A.{_NAME}.weight", f"lora_B.{_NAME}.weight"
_SAVED_PREFIX, _SAVED_A, _SAVED_B = "base_model.model.", "lora_A.weight", "lora_B.weight"
"""What peft calls them in a file."""


@dataclass(frozen=True, slots=True)
class _Layer:
    a_RI: Tensor
    b_OR: Tensor
    scale: float

    def added_to(self, weight_OI: Tensor) -> Tensor:
        """W + scale B A, a new tensor. Of rows of the weight, with the same rows of B."""
        return torch.addmm(weight_OI, self.b_OR, self.a_RI, alpha=self.scale)


def adapt(model: Module, config: Config) -> None:
    """Put the adapters that `trainer.lora` asks for into the model and freeze all else; it computes what it did.

    Their first values depend on run.seed alone. Raises ConfigError where a layer cannot have one.
    """
    from peft import inject_adapter_in_model

    assert config.trainer.lora is not None
    chosen = _chosen(model, config.trainer.lora)
    with torch.random.fork_rng():
        torch.manual_seed(config.run.seed)
        inject_adapter_in_model(_peft_config(config.trainer.lora, chosen, config.model.policy.path), model, _NAME)
    if (found := _layers(model).keys()) != {f"{name}.weight" for name in chosen}:
        raise ConfigError(f"trainer.lora: of {', '.join(chosen)} peft has chosen {', '.join(sorted(found))}")
    model.eval()


@contextmanager
def without_adapters(model: Module) -> Iterator[None]:
    """The model computes what the base model does. peft's own switch would freeze the adapters as well, in the middle
    of a pass."""
    layers = [module for module in model.modules() if hasattr(module, "_disable_adapters")]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def frozen_state(model: Module) -> dict[str, Tensor]:
    """The model's state_dict without adapters, under the base model's names."""
    return {name.replace(_BASE, ""): tensor for name, tensor in model.state_dict().items() if not _is_adapter(name)}


def merged_state(model: Module, gather: Callable[[Tensor], Tensor] = whole) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the same, each adapter added to its weight; `gather` is what is made of a tensor that a rank
    holds (then collective). Without adapters: the state_dict."""
    layers = _layers(model)
    for name, tensor in frozen_state(model).items():
        layer, value = layers.get(name), gather(tensor)
        if layer is not None:
            value = _Layer(gather(layer.a_RI), gather(layer.b_OR), layer.scale).added_to(value)
        yield name, value


def merging(model: Module) -> Callable[[str, Tensor], Tensor]:
    """f(name, the rows that this rank has of a weight) is those rows with the adapter added. Making it is collective
    where the model is cut up; weights and B then are along the same rows."""
    layers = {name: _Layer(whole(layer.a_RI), local(layer.b_OR), layer.scale) for name, layer in _layers(model).items()}
    return lambda name, rows: layers[name].added_to(rows) if name in layers else rows


def adapter_tensors(model: Module, gather: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of all adapters, as peft saves them."""
    for name, tensor in _adapter_state(model).items():
        yield name, gather(tensor)


@torch.no_grad()
def restore_adapters(model: Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse, of whole tensors. Not collective. Raises RunError unless the adapters are the model's."""
    state = _adapter_state(model)
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if differences := differing(found, {name: tuple(tensor.shape) for name, tensor in state.items()}):
        raise RunError(f"the saved adapters are not those of trainer.lora: {differences}")
    for name, tensor in tensors.items():
        state[name].copy_(like(state[name], tensor))


def adapter_config(model: Module, lora: Lora, model_path: str) -> bytes:
    """peft's adapter_config.json."""
    chosen = sorted(name.removesuffix(".weight") for name in _layers(model))
    told = _peft_config(lora, chosen, model_path).to_dict() | {"target_modules": chosen, "inference_mode": True}
    return json.dumps(told, indent=2, sort_keys=True).encode()


def _chosen(model: Module, lora: Lora) -> list[str]:
    """The names of the layers that get an adapter. Raises ConfigError."""
    head = model.get_output_embeddings()
    linear = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
    if ALL_LINEAR in lora.target_modules:
        chosen = [name for name, module in linear.items() if module is not head]
    else:
        for target in lora.target_modules:
            if not any(_is_so_called(name, target) for name in linear):
                raise ConfigError(f"trainer.lora.target_modules: the model has no linear layer {target!r}")
        chosen = [name for name in linear if any(_is_so_called(name, target) for target in lora.target_modules)]
    chosen = [name for name in chosen if not any(_is_so_called(name, not_that) for not_that in lora.exclude_modules)]
    if model.config.tie_word_embeddings and any(linear[name] is head for name in chosen):
        raise ConfigError("trainer.lora.target_modules: the head of this model is its embedding, which gets no adapter")
    if not chosen:
        raise ConfigError("trainer.lora.exclude_modules leaves no layer that gets an adapter")
    return chosen


def _is_so_called(layer: str, name: str) -> bool:
    return f".{layer}".endswith(f".{name}")


def _peft_config(lora: Lora, chosen: list[str], model_path: str) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=chosen,
        use_rslora=lora.use_rslora,
        base_model_name_or_path=model_path,
        task_type="CAUSAL_LM",
    )


def _adapter_state(model: Module) -> dict[str, Tensor]:
    """All adapters as peft calls them in a file."""
    return {
        _SAVED_PREFIX + name.replace(_A, _SAVED_A).replace(_B, _SAVED_B): tensor
        for name, tensor in model.state_dict().items()
        if _is_adapter(name)
    }


def _is_adapter(name: str) -> bool:
    return name.endswith((_A, _B))


def _layers(model: Module) -> dict[str, _Layer]:
    """By the base model's name of the weight."""
    state = model.state_dict()
    found = {}
    for name, a_RI in state.items():
        if name.endswith(_A):
            module = name.removesuffix(f".{_A}")
            scale = model.get_submodule(module).scaling[_NAME]
            found[f"{module}.weight"] = _Layer(a_RI, state[f"{module}.{_B}"], scale)
    return found
