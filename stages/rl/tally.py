"""What an update and a step's first look at its tokens add up to.

Shape suffix: T response tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from stages.rl.batch import MicroBatch


@dataclass(slots=True)
class Tally:
    """Sums over the response tokens of one optimizer step; `grad_norm` before clipping."""

    num_tokens: int
    loss: float = 0.0
    pg_loss: float = 0.0
    clipped: float = 0.0
    kl: float = 0.0
    entropy: float = 0.0
    drift: float = 0.0  # behaviour - present logprob
    grad_norm: float = 0.0


@dataclass(slots=True)
class Mismatch:
    """|trainer - engine| of logprobs, over the tokens that the engine sampled under `version`."""

    version: int
    num_tokens: int = 0
    largest: float = 0.0
    total: float = 0.0

    def add(self, micro: MicroBatch, logprobs_T: Tensor) -> None:
        gap_T = (logprobs_T.detach() - micro.behaviour_T).abs()[micro.versions_T == self.version]
        if len(gap_T):
            self.num_tokens += len(gap_T)
            self.largest = max(self.largest, gap_T.max().item())
            self.total += gap_T.sum().item()

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
    return metrics | {
        "actor/pg_loss": sum(tally.pg_loss for tally in applied) / num_tokens,
        "actor/pg_clipfrac": sum(tally.clipped for tally in applied) / num_tokens,
        "actor/ppo_kl": sum(tally.drift for tally in applied) / num_tokens,
        "actor/kl_loss": sum(tally.kl for tally in applied) / num_tokens,
        "actor/entropy": sum(tally.entropy for tally in applied) / num_tokens,
        "actor/grad_norm": sum(tally.grad_norm for tally in applied) / len(applied),
    }
