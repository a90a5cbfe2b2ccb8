"""What an update and a step's first look at its tokens add up to.

Shape suffix: T response tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.rl.batch import MicroBatch
from stages.rl.correction import Terms
from stages.rl.ranks import Ranks

_SUMS = (
    "loss",
    "pg_loss",
    "clipped",
    "kl",
    "entropy",
    "drift",
    "num_weighted",
    "weight",
    "weight_squared",
    "cut",
)


@dataclass(slots=True)
class Tally:
    """Sums over the response tokens of one optimizer step, as in `Terms`; `grad_norm` before clipping.

    `num_tokens` is that of all ranks; the sums are a rank's own until `share`.
    """

    num_tokens: int
    loss: float = 0.0
    pg_loss: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    drift: float = 0.0
    num_weighted: int = 0
    weight: float = 0.0
    weight_squared: float = 0.0
    cut: float = 0.0
    grad_norm: float = 0.0

    def add(self, terms: Terms, entropy_T: Tensor) -> None:
        self.pg_loss += terms.loss_T.sum().item()
        self.clipped += terms.clipped_T.sum().item()
        self.drift += terms.drift_T.sum().item()
        self.entropy += entropy_T.sum().item()
        if terms.weights_T is not None and terms.cut_T is not None:
            self.num_weighted += len(terms.weights_T)
            self.weight += terms.weights_T.sum().item()
            self.weight_squared += terms.weights_T.square().sum().item()
            self.cut += terms.cut_T.sum().item()

    def share(self, ranks: Ranks) -> None:
        """Make the sums those of all ranks: the same numbers on each, whatever they decide by them."""
        gathered = ranks.gather([getattr(self, name) for name in _SUMS])
        for name, values in zip(_SUMS, zip(*gathered, strict=True), strict=True):
            setattr(self, name, sum(values))


@dataclass(slots=True)
class Mismatch:
    """|trainer - engine| of logprobs, over the tokens that `version` made alone: no older cache had a part in them."""

    version: int
    num_tokens: int = 0
    largest: float = 0.0
    total: float = 0.0

    def add(self, micro: MicroBatch, logprobs_T: Tensor) -> None:
        gap_T = (logprobs_T.detach() - micro.behaviour_T).abs()[micro.oldest_T == self.version]
        if len(gap_T):
            self.num_tokens += len(gap_T)
            self.largest = max(self.largest, gap_T.max().item())
            self.total += gap_T.sum().item()

    def share(self, ranks: Ranks) -> None:
        """Make it that of all ranks."""
        nums, largest, totals = zip(*ranks.gather([self.num_tokens, self.largest, self.total]), strict=True)
        self.num_tokens, self.largest, self.total = int(sum(nums)), max(largest), sum(totals)

    def metrics(self) -> dict[str, float]:
        if not self.num_tokens:
            return {}
        mean = self.total / self.num_tokens
        return {"mismatch/max_abs_logprob_diff": self.largest, "mismatch/mean_abs_logprob_diff": mean}


def update_metrics(tallies: Sequence[Tally | None]) -> dict[str, float]:
    """Means over the tokens of a step's updates (the gradient's norm: over updates); None is a skipped one."""
    applied = [tally for tally in tallies if tally is not None]
    metrics = {"train/nonfinite_updates": float(len(tallies) - len(applied))}
    if not applied:
        return metrics
    num_tokens = sum(tally.num_tokens for tally in applied)
    metrics |= {
        "actor/pg_loss": sum(tally.pg_loss for tally in applied) / num_tokens,
        "actor/pg_clipfrac": sum(tally.clipped for tally in applied) / num_tokens,
        "actor/ppo_kl": sum(tally.drift for tally in applied) / num_tokens,
        "actor/kl_loss": sum(tally.kl for tally in applied) / num_tokens,
        "actor/entropy": sum(tally.entropy for tally in applied) / num_tokens,
        "actor/grad_norm": sum(tally.grad_norm for tally in applied) / len(applied),
    }
    return metrics | _weight_metrics(applied)


def _weight_metrics(applied: Sequence[Tally]) -> dict[str, float]:
    """Of the importance weights. `tis_ess`: the effective sample size (sum w)^2 / sum w^2, as a share of the tokens:
    1 where all weights are equal, 1 / N where one token has it all."""
    num_tokens = sum(tally.num_weighted for tally in applied)
    if not num_tokens:
        return {}
    total, squares = sum(tally.weight for tally in applied), sum(tally.weight_squared for tally in applied)
    return {
        "actor/tis_weight_mean": total / num_tokens,
        "actor/tis_clipfrac": sum(tally.cut for tally in applied) / num_tokens,
        "actor/tis_ess": total**2 / (num_tokens * squares),
    }
