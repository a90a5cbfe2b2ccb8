"""Canonical shapes of whole models, without their bytes."""

from dataclasses import dataclass

from pipeline.gps.engine_layout import Engine
from pipeline.gps.layout import Shape


@dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder; `experts` 0: dense."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    has_bias: bool = False
    has_norms: bool = False
    """Of queries and keys."""
    is_tied: bool = False

    def engine(self, ranks: int, *, has_expert_parallel: bool = False) -> Engine:
        return Engine(
            num_heads=self.heads, num_kv_heads=self.kv_heads, ranks=ranks, has_expert_parallel=has_expert_parallel
        )

    def shapes(self) -> dict[str, Shape]:
        found: dict[str, Shape] = {"model.embed_tokens.weight": (self.vocab, self.hidden)}
        for number in range(self.layers):
            layer = f"model.layers.{number}."
            found |= {layer + name: shape for name, shape in self._layer().items()}
        found["model.norm.weight"] = (self.hidden,)
        if not self.is_tied:
            found["lm_head.weight"] = (self.vocab, self.hidden)
        return found

    def _layer(self) -> dict[str, Shape]:
        hidden, rows, kv_rows = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, Shape] = {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}
        for kind, length in (("q", rows), ("k", kv_rows), ("v", kv_rows)):
            found[f"self_attn.{kind}_proj.weight"] = (length, hidden)
            if self.has_bias:
                found[f"self_attn.{kind}_proj.bias"] = (length,)
        found["self_attn.o_proj.weight"] = (hidden, rows)
        if self.has_norms:
            found["self_attn.q_norm.weight"] = found["self_attn.k_norm.weight"] = (self.head_dim,)
        if self.experts:
            found["mlp.gate.weight"] = (self.experts, hidden)
        for prefix in [f"mlp.experts.{e}." for e in range(self.experts)] or ["mlp."]:
            found[prefix + "gate_proj.weight"] = found[prefix + "up_proj.weight"] = (self.inner, hidden)
            found[prefix + "down_proj.weight"] = (hidden, self.inner)
        return found


QWEN_7B = Model(layers=28, hidden=3584, inner=18944, heads=28, kv_heads=4, head_dim=128, vocab=152064, has_bias=True)
QWEN_72B = Model(layers=80, hidden=8192, inner=29568, heads=64, kv_heads=8, head_dim=128, vocab=152064, has_bias=True)
QWEN_30B_A3B = Model(
    layers=48,
    hidden=2048,
    inner=768,
    heads=32,
    kv_heads=4,
    head_dim=128,
    vocab=151936,
    experts=128,
    has_norms=True,
)
