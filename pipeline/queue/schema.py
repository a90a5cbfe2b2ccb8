"""What the queue keeps: Arrow schemas of what travels, row types of what callers see, states of the index.

A sequence's row is identified by its id; a segment by (id, idx). `turn` fences writers: the owner of a
sequence is the task that claimed it with the highest (attempt, turn); the queue refuses any other write.
"""

from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa

SCHEMA_VERSION = 2
GIVEN = 1.0
"""The "logprob" of a token of a response that the policy was given and did not sample (no logprob is above 0): it is
read and stored like any other, and has no part in the loss."""


class State(StrEnum):
    """The durable states (RUNNING is not stored: after a crash such a sequence waits again)."""

    ADMITTED = "admitted"
    GENERATED = "generated"
    SCORED = "scored"
    BATCHED = "batched"
    TRAINED = "trained"
    DROPPED = "dropped"


def sequence_id(step: int, prompt_no: int, member: int) -> str:
    """Ids sort in submission order."""
    return f"{step:06d}-{prompt_no:05d}-{member:04d}"


def step_of(seq_id: str) -> int:
    return int(seq_id.split("-", 1)[0])


def _field(name: str, kind: pa.DataType, nullable: bool = False) -> pa.Field:
    return pa.field(name, kind, nullable=nullable)


_INTS = pa.list_(pa.field("item", pa.int32(), nullable=False))
_LONGS = pa.list_(pa.field("item", pa.int64(), nullable=False))
_FLOATS = pa.list_(pa.field("item", pa.float32(), nullable=False))

PROMPTS = pa.schema(
    [
        _field("id", pa.string()),
        _field("step", pa.int32()),
        _field("prompt_no", pa.int32()),
        _field("member", pa.int32()),
        _field("text", pa.string()),  # the last user message: what the judge is shown
        _field("data_source", pa.string()),
        _field("ground_truth", pa.string()),  # "" where the data has none
        _field("prompt_ids", _INTS),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)
SEGMENTS = pa.schema(
    [
        _field("id", pa.string()),
        _field("idx", pa.int32()),
        _field("turn", pa.int32()),
        _field("tokens", _INTS),
        _field("logprobs", _FLOATS),  # of the distribution sampled from, one per token; GIVEN: not sampled
        _field("version", pa.int64()),
        _field("kv_version", pa.int64(), nullable=True),  # null: `version`
        _field("replica", pa.string()),
        _field("finish", pa.string()),  # events.Finish
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)
VERDICTS = pa.schema(
    [
        _field("id", pa.string()),
        _field("turn", pa.int32()),
        _field("score", pa.float32(), nullable=True),
        _field("failure", pa.string()),
        _field("critique", pa.string()),
        _field("tokens", _INTS),
        _field("version", pa.int64()),
        _field("replica", pa.string()),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)
SEQUENCES = pa.schema(
    [
        *PROMPTS,
        _field("state", pa.string()),
        _field("reason", pa.string()),
        _field("tokens", _INTS),
        _field("logprobs", _FLOATS),
        _field("segment_versions", _LONGS),  # of each segment: a version per token would double what travels
        _field("segment_kv_versions", _LONGS),
        _field("segment_lengths", _INTS),  # in tokens
        _field("finish", pa.string()),  # of the last segment; "" if none
        _field("score", pa.float32(), nullable=True),
        _field("failure", pa.string()),
        _field("critique", pa.string()),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION)},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    id: str
    step: int
    prompt_no: int
    member: int
    text: str
    data_source: str
    ground_truth: str
    prompt_ids: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRow:
    """`version` made the tokens, from caches of which the oldest part is of `kv_version` (None: all of `version`)."""

    id: str
    idx: int
    turn: int
    tokens: list[int]
    logprobs: list[float]
    version: int
    kv_version: int | None = None
    replica: str
    finish: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictRow:
    id: str
    turn: int
    score: float | None
    failure: str
    critique: str
    tokens: list[int]
    version: int
    replica: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRow:
    """A sequence with all that is known of it. Of each token: `versions` made it, `kv_versions` is the oldest one that
    a cache it was made from is of; they differ only where caches were kept while weights changed."""

    id: str
    step: int
    prompt_no: int
    member: int
    text: str
    data_source: str
    ground_truth: str
    prompt_ids: list[int]
    state: str
    reason: str
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kv_versions: list[int] = field(default_factory=list)
    num_segments: int = 0
    finish: str = ""
    score: float | None = None
    failure: str = ""
    critique: str = ""

    @property
    def num_sampled(self) -> int:
        """Tokens of the response that the policy sampled, and was not given."""
        return len(self.logprobs) - self.logprobs.count(GIVEN)
