"""GPUs and models as the cost model needs them: vendors' figures, and what a model's HF `config.json` says.

Configurations of some models lie in `models/`, with the fields that matter. That of Qwen3.5-122B-A10B is assumed where
its card does not say it (widths of the linear-attention heads, two KV heads); its parameters then add up to the 122e9
and 10e9 of its name.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MODELS = Path(__file__).parent / "models"
_PARAMETER_BYTES = 2  # BF16


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    flops: float  # dense BF16, per second (vendor's data sheet)
    bandwidth: float  # HBM, bytes per second (vendor's data sheet)
    memory: float  # bytes (vendor's data sheet)
    link: float  # bytes per second of a collective within a node: .375 of NVLink's bidirectional figure, assumed
    host: float  # bytes per second and GPU from host memory, all GPUs at once: assumed, to be measured


GPUS: dict[str, Gpu] = {
    "a100": Gpu(flops=312e12, bandwidth=2.04e12, memory=80e9, link=225e9, host=20e9),
    "h800": Gpu(flops=989e12, bandwidth=3.35e12, memory=80e9, link=150e9, host=40e9),
    "h100": Gpu(flops=989e12, bandwidth=3.35e12, memory=80e9, link=337e9, host=40e9),
    "h200": Gpu(flops=989e12, bandwidth=4.8e12, memory=141e9, link=337e9, host=40e9),
    "h20": Gpu(flops=148e12, bandwidth=4.0e12, memory=96e9, link=337e9, host=40e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What a forward pass reads and computes."""

    parameters: float
    active: float
    """Parameters that one token uses, all embeddings among them: so utilisations of training are usually quoted."""
    layers: int
    hidden: int
    attention: float
    """Width of all query heads times the layers with full attention: a token's attention costs 4 x this x context."""
    kv_bytes_per_token: int
    num_experts: int = 0
    experts_per_token: int = 0
    expert_parameters: float = 0.0
    """All routed experts."""

    @property
    def weight_bytes(self) -> float:
        return self.parameters * _PARAMETER_BYTES

    @property
    def expert_miss(self) -> float:
        """The share of experts that one token leaves out."""
        return 1 - self.experts_per_token / self.num_experts if self.num_experts else 0.0


def model_shape(config: Mapping[str, Any]) -> ModelShape:
    """From the fields of an HF `config.json`: dense, mixture of experts, or hybrid with linear attention."""
    c = {**config, **(config.get("text_config") or {})}
    hidden, layers, vocabulary = c["hidden_size"], c["num_hidden_layers"], c["vocab_size"]
    heads = c["num_attention_heads"]
    head, kv_heads = c.get("head_dim") or hidden // heads, c.get("num_key_value_heads") or heads
    full = layers // c.get("full_attention_interval", 1)
    gate = 2 if c.get("attn_output_gate") else 1
    attention = full * hidden * head * ((1 + gate) * heads + 2 * kv_heads) + (layers - full) * _linear_attention(c)
    experts, chosen, one_expert = _experts(c)
    shared = 3 * hidden * (c.get("shared_expert_intermediate_size") or 0) if experts else 0
    mlp = hidden * experts + shared if experts else 3 * hidden * c["intermediate_size"]
    outside = attention + layers * (mlp + 2 * hidden)
    embeddings = vocabulary * hidden * (1 if c.get("tie_word_embeddings") else 2)
    return ModelShape(
        parameters=outside + layers * experts * one_expert + embeddings,
        active=outside + layers * chosen * one_expert + embeddings,
        layers=layers,
        hidden=hidden,
        attention=full * heads * head,
        kv_bytes_per_token=2 * kv_heads * head * full * _PARAMETER_BYTES,
        num_experts=experts,
        experts_per_token=chosen,
        expert_parameters=layers * experts * one_expert,
    )


def _experts(c: Mapping[str, Any]) -> tuple[int, int, int]:
    """How many there are, how many a token uses, parameters of one."""
    num = c.get("num_experts") or c.get("n_routed_experts") or c.get("num_local_experts") or 0
    if not num:
        return 0, 0, 0
    return (
        num,
        c["num_experts_per_tok"],
        3 * c["hidden_size"] * (c.get("moe_intermediate_size") or c["intermediate_size"]),
    )


def _linear_attention(c: Mapping[str, Any]) -> int:
    """Parameters of a gated delta layer: queries, keys, values and gate in, output out."""
    if "linear_num_value_heads" not in c:
        return 0
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] * c["linear_value_head_dim"]
    return int(c["hidden_size"] * (2 * keys + 3 * values))


def known_models() -> list[str]:
    return sorted(path.stem for path in _MODELS.glob("*.json"))


def known_model(name: str) -> ModelShape:
    """One of `known_models`. Raises ValueError for another name."""
    path = _MODELS / f"{name}.json"
    if name not in known_models():
        raise ValueError(f"no model {name!r}; valid: {', '.join(known_models())}, or a folder with a config.json")
    return model_shape(json.loads(path.read_text()))
