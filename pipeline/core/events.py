"""What happened. The core learns of the world only through these; the shell makes them.

Names are in the past tense. Ids, counts, times and scores only, never tokens. Everything here is frozen, so a
journal of events replays to the same state.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pipeline.core.iteration import IterationCost


class Role(StrEnum):
    """Who wants slots."""

    ROLLOUT = "rollout"
    REWARD = "reward"
    TRAIN = "train"


INFERENCE = (Role.ROLLOUT, Role.REWARD)
"""The roles whose replicas serve sequences, in the order in which a sequence meets them."""


class Finish(StrEnum):
    """Why a segment was closed. FLUSH: its tokens are durable and the sequence goes on running."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    FLUSH = "flush"


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentInfo:
    """One closed piece of a sequence, as the queue acknowledged it."""

    id: str
    idx: int
    num_tokens: int
    version: int
    finish: Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictInfo:
    """The judge's verdict on one sequence: a score, or `failure` (its type) and no score. `num_tokens` of the judge say
    it; 0: that is not known."""

    id: str
    score: float | None
    failure: str
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredSequence:
    """A sequence of an unfinished step, as the queue's index holds it after a crash."""

    id: str
    state: str
    num_tokens: int = 0
    num_segments: int = 0
    min_version: int | None = None
    max_version: int | None = None
    score: float | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoredStep:
    """What is durable of one step above the checkpoint; `batched`: its batch and order are recorded."""

    step: int
    batched: bool
    sequences: tuple[RestoredSequence, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRestored:
    """Always the first event: the version of the checkpoint (0: the base model), the steps above it, and the steps
    whose metric row is durable, so that they need not be evaluated again."""

    version: int
    steps: tuple[RestoredStep, ...] = ()
    recorded: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeJoined:
    """The node can be given workers; its memory holds `version` of the policy: these `piles` of it, or none: all."""

    node: str
    num_slots: int
    version: int
    piles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLost:
    """Nothing that ran on the node runs any more, or may speak again. `is_gone`: it does not come back."""

    node: str
    reason: str
    is_gone: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """`is_asleep`: it shares its slots and holds none of them yet. `kv_tokens`: what its cache has room for; 0: nothing
    is known."""

    worker: str
    version: int
    is_asleep: bool = False
    kv_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDied:
    worker: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSlept:
    """Its tasks have ended, what they ran is back in the queues, and its slots are free."""

    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWoken:
    """It has its slots, and can be given work."""

    worker: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeFailed:
    """Nobody knows what it holds now."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanMade:
    """What the planner says to the question of this number: block to its new role; nothing: stay."""

    number: int
    moves: tuple[tuple[int, Role], ...] = ()
    reason: str = ""
    again_s: float = 5.0
    """It is to be asked again after so long, if nothing happens before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsMeasured:
    """What the scheduler reckons with, of one inference role: seconds of its iterations, and the tokens that a running
    sequence has before it on average."""

    role: Role
    cost: IterationCost
    rest_tokens: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Stray:
    """A process that was not ordered, or not on these slots."""

    worker: str
    slots: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StraysReported:
    """All strays that the node's agent observes now; none if the last of them has ended."""

    node: str
    strays: tuple[Stray, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStarted:
    task: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEnded:
    """`ok` is what the result file says; `error` is the remote traceback's last part. Of a user's stage: `drops`, (id,
    reason) of sequences that are not to be trained; `is_stopped`: it was asked to end, and has more to do."""

    task: str
    ok: bool
    result: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    drops: tuple[tuple[str, str], ...] = ()
    is_stopped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceAdmitted:
    """The queue holds these new sequences of `step`, in submission order. `num_prompt_tokens`: of each; empty: not
    known."""

    step: int
    ids: tuple[str, ...]
    num_prompt_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentClosed:
    task: str
    segments: tuple[SegmentInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictGiven:
    task: str
    verdicts: tuple[VerdictInfo, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchCommitted:
    """The batch of `step` and its order are durable."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchTrained:
    """The queue recorded `step` as trained: trained + dropped = submitted was checked there."""

    step: int
    num_trained: int
    num_dropped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionCopied:
    """The node's memory holds the whole of the version, which is not visible there yet; `number`: the copy's."""

    number: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyFailed:
    number: int
    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSealed:
    version: int
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionLoaded:
    worker: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFailed:
    worker: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecorded:
    """The metric row of `step` is durable."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelAsked:
    """`within_s`: the run has so long to save and to end; 0: as long as its limits allow."""

    reason: str
    within_s: float = 0.0


Event = (
    RunRestored
    | NodeJoined
    | NodeLost
    | WorkerReady
    | WorkerDied
    | WorkerSlept
    | WorkerWoken
    | WakeFailed
    | PlanMade
    | CostsMeasured
    | StraysReported
    | TaskStarted
    | TaskEnded
    | SequenceAdmitted
    | SegmentClosed
    | VerdictGiven
    | BatchCommitted
    | BatchTrained
    | VersionCopied
    | CopyFailed
    | VersionSealed
    | VersionLoaded
    | UpdateFailed
    | StepRecorded
    | TimerFired
    | CancelAsked
)
EVENTS: dict[str, type] = {cls.__name__: cls for cls in Event.__args__}
