"""From rows of the queue to padded tensors. What is trained is chosen by lengths, never by a pad token's id.

Shape suffixes: B rows of a micro-batch, L its padded length, T its response tokens, row by row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pipeline.queue.schema import GIVEN, SequenceRow


@dataclass(frozen=True, slots=True)
class Sample:
    """A sequence to train on. `prompt_ids` has at least one token; the three others are as long as each other.

    `behaviour` is GIVEN for a token that was not sampled: it is read, and predicted by nobody. `oldest`: the oldest
    version that had a part in each token, be it through a cache.
    """

    prompt_ids: Sequence[int]
    tokens: Sequence[int]
    behaviour: Sequence[float]
    oldest: Sequence[int]
    advantage: float
    group: tuple[int, int]
    """(step, prompt_no)."""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.tokens)

    @property
    def sampled(self) -> list[int]:
        """Which of its tokens are trained."""
        return [at for at, logprob in enumerate(self.behaviour) if logprob != GIVEN]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one forward pass takes. Rows are padded on the right, so causal attention never sees the padding."""

    ids_BL: Tensor
    predicts_BL: Tensor
    """True where the next token of the row is one that was sampled."""
    targets_T: Tensor
    behaviour_T: Tensor
    """Logprob of each token under the distribution that it was sampled from."""
    advantages_T: Tensor
    oldest_T: Tensor
    first: int
    """Columns before this one predict nothing of any row."""
    is_idle: bool
    """It only keeps the other ranks company: what it computes counts for nothing."""

    @property
    def num_tokens(self) -> int:
        return len(self.targets_T)


class Pass(NamedTuple):
    """One forward pass of one rank: the indices of its rows. See MicroBatch."""

    rows: list[int]
    is_idle: bool = False


def to_sample(row: SequenceRow, advantage: float) -> Sample:
    oldest = [min(pair) for pair in zip(row.versions, row.kv_versions, strict=True)]
    return Sample(row.prompt_ids, row.tokens, row.logprobs, oldest, advantage, (row.step, row.prompt_no))


def split_groups(samples: Sequence[Sample], num_parts: int, seed: tuple[int, int]) -> list[list[Sample]]:
    """Permute whole groups by `seed` and cut them into at most `num_parts` nearly equal parts, none empty.

    Depends on the groups' keys, not on the order of the samples.
    """
    members: dict[tuple[int, int], list[Sample]] = {}
    for sample in samples:
        members.setdefault(sample.group, []).append(sample)
    keys = sorted(members)
    order = np.random.default_rng(seed).permutation(len(keys))
    parts = np.array_split(order, num_parts)
    return [[sample for i in part for sample in members[keys[i]]] for part in parts if len(part)]


def plan_micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Indices of rows for each forward pass: at most `max_tokens` with padding (a longer row goes alone).

    Rows of like length go together: a row shorter than half of the longest of its pass opens a new one, so less than
    half of what is computed is padding, at the price of one more pass for each halving of the length.
    """
    plan: list[list[int]] = []
    longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not plan or (len(plan[-1]) + 1) * longest > max_tokens or 2 * lengths[i] < longest:
            plan.append([])
            longest = lengths[i]
        plan[-1].append(i)
    return plan


def plan_shares(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Indices of the rows that each rank takes, ascending: the longest row first, each to the rank with the least.

    So no rank's tokens exceed another's by more than one row. A rank may get none.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        rank = loads.index(min(loads))
        shares[rank].append(i)
        loads[rank] += lengths[i]
    return [sorted(share) for share in shares]


def plan_passes(lengths: Sequence[int], max_tokens: int, num_ranks: int) -> list[list[Pass]]:
    """The forward passes of each rank: every row in one of them, and as many for each rank as for any other.

    A function of the lengths alone, so every rank knows the plans of all. Idle passes take the shortest row.
    """
    plans = []
    for share in plan_shares(lengths, num_ranks):
        plan = plan_micro_batches([lengths[i] for i in share], max_tokens)
        plans.append([Pass([share[i] for i in rows]) for rows in plan])
    num_passes = max(map(len, plans))
    shortest = min(range(len(lengths)), key=lambda i: lengths[i], default=0)
    return [plan + [Pass([shortest], is_idle=True)] * (num_passes - len(plan)) for plan in plans]


def pack(samples: Sequence[Sample], device: torch.device, *, is_idle: bool = False) -> MicroBatch:
    """Pad `samples` to one length."""
    longest = max(sample.num_tokens for sample in samples)
    ids_BL = np.zeros((len(samples), longest), np.int64)  # any valid id does as padding
    predicts_BL = np.zeros((len(samples), longest), bool)
    sampled = [sample.sampled for sample in samples]
    for row, sample in enumerate(samples):
        start, end = len(sample.prompt_ids), sample.num_tokens
        ids_BL[row, :start] = sample.prompt_ids
        ids_BL[row, start:end] = sample.tokens
        predicts_BL[row, [start - 1 + at for at in sampled[row]]] = True

    def flat(values: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
        kept = [row[at] for row, chosen in zip(values, sampled, strict=True) for at in chosen]
        return torch.tensor(kept, dtype=dtype, device=device)

    return MicroBatch(
        ids_BL=torch.from_numpy(ids_BL).to(device),
        predicts_BL=torch.from_numpy(predicts_BL).to(device),
        targets_T=flat([s.tokens for s in samples], torch.long),
        behaviour_T=flat([s.behaviour for s in samples], torch.float32),
        advantages_T=flat([[s.advantage] * len(s.tokens) for s in samples], torch.float32),
        oldest_T=flat([s.oldest for s in samples], torch.long),
        first=min(len(sample.prompt_ids) for sample in samples) - 1,
        is_idle=is_idle,
    )
