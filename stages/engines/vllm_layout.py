"""Where vLLM puts each canonical tensor, learnt from its own loader, and reads that go there without the loader.

The loader is run once on tensors without data: what it would copy is written down instead, as the layout of this rank.
It is proven when what the loader made of real weights is, bit for bit, what the layout says, and every element is
accounted for. Where it is not (a loader that computes, say), updates go through vLLM's loader.

A parameter that vLLM uses as it was loaded is filled in place. A module that made something else of its parameters
(packed copies, another order) is given fresh ones, which are filled, and makes the same of them again.
"""

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.model_executor.model_loader.reload import layerwise

from pipeline.gps.layout import Box, Part, Place, Shape, row_major
from stages.weights.boxes import Held, at, fill, pieces


class _Recorder(TorchDispatchMode):
    """Writes down copies out of tensors that have no data, instead of making them."""

    def __init__(self, sources: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._sources = {tensor.untyped_storage()._cdata: name for name, tensor in sources.items()}
        self._shapes = {name: tuple(tensor.shape) for name, tensor in sources.items()}
        self._parameters = {tensor.untyped_storage()._cdata: name for name, tensor in parameters.items()}
        self.parts: list[Part] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.copy_.default and args[1].device.type == "meta" != args[0].device.type:
            self.parts.append(self._part(args[0], args[1]))
            return args[0]
        return function(*args, **(kwargs or {}))

    def _part(self, target: Tensor, source: Tensor) -> Part:
        """Raises KeyError or ValueError where one is no view of a tensor that is known."""
        name = self._sources[source.untyped_storage()._cdata]
        tensor = self._parameters[target.untyped_storage()._cdata]
        box, strides = _box(self._shapes[name], source, target)
        return Part(name, box, Place(tensor, target.storage_offset(), strides))


def _box(shape: Shape, source: Tensor, target: Tensor) -> tuple[Box, Shape]:
    """Which box of a contiguous tensor a view of it is, and where its dimensions go in a view of the same shape."""
    if source.shape != target.shape:
        raise ValueError(f"{tuple(source.shape)} is spread over {tuple(target.shape)}")
    canonical = row_major(shape)
    rest, start = source.storage_offset(), []
    for stride in canonical:
        start.append(rest // stride)
        rest %= stride
    stop, strides = [i + 1 for i in start], [0] * len(shape)
    for length, stride, own_stride in zip(source.shape, source.stride(), target.stride(), strict=True):
        if length == 1:
            continue
        axis = next((d for d, s in enumerate(canonical) if s == stride and start[d] + length <= shape[d]), None)
        if axis is None or stop[axis] != start[axis] + 1:
            raise ValueError(f"a view with strides {source.stride()} is no box of a tensor of shape {shape}")
        stop[axis], strides[axis] = start[axis] + length, own_stride
    return Box(tuple(start), tuple(stop)), tuple(strides)


class NotProven(Exception):
    """It says why."""


def learn(model: Module, weights: Mapping[str, Tensor]) -> tuple[Part, ...]:
    """The parts of this rank, whose tensors are named as vLLM's parameters are. Of a model that vLLM's loader has just
    given `weights`, before anything is made of them; its parameters stay as they are. Raises NotProven."""
    parameters = dict(model.named_parameters())
    sources = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in weights.items()}
    recorder = _Recorder(sources, parameters)
    try:
        with recorder, torch.no_grad():
            model.load_weights(iter(sources.items()))
    except Exception as error:  # whatever a loader does that is no copy
        raise NotProven(f"{type(error).__name__}: {error}") from error
    if why := _why_not(recorder.parts, weights, parameters):
        raise NotProven(why)
    return tuple(recorder.parts)


@torch.no_grad()
def remade(model: Module, parts: Sequence[Part], weights: Mapping[str, Tensor]) -> frozenset[str]:
    """The modules that do not use their parameters as they were loaded. Of a model that has `weights`."""
    parameters = dict(model.named_parameters())
    found = set()
    for (_, box, place), tensor in pieces(parts, weights):
        module, parameter = place.tensor.rpartition(".")[0], parameters[place.tensor]
        is_there = parameter.numel() and torch.equal(at(parameter.data, place, box), tensor)
        if not is_there or hasattr(model.get_submodule(module), "cpu_linear"):
            found.add(module)
    return frozenset(found)


def read_parts(model: Module, parts: Iterable[Part], weights: Mapping[str, Tensor], remade: Container[str]) -> None:
    """Give the model other weights. Inside of `set_current_vllm_config`. Raises WeightsUnavailable, and can be called
    again then, where other nodes do not give what they hold."""
    by_module: defaultdict[str, list[Part]] = defaultdict(list)
    for part in parts:
        by_module[part.place.tensor.rpartition(".")[0]].append(part)
    is_passing = isinstance(weights, Held)  # what comes from another node is there only until the next comes
    coming = pieces([part for own in by_module.values() for part in own], weights)
    for name, own_parts in by_module.items():
        module = model.get_submodule(name)
        mine = _of(own_parts, coming)
        if name not in remade:
            fill(_parameters(module, name), mine)
        else:
            _make_again(module, name, [(part, t.clone() if is_passing else t) for part, t in mine])
    assert next(coming, None) is None  # and is at its end


def _of(parts: Iterable[Part], coming: Iterator[tuple[Part, Tensor]]) -> Iterator[tuple[Part, Tensor]]:
    """What comes until these are all there."""
    for wanted in parts:
        for part, tensor in coming:
            yield part, tensor
            if part.box.stop == wanted.box.stop:
                break


@torch.no_grad()
def _make_again(module: Module, name: str, given: list[tuple[Part, Tensor]]) -> None:
    """As vLLM's layerwise reload does with a module whose weights have all come."""
    info = layerwise.get_layerwise_info(module)
    info.kernel_tensors = layerwise.get_layer_params_buffers(module)
    info.kernel_non_persistent_buffers = set(module._non_persistent_buffers_set)
    layerwise.restore_layer_on_meta(module, info)
    layerwise.materialize_layer(module, info)
    if hasattr(module, "_already_called_process_weights_after_loading"):
        del module._already_called_process_weights_after_loading
    own = _parameters(module, name)
    for tensor in own.values():
        tensor.zero_()  # what is padding
    fill(own, given)
    module.quant_method.process_weights_after_loading(module)
    layerwise._copy_and_restore_kernel_tensors(module, info)
    info.reset()


def _parameters(module: Module, name: str) -> dict[str, Tensor]:
    return {f"{name}.{own}": parameter.data for own, parameter in module.named_parameters(recurse=False)}


@torch.no_grad()
def _why_not(parts: list[Part], weights: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> str:
    """What the parts do not explain of the parameters; nothing if they are proven."""
    filled = dict.fromkeys(parameters, 0)
    for (name, box, place), tensor in pieces(parts, weights):
        if parameters[place.tensor].dtype != tensor.dtype:
            return f"{place.tensor} has another dtype than {name}"
        if not torch.equal(at(parameters[place.tensor].data, place, box), tensor):
            return f"{place.tensor} is not what {name} says"
    for part in parts:
        filled[part.place.tensor] += part.box.size
    for name, parameter in parameters.items():
        if filled[name] != parameter.numel() and not (filled[name] and _is_padded(name, parameter, parts)):
            return f"{filled[name]} of {parameter.numel()} elements of {name} come from the weight store"
    return ""


def _is_padded(name: str, parameter: Tensor, parts: list[Part]) -> bool:
    """What no part fills are rows at the end, and zero."""
    rows = sum(part.box.shape[0] for part in parts if part.place.tensor == name)
    return parameter.dim() == 2 and not parameter.data[rows:].any()
