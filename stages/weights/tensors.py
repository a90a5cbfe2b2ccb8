"""Weights as torch tensors: views over the GPS, and a trainer's parameters under their canonical names.

Shape legend: E experts, I the experts' inner size, H hidden size.
"""

import re
import warnings
from collections.abc import Mapping

import torch

from pipeline.core.errors import UpdateRefused
from pipeline.gps.segment import Entry
from pipeline.gps.store import Joined, Reader, Store, Writer
from stages.weights.compare import differing

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_FUSED_EXPERTS = re.compile(r"(?P<prefix>.*\.experts)\.(?P<kind>gate_up_proj|down_proj)")


def dtype_of(entry: Entry) -> torch.dtype:
    return _DTYPES[entry.dtype]


def table_of(store: Store) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of every tensor of its versions."""
    return {name: (entry.shape, dtype_of(entry)) for name, entry in store.entries.items()}


def views(held: Reader | Writer | Joined) -> dict[str, torch.Tensor]:
    """Every tensor of the version that is here, in sorted order of names, without a copy.

    Of a Reader they are read-only, although torch cannot know it: writing to one ends the process.
    """
    return tensors_in(held.buffer, held.here)


def tensors_in(buffer: memoryview, entries: Mapping[str, Entry]) -> dict[str, torch.Tensor]:
    """Views over an image."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return {
            name: torch.frombuffer(
                buffer, dtype=_DTYPES[e.dtype], offset=e.offset, count=e.nbytes // _DTYPES[e.dtype].itemsize
            ).view(e.shape)
            for name, e in entries.items()
        }


def canonical(parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Parameters of a transformers model under the names of its checkpoint files, as views.

    In memory the experts of a layer are one tensor (gate_up_proj [E, 2I, H], down_proj [E, H, I]); in checkpoints
    each expert has its own gate_proj [I, H], up_proj [I, H] and down_proj [H, I].
    """
    named: dict[str, torch.Tensor] = {}
    for name, tensor in parameters.items():
        fused = _FUSED_EXPERTS.fullmatch(name)
        if fused is None:
            named[name] = tensor
            continue
        for expert, part in enumerate(tensor):
            prefix = f"{fused['prefix']}.{expert}"
            if fused["kind"] == "down_proj":
                named[f"{prefix}.down_proj.weight"] = part
            else:
                named[f"{prefix}.gate_proj.weight"], named[f"{prefix}.up_proj.weight"] = part.chunk(2)
    return named


def require_fitting(parameters: Mapping[str, torch.Tensor], entries: Mapping[str, Entry]) -> None:
    """Raise UpdateRefused unless canonical names and shapes are exactly those of a store."""
    named = canonical({name: torch.empty(tensor.shape, device="meta") for name, tensor in parameters.items()})
    if "lm_head.weight" in named and "lm_head.weight" not in entries and _is_tied(parameters):
        del named["lm_head.weight"]
    wanted = {name: torch.Size(entry.shape) for name, entry in entries.items()}
    if differences := differing({name: tensor.shape for name, tensor in named.items()}, wanted):
        raise UpdateRefused(f"what the trainer has does not fit the weight store: {differences}")


def _is_tied(parameters: Mapping[str, torch.Tensor]) -> bool:
    names = ("model.embed_tokens.weight", "lm_head.weight")
    # Of a tensor that is cut up, the part that is here.
    parts = [t.to_local() if hasattr(t, "to_local") else t for t in (parameters.get(name) for name in names)]
    return all(part is not None and part.data_ptr() == parts[0].data_ptr() for part in parts)
