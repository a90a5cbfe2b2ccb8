"""What is simulated: a workload, two models, GPUs, and how wrong an estimate of all this is."""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeline.core.events import INFERENCE, Role
from pipeline.simulator.cost import SLEEP_S, MeasuredTrain, RoleCost, TrainCost, role_cost
from pipeline.simulator.lengths import POLICY_16K, POLICY_32K, VERDICT_4K, Lengths, lognormal_mixture
from pipeline.simulator.profiles import GPUS, Gpu, ModelShape, known_model

PROMPT_CORRELATION = 0.34
"""Of the lengths of two responses to one prompt: a per-prompt factor of sigma .35 within the .6 of all (assumed)."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One step: `num_prompts` prompts with `num_each` responses each."""

    num_prompts: int
    num_each: int
    rollout: Lengths
    verdict: Lengths
    prompt_tokens: int = 300
    template_tokens: int = 400
    """Of the judge's prompt, beside the task's prompt and the response."""
    correlation: float = PROMPT_CORRELATION
    shares_prefix: bool = True
    """A group's common prefix is prefilled and kept once per replica."""

    @property
    def num_sequences(self) -> int:
        return self.num_prompts * self.num_each

    def lengths(self, role: Role) -> Lengths:
        return self.rollout if role is Role.ROLLOUT else self.verdict

    def prefix_tokens(self, role: Role) -> int:
        """What all sequences of a group begin with. The judge's template and the task come before the response."""
        return self.prompt_tokens + (self.template_tokens if role is Role.REWARD else 0)

    def mean_prompt_tokens(self, role: Role) -> float:
        """Of a request to a replica of the role."""
        return self.prefix_tokens(role) + (self.rollout.mean if role is Role.REWARD else 0.0)

    @property
    def train_tokens(self) -> float:
        """Expected, of one step."""
        return self.num_sequences * (self.prompt_tokens + self.rollout.mean)


@dataclass(frozen=True, kw_only=True)
class Beliefs:
    """Factors between the truth and what a planner or a user believes: estimation error."""

    rollout: float = 1.0
    reward: float = 1.0
    train: float = 1.0
    rollout_lengths: float = 1.0
    verdict_lengths: float = 1.0

    @staticmethod
    def draw(seed: int) -> "Beliefs":
        """Iteration times wrong by 15 % (sd), training and lengths by 10 %: assumed, as after a short calibration."""
        deviations = (0.15, 0.15, 0.10, 0.10, 0.10)
        normal = np.random.default_rng([900, seed]).standard_normal(len(deviations))
        return Beliefs(
            **{
                name: math.exp(sd * z)
                for name, sd, z in zip(
                    ("rollout", "reward", "train", "rollout_lengths", "verdict_lengths"),
                    deviations,
                    normal,
                    strict=True,
                )
            }
        )


