"""How long an engine's iterations take: what the simulator charges, and what scheduler and planner reckon with.

An iteration gives a token to each of B running sequences, whose contexts add up to K tokens:

    max(weights_s + experts_s (1 - miss^B) + kv_s K,  compute_s B) + overhead_s + per_sequence_s B

The first term reads weights and KV cache, the second computes. Of a mixture of experts only those are read that some
sequence needs: each of the B tokens leaves an expert out with probability `miss`. Between two events B stands still and
K grows by B with each iteration, so the time of n iterations has a closed form, and so has its inverse: nothing here
steps through tokens.
"""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationCost:
    """Seconds, by what an iteration does. All zero: everything is instant."""

    weights_s: float = 0.0  # reading the weights that each iteration reads
    experts_s: float = 0.0  # reading all experts
    miss: float = 0.0  # the share of experts that one token leaves out
    kv_s: float = 0.0  # reading one token's KV
    compute_s: float = 0.0  # one token of one sequence
    prefill_s: float = 0.0  # one token of a prompt
    overhead_s: float = 0.0  # per iteration
    per_sequence_s: float = 0.0

    def iteration_s(self, num_sequences: float, context_tokens: float) -> float:
        """One iteration of `num_sequences` whose contexts add up to `context_tokens`."""
        read_s, compute_s = self.weights_s + context_tokens * self.kv_s, num_sequences * self.compute_s
        if self.experts_s:
            read_s += self.experts_s * (1 - self.miss**num_sequences)
        longer_s = read_s if read_s > compute_s else compute_s
        return longer_s + self.overhead_s + num_sequences * self.per_sequence_s

    def iterations_s(self, num: float, num_sequences: float, context_tokens: float) -> float:
        """`num` iterations in a row, the contexts growing with each."""
        read, compute, growth = self._line(num_sequences, context_tokens)
        hidden = min(num, max(0.0, (compute - read) / growth)) if growth > 0 else (num if compute >= read else 0.0)
        rest = num - hidden
        at = read + growth * hidden
        return num * self._fixed_s(num_sequences) + hidden * compute + rest * at + growth * rest * rest / 2

    def num_iterations(self, seconds: float, num_sequences: float, context_tokens: float) -> float:
        """How many iterations fit into `seconds`: the inverse of `iterations_s`. Infinite where all is instant."""
        read, compute, growth = self._line(num_sequences, context_tokens)
        fixed = self._fixed_s(num_sequences)
        flat = fixed + max(read, compute)
        hidden = max(0.0, (compute - read) / growth) if growth > 0 else math.inf
        if growth <= 0 or seconds <= hidden * (fixed + compute):
            return seconds / flat if flat > 0 else math.inf
        left, at = seconds - hidden * (fixed + compute), fixed + read + growth * hidden
        return hidden + 2 * left / (at + math.sqrt(at * at + 2 * growth * left))

    def slower(self, factor: float) -> "IterationCost":
        """The same engine, `factor` times as slow: a slow GPU, or a wrong estimate."""
        return replace(
            self,
            weights_s=self.weights_s * factor,
            experts_s=self.experts_s * factor,
            kv_s=self.kv_s * factor,
            compute_s=self.compute_s * factor,
            prefill_s=self.prefill_s * factor,
            overhead_s=self.overhead_s * factor,
            per_sequence_s=self.per_sequence_s * factor,
        )

    def _read_s(self, num_sequences: float) -> float:
        return self.weights_s + (self.experts_s * (1 - self.miss**num_sequences) if self.experts_s else 0.0)

    def _fixed_s(self, num_sequences: float) -> float:
        return self.overhead_s + num_sequences * self.per_sequence_s

    def _line(self, num_sequences: float, context_tokens: float) -> tuple[float, float, float]:
        """Seconds of reading now, of computing, and by how much reading grows with each iteration."""
        read = self._read_s(num_sequences) + context_tokens * self.kv_s
        return read, num_sequences * self.compute_s, num_sequences * self.kv_s
