"""The policy as a Hugging Face model: made from canonical tensors, always in float32 (the master weights).

Canonical means: the names of the model's own checkpoint files, as the GPS holds them.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Module

from pipeline.config import Model
from pipeline.core.errors import ConfigError
from pipeline.gps.segment import fill, plan_image
from stages.engines.vllm_start import hide_broken_packages
from stages.weights.compare import differing
from stages.weights.tensors import canonical, tensors_in

hide_broken_packages()  # before transformers, which would import them
from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging as transformers_logging  # noqa: E402

_WEIGHT_FILES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf", ".h5")


def base_tensors(model: Model) -> dict[str, Tensor]:
    """The base model's tensors in the declared dtype: the same bytes as version 0 in the GPS."""
    image = plan_image(model.path, model.dtype)
    buffer = memoryview(bytearray(image.nbytes))
    fill(image, buffer)
    return tensors_in(buffer, image.entries)


def build(model: Model, tensors: Mapping[str, Tensor], *, trust_remote_code: bool) -> Module:
    """A model of `model.path`'s architecture that holds a float32 copy of `tensors`, in eval mode: no dropout.

    Raises ConfigError unless the names and shapes of `tensors` are exactly those of the architecture.
    """
    transformers_logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(model.path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        kind = type(AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code))
    copies = {name: tensor.to(torch.float32, copy=True) for name, tensor in tensors.items()}
    built, info = kind.from_pretrained(
        None,
        config=config,
        state_dict=copies,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # they are in `info`
        output_loading_info=True,
    )
    problems = {what: sorted(map(str, names)) for what, names in info.items() if names}
    named = dict(canonical_tensors(built.state_dict().items(), tensors.keys()))
    problems |= {"differences": [found]} if (found := differing(_shapes(named), _shapes(tensors))) else {}
    if problems:
        raise ConfigError(f"the weights in {model.path} are not those of a {kind.__name__}: {problems}")
    return built.eval()


def canonical_tensors(state: Iterable[tuple[str, Tensor]], names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """A model's tensors under canonical names, of those in `names` (a tied head may be in or out): views, one after the
    other."""
    for name, tensor in state:
        yield from (found for found in canonical({name: tensor}).items() if found[0] in names)


def digest(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        total.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    return total.hexdigest()


def description_files(model: Model) -> Iterator[tuple[str, bytes]]:
    """(name, content) of config, tokenizer and the like: all of the model's folder but weights.

    The config says the dtype that the weights are saved in, so that loading it changes nothing.
    """
    for path in sorted(Path(model.path).iterdir()):
        if not path.is_file() or path.name.endswith(_WEIGHT_FILES):
            continue
        data = path.read_bytes()
        if path.name == "config.json":
            config = json.loads(data)
            config.pop("torch_dtype", None)
            data = json.dumps(config | {"dtype": model.dtype}, indent=2).encode()
        yield path.name, data


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}
