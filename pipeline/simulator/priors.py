"""What a monitor believes of a simulated run before it has seen any of it."""

from collections.abc import Sequence

import numpy as np

from pipeline.core.events import Role
from pipeline.core.length_model import bins_of
from pipeline.core.monitor import Monitor
from pipeline.core.snapshot import BlockView, RoleView, Snapshot, TrainView
from pipeline.simulator.cluster import make_blocks
from pipeline.simulator.setup import Setup
from pipeline.simulator.simulation import NUM_AHEAD

NUM_BINS = {Role.ROLLOUT: 32, Role.REWARD: 16}
"""Of age: 512 tokens at a limit of 16,384, and 256 at one of 4,096. More were no gain."""


def monitor_of(
    believed: Setup, *, train_blocks: Sequence[int], staleness: int, num_steps: int, in_pairs: bool = False
) -> Monitor:
    """Of a run of `num_steps` that has not begun, by what is believed of it (`Setup.believed`)."""
    num_train_gpus = max(1, len(train_blocks)) * believed.block
    shift_s = {
        Role.ROLLOUT: believed.shift_s(Role.REWARD, Role.ROLLOUT, num_train_gpus),
        Role.REWARD: believed.shift_s(Role.ROLLOUT, Role.REWARD, num_train_gpus),
        Role.TRAIN: believed.shift_s(Role.ROLLOUT, Role.TRAIN, num_train_gpus),
    }
    released_s = believed.shift_s(Role.TRAIN, Role.ROLLOUT, num_train_gpus)
    return Monitor(
        Snapshot(
            at_s=0.0,
            version=0,
            staleness=staleness,
            num_sequences=believed.workload.num_sequences,
            num_admitted=0,
            num_steps=num_steps + NUM_AHEAD,
            in_pairs=in_pairs,
            blocks=tuple(BlockView(index=b.index, node=b.node, role=None) for b in make_blocks(believed, [])),
            block_slots=believed.block,
            rollout=believed_role(believed, Role.ROLLOUT),
            reward=believed_role(believed, Role.REWARD),
            train=TrainView(block_indices=tuple(train_blocks), step_s=believed.train_s(num_train_gpus)),
            shift_s=shift_s,
            release_s=released_s - shift_s[Role.ROLLOUT],
        )
    )


def believed_role(setup: Setup, role: Role) -> RoleView:
    cost, work = setup.role(role), setup.workload
    lengths = work.lengths(role)
    bin_tokens, num_bins = bins_of(lengths.longest, NUM_BINS[role])
    shared = work.prefix_tokens(role) * (1 - 1 / work.num_each) if work.shares_prefix else 0.0
    survival = lengths.survival(bin_tokens * np.arange(num_bins + 1, dtype=np.float64)).tolist()
    return RoleView(
        num_slots=cost.num_gpus,
        cost=cost.iteration,
        kv_tokens=cost.kv_tokens,
        max_num_seqs=setup.max_num_seqs,
        prompt_tokens=work.mean_prompt_tokens(role),
        prefill_tokens=work.mean_prompt_tokens(role) - shared,
        bin_tokens=bin_tokens,
        survival=(*survival[:-1], 0.0),
        crowds=(),
    )
