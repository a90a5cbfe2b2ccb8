"""What engines, training and shifts cost in seconds, from a GPU's profile and a model's shape: pure arithmetic.

    decode    max(W / (g BW .82) + K kv / (g BW .60),  2 A B / (g F .60)) + communication + 2.5 ms + 10 us B
    W         2 P; of a mixture of experts 2 (P - P_x) + 2 P_x (1 - (1 - k/E)^B), the experts that B tokens touch
    prefill   2 A n / (g F mfu)
    training  tokens (10 A + 10 a s) / (G F mfu) + 4 s      (a: attention width over all layers, s: E[L^2] / 2 E[L])

g GPUs of bandwidth BW and F operations per second, B sequences with K tokens of context, P parameters of which a token
uses A. 10 A: forward and backward 6 A, logprobs of the old and of the reference policy 2 A each.

Against published figures: vLLM's Llama 8B on an A100, one stream, 66 tokens/s (75 measured). Dense models on one GPU
come out well; tensor parallelism of 4 and mixtures of experts are optimistic (docs/LOG.md).
"""

from dataclasses import dataclass

from pipeline.core.iteration import IterationCost
from pipeline.simulator.profiles import GPUS, Gpu, ModelShape, known_model, known_models

_READ_WEIGHTS, _READ_KV, _COMPUTE = 0.82, 0.60, 0.60  # shares of the peak; fitted to vLLM's single-GPU figures
_OVERHEAD_S, _PER_SEQUENCE_S = 2.5e-3, 10e-6  # per iteration, and per sequence of it; fitted to the same
_PREFILL_MFU, _PREFILL_MFU_EXPERTS = 0.45, 0.20  # assumed
_TRAIN_MFU, _TRAIN_MFU_EXPERTS = 0.38, 0.08  # fitted to NeMo-RL's Llama 8B, and to its Qwen3-30B-A3B
_TRAIN_FLOPS_PER_PARAMETER = 10  # see above
_TRAIN_FIXED_S = 4.0  # optimizer step, first and last micro-batch: assumed
_COLLECTIVE_S = 9e-6  # latency of one all-reduce within a node: assumed
_COLLECTIVES_PER_LAYER = 2  # tensor parallelism: after attention and after the MLP
_EXPERT_LAYER_S = 40e-6  # routing, permutation and exchange of tokens: assumed
_ACTIVATION_BYTES = 2
_MEMORY_SHARE, _RESERVED_BYTES = 0.90, 4e9  # of an engine; contexts, graphs and communicators of three roles: assumed
_FEWEST_KV_TOKENS = 20_000  # an engine that holds less is not worth modelling
_HOST_TO_GPU, _HOST_TO_GPU_STATES = 0.7, 0.6  # shares of the host link: one stream of weights, of training states
_TRAIN_STATE_BYTES = 14  # per parameter: BF16 weights, FP32 master, both moments
_WAKE_S, _SLEEP_S = 0.8, 0.3  # engine with its graphs kept: vLLM's published wake .5-1.0 s, sleep .1-.5 s
_TRAIN_WAKE_S, _TRAIN_SLEEP_S = 1.5, 0.7  # assumed; sleep includes the write of the new version
_UPDATE_S = 0.3  # stop, swap and go on with new weights: assumed


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleCost:
    """One inference replica of a role."""

    num_gpus: int
    iteration: IterationCost
    kv_tokens: float
    """Tokens of KV cache that fit beside the weights."""
    wake_s: float
    """From the moment its GPUs are free: map memory, read the weights from the host, go."""
    update_s: float
    """A rollout replica loads a new version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCost:
    """The training group, of any size. `slower` stretches all but shifts."""

    gpu: Gpu
    model: ModelShape
    slower: float = 1.0
    scale: int = 1
    """States are spread over so many times the GPUs (`Setup.scale`)."""

    def step_s(self, *, num_tokens: float, mean_context: float, num_gpus: int) -> float:
        """`num_tokens` of prompts and responses, whose tokens have `mean_context` tokens before them on average."""
        mfu = _TRAIN_MFU_EXPERTS if self.model.num_experts else _TRAIN_MFU
        flops = num_tokens * _TRAIN_FLOPS_PER_PARAMETER * (self.model.active + self.model.attention * mean_context)
        return (flops / (num_gpus * self.gpu.flops * mfu) + _TRAIN_FIXED_S) * self.slower

    def wake_s(self, num_gpus: int) -> float:
        return _TRAIN_WAKE_S + self._states_s(num_gpus)

    def sleep_s(self, num_gpus: int) -> float:
        return _TRAIN_SLEEP_S + self._states_s(num_gpus)

    def fits(self, num_gpus: int) -> bool:
        """Whether states of a full shard per GPU leave a quarter of its memory for activations (assumed)."""
        return _TRAIN_STATE_BYTES * self.model.parameters / (num_gpus * self.scale) <= 0.75 * self.gpu.memory

    def _states_s(self, num_gpus: int) -> float:
        each = _TRAIN_STATE_BYTES * self.model.parameters / (num_gpus * self.scale)
        return each / (self.gpu.host * _HOST_TO_GPU_STATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTrain:
    """A training group that was watched, whatever its size: stands in for `TrainCost`."""

    token_s: float
    fixed_s: float
    slower: float = 1.0

    def step_s(self, *, num_tokens: float, mean_context: float, num_gpus: int) -> float:
        return (num_tokens * self.token_s + self.fixed_s) * self.slower

    def wake_s(self, num_gpus: int) -> float:
        return 0.0

    def sleep_s(self, num_gpus: int) -> float:
        return 0.0

    def fits(self, num_gpus: int) -> bool:
        return True


SLEEP_S = _SLEEP_S
"""An inference replica gives its GPUs up; what it runs was aborted before."""


def iteration_cost(gpu: Gpu, model: ModelShape, num_gpus: int) -> IterationCost:
    g = num_gpus
    overhead, per_sequence = _OVERHEAD_S, _PER_SEQUENCE_S
    if g > 1:
        overhead += model.layers * _COLLECTIVES_PER_LAYER * _COLLECTIVE_S
        per_sequence += model.layers * _COLLECTIVES_PER_LAYER * _ACTIVATION_BYTES * model.hidden / gpu.link
    if model.num_experts:
        overhead += model.layers * _EXPERT_LAYER_S
    experts = model.weight_bytes * model.expert_parameters / model.parameters
    prefill_mfu = _PREFILL_MFU_EXPERTS if model.num_experts else _PREFILL_MFU
    return IterationCost(
        weights_s=(model.weight_bytes - experts) / (g * gpu.bandwidth * _READ_WEIGHTS),
        experts_s=experts / (g * gpu.bandwidth * _READ_WEIGHTS),
        miss=model.expert_miss,
        kv_s=model.kv_bytes_per_token / (g * gpu.bandwidth * _READ_KV),
        compute_s=2 * model.active / (g * gpu.flops * _COMPUTE),
        prefill_s=2 * model.active / (g * gpu.flops * prefill_mfu),
        overhead_s=overhead,
        per_sequence_s=per_sequence,
    )


def role_cost(gpu: Gpu, model: ModelShape, num_gpus: int) -> RoleCost:
    """Raises ValueError where the weights leave no room for KV cache."""
    room = num_gpus * (gpu.memory * _MEMORY_SHARE - _RESERVED_BYTES) - model.weight_bytes
    if room <= 0:
        of_gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        raise ValueError(f"{model.weight_bytes / 1e9:.0f} GB of weights do not fit into {of_gpus} of this kind")
    load_s = model.weight_bytes / num_gpus / (gpu.host * _HOST_TO_GPU)
    return RoleCost(
        num_gpus=num_gpus,
        iteration=iteration_cost(gpu, model, num_gpus),
        kv_tokens=max(_FEWEST_KV_TOKENS, room / model.kv_bytes_per_token),
        wake_s=_WAKE_S + load_s,
        update_s=_UPDATE_S + load_s,
    )


def cost_model(profile: str, num_gpus: int = 1) -> IterationCost:
    """`instant`, or `<gpu>:<model>` like `h800:qwen2.5-7b`. Raises ValueError for another name."""
    return IterationCost() if profile == "instant" else iteration_cost(*_profile(profile), num_gpus)


def train_cost(profile: str) -> TrainCost:
    """`<gpu>:<model>`. Raises ValueError for another name."""
    gpu, model = _profile(profile)
    return TrainCost(gpu=gpu, model=model)


def _profile(name: str) -> tuple[Gpu, ModelShape]:
    gpu, _, model = name.partition(":")
    if gpu not in GPUS or model not in known_models():
        raise ValueError(
            f"no cost profile {name!r}; valid: instant, or one of {', '.join(GPUS)}, ':', "
            f"one of {', '.join(known_models())}"
        )
    return GPUS[gpu], known_model(model)
