"""What the monitor is told: by workers every second or so, by the controller as it happens. Counts, times and costs.

A report replaces the one before of the same replica or queue; what it says "since the last" is counted on top.
"""

from dataclasses import dataclass

from pipeline.core.events import Role
from pipeline.core.length_model import Ages


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    at_s: float
    """It was true then; a late report is welcome."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport(Report):
    replica: int
    """Never used again for another."""
    block: int
    role: Role
    num_running: int
    ages: dict[int, Ages]
    """Of what runs, by step: see `count_ages`."""
    kv_tokens: float
    """Held."""
    num_iterations: float = 0.0
    """Since the last report, like all that follows."""
    decode_s: float = 0.0
    batch: float = 0.0
    """Mean of the iterations."""
    context: float = 0.0
    """Tokens that an iteration reads: mean of the iterations."""
    prefill_tokens: float = 0.0
    """Computed, for whatever reason."""
    prefill_s: float = 0.0
    num_started: int = 0
    """Sequences that came without a token of this role."""
    started_tokens: float = 0.0
    """Their contexts, in sum."""
    started_prefill_tokens: float = 0.0
    """Of these, what was computed: without what was in the cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaEnded(Report):
    """What ran there went back to the queue; its block keeps the role."""

    replica: int
    role: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueReport(Report):
    """All that waits for a role, also for the rest of its step."""

    role: Role
    num_fresh: dict[int, int]
    """By step: without a token of this role."""
    ages: dict[int, Ages]
    """By step: of the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesEnded(Report):
    """Finished in a role, with the tokens that each generated; `num_unknown` others."""

    role: Role
    step: int
    lengths: tuple[float, ...]
    num_unknown: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAdmitted(Report):
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProgress(Report):
    """So far, and with those that were dropped."""

    step: int
    num_rolled_out: int
    num_scored: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCalled(Report):
    """Its blocks are on their way; also when it has to start again."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBegun(Report):
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEnded(Report):
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBlocksChosen(Report):
    block_indices: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionPublished(Report):
    """A lower one than before: those above it are lost, and come again."""

    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKnown(Report):
    """One that was not there before. It has no role yet."""

    block: int
    node: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheKnown(Report):
    """What fits into the cache of a replica, as its engine says."""

    role: Role
    kv_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockHeard(Report):
    """It lives, and no replica of it reports."""

    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLost(Report):
    """What ran there went back to the queues."""

    block: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockBound(Report):
    """It has the role, and serves it."""

    block: int
    role: Role | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftBegun(Report):
    """A block leaves its old role: what ran there went back to the queues."""

    block: int
    old: Role | None
    """None: it comes from nowhere, and takes longer than a shift."""
    new: Role


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftEnded(Report):
    block: int
