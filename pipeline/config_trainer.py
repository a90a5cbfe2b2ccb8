"""The section `trainer`, and whether the policy has the layers that its adapters are put beside."""

from typing import Annotated, Any, Literal

from pydantic import Field

from pipeline.config_types import Float, Int, Pair, Paths, Section, Share
from pipeline.core.errors import ConfigError
from pipeline.gps.segment import plan_image

ALL_LINEAR = "all-linear"
_WEIGHT = ".weight"


class Lora(Section):
    """Low-rank adapters (arXiv 2106.09685), trained instead of the weights. The keys are those of peft's LoraConfig,
    but `rank` and `alpha`, which are `r` and `lora_alpha` there. Dropout is off, as everywhere in this trainer."""

    rank: Int = Field(ge=1, description="Inner size of each adapter")
    alpha: Int = Field(ge=1, description="Adapters count alpha / rank; with use_rslora alpha / sqrt(rank)")
    target_modules: Paths = Field(
        default=[ALL_LINEAR],
        min_length=1,
        description="Which linear layers get one, by how their names end; all-linear: each but the head",
    )
    exclude_modules: Paths = Field(default=[], description="Of those, which get none")
    use_rslora: bool = Field(default=False, description="Scale by the square root of the rank")


class Trainer(Section):
    total_training_steps: Int = Field(ge=1, description="The run ends after so many steps")
    updates_per_step: Int = Field(default=1, ge=1, description="Optimizer steps per step, over whole groups")
    micro_batch_tokens: Int = Field(default=16384, ge=1, description="Padded tokens per forward pass")
    lr: Float = Field(default=1e-6, gt=0, description="Learning rate of AdamW, constant")
    betas: Annotated[tuple[Share, Share], Pair] = Field(default=(0.9, 0.95), description="Of AdamW")
    weight_decay: Float = Field(default=0.0, ge=0, description="Of AdamW")
    grad_clip: Float = Field(default=1.0, gt=0, description="Largest norm of an update's gradient; above, it is scaled")
    max_nonfinite_steps: Int = Field(default=3, ge=0, description="Skipped updates in a row before the run stops")
    strategy: Literal["single", "ddp", "fsdp2", "emulated"] = Field(
        default="single",
        description="single: one process; ddp: `ranks` processes, each with the whole model; fsdp2: each with a part",
    )
    ranks: Int = Field(default=1, ge=1, description="Processes that train together, wherever their nodes are")
    lora: Lora | None = Field(default=None, description="Adapters, trained instead of the weights")
    options: dict[str, Any] = Field(default={}, description="Of the emulated trainer")


def check_lora(lora: Lora, model_path: str) -> None:
    """Raise ConfigError where the model has no linear layer that is so called."""
    entries = plan_image(model_path, "float32").entries
    matrices = {name.removesuffix(_WEIGHT) for name, entry in entries.items() if len(entry.shape) == 2}
    layers = {name for name in matrices if ".experts." not in name and "embed" not in name}
    for key, names in (("target_modules", lora.target_modules), ("exclude_modules", lora.exclude_modules)):
        for name in names:
            if name != ALL_LINEAR and not any(f".{layer}".endswith(f".{name}") for layer in layers):
                valid = ", ".join(sorted({layer.rpartition(".")[2] for layer in layers}))
                raise ConfigError(f"trainer.lora.{key}: {model_path} has no linear layer {name!r}; valid: {valid}")