RIGHT = Beliefs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Costs of a run that was watched, instead of those of a profile."""

    rollout: RoleCost
    reward: RoleCost
    train: MeasuredTrain


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Models on a cluster. `block` GPUs change hands together: a replica of the larger inference role."""

    gpu: Gpu
    num_gpus: int
    policy: ModelShape
    judge: ModelShape
    rollout_gpus: int
    """GPUs of one rollout replica."""
    reward_gpus: int
    workload: Workload
    gpus_per_node: int = 8
    max_num_seqs: int = 256
    """Sequences that a replica runs at once."""
    max_prefill_backlog_s: float = 1.0
    """A replica takes no sequence while more prefill than this waits there, so that decoding goes on."""
    recomputes_on_update: bool = True
    """New weights make running sequences prefill again (rollout.on_update)."""
    shift_scale: float = 1.0
    flush_s: float = 1.0
    node_start_s: float = 60.0
    """From a replaced node's arrival to a warm engine: assumed."""
    scale: int = 1
    """Stands for a cluster so many times as large, over all of which training states are spread."""
    measured: Measured | None = None
    errors: Beliefs = RIGHT
    """Applied to all costs: the believed world has factors, the true one has none."""

    def __post_init__(self) -> None:
        if self.num_gpus % self.block or (self.gpus_per_node % self.block and self.block % self.gpus_per_node):
            raise ValueError(f"{self.num_gpus} GPUs on nodes of {self.gpus_per_node} hold no blocks of {self.block}")
        if self.block % self.rollout_gpus or self.block % self.reward_gpus:
            raise ValueError(f"replicas of {self.rollout_gpus} and {self.reward_gpus} GPUs do not fill a block of both")

    @property
    def block(self) -> int:
        return max(self.rollout_gpus, self.reward_gpus)

    @property
    def num_blocks(self) -> int:
        return self.num_gpus // self.block

    @cached_property
    def rollout(self) -> RoleCost:
        cost = self.measured.rollout if self.measured else role_cost(self.gpu, self.policy, self.rollout_gpus)
        return self._slower(cost, self.errors.rollout)

    @cached_property
    def reward(self) -> RoleCost:
        cost = self.measured.reward if self.measured else role_cost(self.gpu, self.judge, self.reward_gpus)
        return self._slower(cost, self.errors.reward)

    @cached_property
    def train(self) -> TrainCost | MeasuredTrain:
        if self.measured:
            return replace(self.measured.train, slower=self.errors.train)
        return TrainCost(gpu=self.gpu, model=self.policy, slower=self.errors.train, scale=self.scale)

    def role(self, role: Role) -> RoleCost:
        return self.rollout if role is Role.ROLLOUT else self.reward

    def train_s(self, num_gpus: int) -> float:
        """Of a step with expected lengths."""
        work = self.workload
        return self.train.step_s(
            num_tokens=work.train_tokens, mean_context=work.rollout.mean_context, num_gpus=num_gpus
        )

    def shift_s(self, old: Role | None, new: Role, train_gpus: int) -> float:
        """A block goes from one role to another; None: it has none, and nothing to give up."""
        seconds = SLEEP_S if old in INFERENCE else self.train.sleep_s(train_gpus) if old is Role.TRAIN else 0.0
        seconds += self.train.wake_s(train_gpus) if new is Role.TRAIN else self.role(new).wake_s
        return seconds * self.shift_scale

    def believed(self, beliefs: Beliefs) -> "Setup":
        """The same as it is believed to be: what a guard at submit simulates."""
        work = replace(
            self.workload,
            rollout=self.workload.rollout.scaled(beliefs.rollout_lengths),
            verdict=self.workload.verdict.scaled(beliefs.verdict_lengths),
        )
        return replace(self, workload=work, errors=beliefs)

    def scaled_down(self, scale: int) -> "Setup":
        """A cluster so many times smaller, with as many sequences per GPU."""
        if scale == 1:
            return self
        work = replace(self.workload, num_prompts=max(1, round(self.workload.num_prompts / scale)))
        return replace(self, num_gpus=self.num_gpus // scale, workload=work, scale=self.scale * scale)

    @staticmethod
    def _slower(cost: RoleCost, factor: float) -> RoleCost:
        return replace(cost, iteration=cost.iteration.slower(factor)) if factor != 1.0 else cost


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperGroup:
    """A pair of models of the paper's evaluation, and the GPUs of a replica of each."""

    policy: str
    judge: str
    rollout_gpus: int
    reward_gpus: int


PAPER_GROUPS = {
    1: PaperGroup(policy="qwen2.5-1.5b", judge="glm-z1-9b", rollout_gpus=1, reward_gpus=1),
    2: PaperGroup(policy="qwen2.5-7b", judge="qwen3-30b-a3b", rollout_gpus=1, reward_gpus=4),
    3: PaperGroup(policy="qwen2.5-32b", judge="qwen3-30b-a3b", rollout_gpus=4, reward_gpus=4),
    4: PaperGroup(policy="qwen2.5-72b", judge="qwen3.5-122b-a10b", rollout_gpus=8, reward_gpus=8),
}


def paper_setup(
    group: int, gpu: str, *, num_gpus: int = 32, num_sequences: int = 1024, longest: int = 16_384, plain: bool = False
) -> Setup:
    """One of the paper's groups. Groups of 16 responses.

    `plain`: what the reference table was made with: responses of a prompt neither alike nor sharing a prefix, caches
    kept over an update.
    """
    if longest not in (16_384, 32_768):
        raise ValueError(f"lengths are known for limits of 16384 and 32768 tokens, not of {longest}")
    pair = PAPER_GROUPS[group]
    work = Workload(
        num_prompts=num_sequences // 16,
        num_each=16,
        rollout=lognormal_mixture(POLICY_32K if longest == 32_768 else POLICY_16K, longest),
        verdict=lognormal_mixture(VERDICT_4K, 4096),
        correlation=0.0 if plain else PROMPT_CORRELATION,
        shares_prefix=not plain,
    )
    return Setup(
        gpu=GPUS[gpu],
        num_gpus=num_gpus,
        policy=known_model(pair.policy),
        judge=known_model(pair.judge),
        rollout_gpus=pair.rollout_gpus,
        reward_gpus=pair.reward_gpus,
        workload=work,
        recomputes_on_update=not plain,
    )
