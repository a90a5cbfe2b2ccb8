"""What the planner sees of a run: one frozen picture, made by the monitor. It can be written as JSON and read back.

Every number in it is finite.

Sequences are counted by step and by *age*, the tokens that the role which serves them has generated: bin i of `ages`
stands for i * bin_tokens, and a sequence between two bins counts in both, in proportion.
"""

import json
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.core.events import Role
from pipeline.core.iteration import IterationCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """The sequences of one step in one inference role."""

    step: int
    num_waiting: float
    """Without a token of this role; also those that wait for the rest of their step."""
    ages: tuple[float, ...]  # [num_bins]
    """Of those that run, and of those that ran, were aborted and wait to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleView:
    """An inference role: what its replicas can do, and what they have to do."""

    num_slots: int
    """Of one replica."""
    cost: IterationCost
    """As measured."""
    kv_tokens: float
    """That fit into the cache of one replica."""
    max_num_seqs: int
    prompt_tokens: float
    """Mean context of a request before its first token."""
    prefill_tokens: float
    """Of these, what a replica computes: without what a group shares."""
    bin_tokens: int
    survival: tuple[float, ...]  # [num_bins + 1]
    """The share of sequences that become longer than i * bin_tokens. The last is 0."""
    crowds: tuple[Crowd, ...]
    """Of each step that is not all judged, in their order: the same steps in both roles."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockView:
    """Slots that change hands together."""

    index: int
    node: int
    role: Role | None
    """Given or promised; None: it does nothing."""
    ready_in_s: float = 0.0
    """Of a shift in flight."""
    num_running: int = 0
    num_tokens: float = 0.0
    """Held in its caches: what would be computed again elsewhere."""
    is_silent: bool = False
    """Nothing was heard of it for too long: it is not counted on, and not shifted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainView:
    block_indices: tuple[int, ...]
    """The blocks that train, whenever there is something to train."""
    step_s: float
    """Expected, of one training."""
    is_waiting: bool = False
    """The next step is judged, and nobody trains it yet."""
    left_s: float | None = None
    """Of the training that runs, or for which its blocks are on their way; None: neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    at_s: float
    version: int
    """Published last: the step that is trained next, or trains."""
    staleness: int
    num_sequences: int
    """Of one step."""
    num_admitted: int
    """Steps that were admitted; the next has this number."""
    num_steps: int
    """That are ever admitted."""
    in_pairs: bool = False
    """Even steps wait for the one before to be judged."""
    blocks: tuple[BlockView, ...]
    block_slots: int
    rollout: RoleView
    reward: RoleView
    train: TrainView
    shift_s: dict[Role, float]
    """Until a block serves its new role, from the moment it leaves an inference role."""
    release_s: float = 0.0
    """So much more, if it leaves training."""
    last_shift_s: float | None = None
    """When a block last changed between the inference roles; None: never."""
    cycle_s: float = 0.0
    """Between the last versions, per version, as measured; 0: not yet."""

    def role(self, role: Role) -> RoleView:
        return self.rollout if role is Role.ROLLOUT else self.reward

    def to_json(self) -> str:
        """Raises ValueError for a number that JSON does not have."""
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":"))

    @staticmethod
    def from_json(text: str) -> "Snapshot":
        """Equal to what `to_json` was asked of."""
        found = json.loads(text)
        found["blocks"] = tuple(_block(block) for block in found["blocks"])
        found["rollout"], found["reward"] = _role(found["rollout"]), _role(found["reward"])
        train = found["train"]
        found["train"] = TrainView(**{**train, "block_indices": tuple(train["block_indices"])})
        found["shift_s"] = {Role(role): seconds for role, seconds in found["shift_s"].items()}
        return Snapshot(**found)


def _block(found: dict[str, Any]) -> BlockView:
    return BlockView(**{**found, "role": None if found["role"] is None else Role(found["role"])})


def _role(found: dict[str, Any]) -> RoleView:
    crowds = tuple(Crowd(**{**crowd, "ages": tuple(crowd["ages"])}) for crowd in found["crowds"])
    cost, survival = IterationCost(**found["cost"]), tuple(found["survival"])
    return RoleView(**{**found, "cost": cost, "survival": survival, "crowds": crowds})
