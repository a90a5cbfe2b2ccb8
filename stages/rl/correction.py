"""How the loss treats tokens that older versions sampled: `Config.correction`. The why: docs/policies/correction.md.

Shape suffix: T response tokens of a micro-batch. Three policies meet in a token's terms:
behaviour: the one that sampled it, whose logprob came with it.
start:     the one that the step trains from (the proximal policy), looked at before the first update.
present:   the one that is trained, some updates later; alone it has a gradient.
"""

from dataclasses import dataclass

from torch import Tensor

from pipeline.config import Config
from stages.rl.losses import MAX_LOG_RATIO, policy_loss


@dataclass(frozen=True, slots=True)
class Terms:
    """What the tokens of a micro-batch give; only `loss_T` has a gradient."""

    loss_T: Tensor
    clipped_T: Tensor
    """Tokens whose gradient the clip took away."""
    drift_T: Tensor
    """Logprob under the policy that the clip is around, minus the present one."""
    weights_T: Tensor | None = None
    """Importance weights as used; None where the correction has none."""
    cut_T: Tensor | None = None
    """Tokens whose weight was above the cap."""


@dataclass(frozen=True, slots=True)
class Correction:
    """`kind`: ppo clips around the behaviour policy; none and decoupled around the start; decoupled weighs each token
    by min(start / behaviour, cap) besides."""

    kind: str
    clip_low: float
    clip_high: float
    cap: float

    @classmethod
    def of(cls, config: Config) -> "Correction":
        algorithm = config.algorithm
        return cls(config.correction, algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.tis_imp_ratio_cap)

    def terms(self, logprobs_T: Tensor, start_T: Tensor, behaviour_T: Tensor, advantages_T: Tensor) -> Terms:
        """`logprobs_T` are the present ones; `start_T` and `behaviour_T` have no gradient."""
        centre_T = behaviour_T if self.kind == "ppo" else start_T
        loss_T, clipped_T = policy_loss(
            logprobs_T, centre_T, advantages_T, clip_low=self.clip_low, clip_high=self.clip_high
        )
        drift_T = centre_T - logprobs_T.detach()
        if self.kind != "decoupled":
            return Terms(loss_T, clipped_T, drift_T)
        weights_T, cut_T = importance_weights(start_T, behaviour_T, self.cap)
        return Terms(weights_T * loss_T, clipped_T, drift_T, weights_T, cut_T)


def importance_weights(start_T: Tensor, behaviour_T: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """(weights_T, cut_T): start / behaviour, truncated at `cap` (arXiv 2110.00641 decouples, 1802.01561 truncates)."""
    ratio_T = (start_T - behaviour_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio_T.clamp(max=cap), ratio_T > cap
