"""The loss, per token: pure functions of tensors.

Shape suffixes: T response tokens of a (micro-)batch, V vocabulary. Every tensor here holds response tokens only, each
once; padding and prompts were left out by length before (batch.py), so no mask can be wrong.
"""

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) = 4.9e8: still far from overflow in float32 when multiplied and summed, and far beyond any ratio that means
something. Beyond it the gradient is 0."""


def token_logprobs(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, and the entropy of its distribution (without gradient); float32."""
    logprobs_TV = torch.log_softmax(logits_TV.float(), dim=-1)
    with torch.no_grad():
        entropy_T = -(logprobs_TV.exp() * logprobs_TV).sum(-1)
    return logprobs_TV.gather(-1, targets_T[:, None]).squeeze(-1), entropy_T


def policy_loss(
    logprobs_T: Tensor, centre_T: Tensor, advantages_T: Tensor, *, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped loss (arXiv 1707.06347) with separate bounds; returns (loss_T, clipped_T).

    The ratio is that of the present policy to the one that the clip is around, whose logprobs are `centre_T`.
    `clipped_T`: tokens whose gradient the clip took away.
    """
    ratio_T = (logprobs_T - centre_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    bounded_T = ratio_T.clamp(1 - clip_low, 1 + clip_high)
    loss_T = -torch.minimum(ratio_T * advantages_T, bounded_T * advantages_T)
    clipped_T = bounded_T * advantages_T < ratio_T * advantages_T
    return loss_T, clipped_T


def kl_loss(logprobs_T: Tensor, reference_T: Tensor, estimator: str) -> Tensor:
    """KL of the policy to the reference, estimated from the sampled token (joschu.net/blog/kl-approx.html).

    k2 = d^2 / 2: its gradient is that of the KL on samples of the policy itself. k3 = exp(d) - d - 1 with
    d = reference - policy: unbiased as a value, never negative. (k1 = -d has a gradient of mean 0: useless as a loss.)
    """
    difference_T = (reference_T - logprobs_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimator == "k2":
        return difference_T.square() / 2
    return difference_T.exp() - difference_T - 1
