"""Tiny random policies of the families that people train, each as its real one is: heads, biases, ties, experts."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from stages.engines.vllm_start import hide_broken_packages
from tests.fakes.tiny_policy import EOS, VOCAB_SIZE

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # what vLLM's attention on a CPU takes
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": EOS,
    "eos_token_id": EOS,
    "bos_token_id": 1,
}
_EXPERTS = {"moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}


@dataclass(frozen=True)
class Family:
    """`name`: of its classes in transformers."""

    name: str
    is_tied: bool
    changes: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "llama": Family("Llama", False),
    "smollm2": Family("Llama", True, {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96}),
    "qwen2.5-0.5b": Family("Qwen2", True, {"num_attention_heads": 2, "num_key_value_heads": 1}),  # head_dim is 64 / 2
    "qwen2.5-7b": Family("Qwen2", False, {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "qwen3-0.6b": Family("Qwen3", True),
    "qwen3-8b": Family("Qwen3", False),
    "qwen3-moe": Family("Qwen3Moe", False, _EXPERTS),
    "glm4": Family("Glm4", False, {"attention_bias": True, "partial_rotary_factor": 0.5}),
    "glm": Family("Glm", False, {"attention_bias": True, "partial_rotary_factor": 0.5}),
}


def write_family(family: Family, folder: Path, **changes: Any) -> Path:
    """`changes`: of its config."""
    hide_broken_packages()
    import transformers

    settings = _SHAPE | {"tie_word_embeddings": family.is_tied} | family.changes | changes
    config = getattr(transformers, f"{family.name}Config")(**settings)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family.name}ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.2)  # they begin as zeros
    model.save_pretrained(folder)
    return folder
