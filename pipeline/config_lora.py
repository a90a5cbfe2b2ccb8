"""Adapters: `trainer.lora`, and whether the policy has the layers that they are put beside."""

from typing import Literal

from pydantic import Field

from pipeline.config_types import Int, Section
from pipeline.core.errors import ConfigError
from pipeline.gps.segment import plan_image

_WEIGHT = ".weight"


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685), trained instead of the weights. The keys are those of peft's LoraConfig,
    but `rank` and `alpha`, which are `r` and `lora_alpha` there. Dropout is off, as everywhere in this trainer."""

    rank: Int = Field(ge=1, description="Inner size of each adapter")
    alpha: Int = Field(ge=1, description="Adapters count alpha / rank; with use_rslora alpha / sqrt(rank)")
    target_modules: Literal["all-linear"] | list[str] = Field(
        default="all-linear",
        description="Which linear layers get one, by how their names end; all-linear: each but the head",
    )
    exclude_modules: list[str] = Field(default=[], description="Of those, which get none")
    use_rslora: bool = False


def check_lora(lora: Lora, model_path: str) -> None:
    """Raise ConfigError where the model has no linear layer that is so called."""
    entries = plan_image(model_path, "float32").entries
    matrices = {name.removesuffix(_WEIGHT) for name, entry in entries.items() if len(entry.shape) == 2}
    layers = {name for name in matrices if ".experts." not in name and "embed" not in name}
    for key, names in (("target_modules", lora.target_modules), ("exclude_modules", lora.exclude_modules)):
        for name in names if isinstance(names, list) else ():
            if not any(f".{layer}".endswith(f".{name}") for layer in layers):
                valid = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
                raise ConfigError(f"trainer.lora.{key}: {model_path} has no linear layer {name!r}; valid: {valid}")
