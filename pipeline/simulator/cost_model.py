"""How long one iteration of an engine takes: pure arithmetic, shared by the simulator and the emulated engine.

A decode step of B sequences with K tokens of context in all, on g GPUs, of a dense model of P parameters:

    max(2 P / (g BW e_m) + K kv / (g BW e_kv),  2 P B / (g F e_c)) + o0 + oB B

the first term reads weights and KV cache, the second computes; prefill of n tokens adds 2 P n / (g F mfu_p). The
efficiencies e are fits to published single-GPU figures (vLLM's Llama 8B on an A100: 66 tokens/s modelled, 75
measured). Communication within a group and mixtures of experts are not modelled.
"""

from dataclasses import dataclass

_READ_WEIGHTS, _READ_KV, _COMPUTE, _PREFILL = 0.82, 0.60, 0.60, 0.45  # e_m, e_kv, e_c, mfu_p
_OVERHEAD_S, _PER_SEQUENCE_S = 2.5e-3, 10e-6  # o0, oB
_PARAMETER_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    flops: float  # dense BF16, per second
    bandwidth: float  # bytes per second


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseModel:
    parameters: float
    kv_bytes_per_token: int


GPUS = {
    "a100": Gpu(flops=312e12, bandwidth=2.04e12),
    "h800": Gpu(flops=989e12, bandwidth=3.35e12),
    "h100": Gpu(flops=989e12, bandwidth=3.35e12),
    "h200": Gpu(flops=989e12, bandwidth=4.8e12),
}
MODELS = {
    "qwen2.5-1.5b": DenseModel(parameters=1.54e9, kv_bytes_per_token=28_672),
    "qwen2.5-7b": DenseModel(parameters=7.6e9, kv_bytes_per_token=57_344),
    "qwen2.5-32b": DenseModel(parameters=32.8e9, kv_bytes_per_token=262_144),
    "qwen2.5-72b": DenseModel(parameters=72.7e9, kv_bytes_per_token=327_680),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds, by what an iteration does. All zero: everything is instant."""

    weights_s: float = 0.0  # reading all weights, once per iteration
    kv_s: float = 0.0  # reading one token's KV
    compute_s: float = 0.0  # one token of one sequence
    prefill_s: float = 0.0  # one token of a prompt
    overhead_s: float = 0.0  # per iteration
    per_sequence_s: float = 0.0

    def step_seconds(self, *, num_sequences: int, context_tokens: int, prefill_tokens: int = 0) -> float:
        """One iteration: a token for each of `num_sequences`, whose contexts add up to `context_tokens`."""
        read = self.weights_s + context_tokens * self.kv_s
        compute = num_sequences * self.compute_s
        return (
            max(read, compute) + prefill_tokens * self.prefill_s + self.overhead_s + num_sequences * self.per_sequence_s
        )


def cost_model(profile: str) -> CostModel:
    """`instant`, or `<gpu>:<model>` on one GPU, like `h800:qwen2.5-7b`. Raises ValueError for another name."""
    if profile == "instant":
        return CostModel()
    gpu_name, _, model_name = profile.partition(":")
    if gpu_name not in GPUS or model_name not in MODELS:
        raise ValueError(
            f"no cost profile {profile!r}; valid: instant, or one of {', '.join(GPUS)}, ':', one of {', '.join(MODELS)}"
        )
    gpu, model = GPUS[gpu_name], MODELS[model_name]
    return CostModel(
        weights_s=_PARAMETER_BYTES * model.parameters / (gpu.bandwidth * _READ_WEIGHTS),
        kv_s=model.kv_bytes_per_token / (gpu.bandwidth * _READ_KV),
        compute_s=2 * model.parameters / (gpu.flops * _COMPUTE),
        prefill_s=2 * model.parameters / (gpu.flops * _PREFILL),
        overhead_s=_OVERHEAD_S,
        per_sequence_s=_PER_SEQUENCE_S,
    )
