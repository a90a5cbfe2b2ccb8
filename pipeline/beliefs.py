"""What a live run's monitor believes before it has measured anything: docs/policies/planner.md.

Where the kind of GPU (`cluster.gpu`) and the shapes of the models are known, the simulator's cost model says it; of an
emulated engine its options do. Else an engine on a CPU is assumed. All of it gives way to what is measured, and of an
engine's cost only the proportions stay: its scale is learned within seconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.config import Config
from pipeline.config_engine import EngineOptions
from pipeline.core.errors import ConfigError
from pipeline.core.events import INFERENCE, Role
from pipeline.core.iteration import IterationCost
from pipeline.core.length_model import bins_of
from pipeline.core.snapshot import RoleView, Snapshot, TrainView
from pipeline.core.steps import RunPlan
from pipeline.emulation import Timing
from pipeline.processes import say
from pipeline.simulator.forecast import assumed_lengths, setup_of
from pipeline.simulator.lengths import POLICY_16K, VERDICT_4K, Lengths, lognormal_mixture
from pipeline.simulator.priors import NUM_BINS, believed_role
from pipeline.simulator.setup import Setup

SMALL_ENGINE = IterationCost(overhead_s=3e-3, per_sequence_s=1e-4, prefill_s=2e-5)
"""An engine with a model of a million parameters on one core: as the quickstart's were measured, roughly."""
_TRAIN_S = 1.0  # of a step, where nothing is known: one is measured soon
_SHIFT_S = 0.1  # of an engine or a trainer on a CPU, either half
_PROMPT_TOKENS = 300  # as the simulator assumes
_VERDICT_TOKENS = 256  # of a judge of whom nothing is known
_TOKEN_CHARACTERS = 4  # of a judge's template


@dataclass(frozen=True, slots=True, kw_only=True)
class _Role:
    """What the configuration says of an inference role."""

    engine: EngineOptions
    num_slots: int
    longest: int
    prompt_tokens: float


def believe(
    config: Config,
    plan: RunPlan,
    *,
    at_s: float,
    version: int,
    train_blocks: Sequence[int],
    block_slots: int,
    in_pairs: bool = False,
) -> Snapshot:
    """Of a run that goes on from `version`. Its blocks are not in it: they are told as they come (BlockKnown)."""
    setup = _known_setup(config)
    roles = {role: _of_role(config, role, setup) for role in INFERENCE}
    num_train_slots = max(1, len(train_blocks)) * block_slots
    if setup is None:
        step_s, release_s, shift_s = _TRAIN_S, 0.0, dict.fromkeys(Role, 2 * _SHIFT_S)
    else:
        step_s = setup.train_s(num_train_slots)
        shift_s = {
            role: setup.shift_s(Role.REWARD if role is Role.ROLLOUT else Role.ROLLOUT, role, num_train_slots)
            for role in Role
        }
        release_s = setup.shift_s(Role.TRAIN, Role.ROLLOUT, num_train_slots) - shift_s[Role.ROLLOUT]
    return Snapshot(
        at_s=at_s,
        version=version,
        staleness=plan.staleness,
        num_sequences=plan.sequences_per_step,
        num_admitted=version,
        num_steps=plan.total_steps,
        in_pairs=in_pairs,
        blocks=(),
        block_slots=block_slots,
        rollout=roles[Role.ROLLOUT],
        reward=roles[Role.REWARD],
        train=TrainView(block_indices=tuple(train_blocks), step_s=step_s),
        shift_s=shift_s,
        release_s=release_s,
    )


def _known_setup(config: Config) -> Setup | None:
    """None: the kind of GPU is not known, or it does not fit what the run is."""
    if not config.cluster.gpu:
        return None
    try:
        return setup_of(config, gpu=config.cluster.gpu, num_gpus=config.cluster.nodes * config.cluster.slots_per_node)
    except ConfigError as error:
        say(f"cluster.gpu: costs are assumed until they are measured: {error}")
        return None


def _of_role(config: Config, role: Role, setup: Setup | None) -> RoleView:
    what = _described(config, role)
    engine = what.engine
    if setup is not None and engine.name != "emulated":
        return replace(believed_role(setup, role), max_num_seqs=engine.max_num_seqs)
    cost, lengths, kv_tokens = SMALL_ENGINE, _lengths(role, what), 0.0
    if engine.name == "emulated":
        timing = _timing(engine)
        cost, kv_tokens = _emulated_cost(timing), engine.kv_cache_bytes / timing.kv_bytes_per_token
    bin_tokens, num_bins = bins_of(lengths.longest, NUM_BINS[role])
    survival = lengths.survival(bin_tokens * np.arange(num_bins + 1, dtype=np.float64)).tolist()
    shared = what.prompt_tokens if engine.enable_prefix_caching and role is Role.ROLLOUT else 0.0
    return RoleView(
        num_slots=what.num_slots,
        cost=cost,
        kv_tokens=kv_tokens or float(engine.max_num_seqs * (what.prompt_tokens + what.longest)),
        max_num_seqs=engine.max_num_seqs,
        prompt_tokens=what.prompt_tokens,
        prefill_tokens=what.prompt_tokens - shared * (1 - 1 / config.rollout.n),
        bin_tokens=bin_tokens,
        survival=(*survival[:-1], 0.0),
        crowds=(),
    )


def _described(config: Config, role: Role) -> _Role:
    placed, genrm, judge = config.placement.roles, config.reward.genrm, config.judge_engine
    prompt = min(_PROMPT_TOKENS, config.data.max_prompt_length / 2)
    longest = config.rollout.max_response_length
    if role is Role.ROLLOUT:
        return _Role(
            engine=config.rollout.engine, num_slots=placed.rollout.slots, longest=longest, prompt_tokens=prompt
        )
    if genrm is None or judge is None:  # who has no slots is not planned for
        return _Role(engine=EngineOptions(), num_slots=1, longest=_VERDICT_TOKENS, prompt_tokens=prompt)
    asked = prompt + len(genrm.template) / _TOKEN_CHARACTERS
    return _Role(
        engine=judge,
        num_slots=placed.reward.slots,
        longest=genrm.max_tokens,
        prompt_tokens=asked + _lengths(Role.ROLLOUT, _described(config, Role.ROLLOUT)).mean,
    )


def _lengths(role: Role, what: _Role) -> Lengths:
    if what.engine.name == "emulated" and what.engine.options.get("script") != "judge":
        return lognormal_mixture(_timing(what.engine).parts, what.longest)
    if role is Role.ROLLOUT:
        return assumed_lengths(POLICY_16K, 16_384, what.longest)
    return assumed_lengths(VERDICT_4K, 4096, what.longest)


def _emulated_cost(timing: Timing) -> IterationCost:
    try:
        cost = timing.cost()
    except ValueError:  # the engine will say so
        cost = IterationCost()
    return cost if cost.iteration_s(1, 0.0) > 0 else SMALL_ENGINE


def _timing(engine: EngineOptions) -> Timing:
    try:
        return Timing.of(engine.options)
    except ValueError:  # the engine will say so
        return Timing()
