"""What is to be done. Only shells perform these; every performed decision ends in an event, failure included."""

from dataclasses import dataclass

from pipeline.core.events import Role


@dataclass(frozen=True, slots=True, kw_only=True)
class StartNode:
    """Start the lost node's agent again, after the end of all that is left of the old one. Ends in NodeJoined, or in
    NodeLost."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndNode:
    """End the node's agent and all it has, whatever they do. Ends in NodeLost."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorker:
    """Ends in WorkerReady or WorkerDied. `version`: the weights it starts from; `index` counts the replicas of a role
    (train: the ranks of the group); `life` is that of the process, which ranks that belong together share.
    `is_shared`: others live on its slots: it gives them up again before it says that it is ready."""

    worker: str
    role: Role
    index: int
    life: int
    node: str
    slots: tuple[int, ...]
    version: int
    is_shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftDown:
    """The worker ends its tasks, puts back what they run, and gives its slots up. Ends in WorkerSlept or WorkerDied.
    `following`: who is to have them then, and reads `version` meanwhile as far as it can without them."""

    worker: str
    following: tuple[str, ...]
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ShiftUp:
    """The worker takes its slots, which nobody has, with the weights of `version` (a trainer: with those that it had).
    Ends in WorkerWoken, WakeFailed or WorkerDied."""

    worker: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AskPlanner:
    """Which blocks are to serve which role now. Ends in PlanMade of this number; `cause`: what has happened."""

    number: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceReplica:
    """End the worker at once, whatever it does. Ends in WorkerDied."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EndStray:
    """End a process on `node` that was not ordered there. Ends in StraysReported without it."""

    worker: str
    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartTask:
    """Submit a stage task to the worker. Ends in TaskStarted, then TaskEnded; or TaskEnded alone."""

    task: str
    stage: str
    step: int
    worker: str
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTask:
    """Nothing more will be dispatched to the task: it closes what it has and returns. Ends in TaskEnded."""

    task: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Dispatch:
    """Give sequences to a running task; `turns[i]` counts how often `ids[i]` was dispatched in this attempt.

    Ends in SegmentClosed (rollout) or VerdictGiven (reward) for each id.
    """

    task: str
    worker: str
    ids: tuple[str, ...]
    turns: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Take sequences back at a token boundary. Ends in SegmentClosed with finish ABORT for each id."""

    task: str
    worker: str
    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitBatch:
    """Make the batch of `step` durable, in this order, before it is trained. Ends in BatchCommitted."""

    step: int
    ids: tuple[str, ...]
    dropped: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitTrained:
    """Record the batch of `step` as trained. Ends in BatchTrained."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyVersion:
    """Copy a version from the memory of `source` into that of `node`. Ends in VersionCopied or CopyFailed.

    `number` is never used twice; `is_first`: nobody on `node` uses its memory yet, so whatever it shows may go;
    `share`: only what the ranks of one node wrote, by its number among the ranks' nodes, or -1: the whole; `piles`:
    only tensors that are in these, or none: all.
    """

    number: int
    version: int
    source: str
    node: str
    is_first: bool
    share: int = -1
    piles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndCopy:
    """End the copy to `node` by force. Ends in CopyFailed."""

    node: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SealVersion:
    """Make a written version visible on the node, which holds the whole of these `piles`, or none: of all. Ends in
    VersionSealed."""

    version: int
    node: str
    piles: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadVersion:
    """Ends in VersionLoaded or UpdateFailed. What runs there is aborted first (and ends in SegmentClosed with finish
    ABORT); `keep_kv`: it goes on, with the caches that it has."""

    worker: str
    version: int
    keep_kv: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordStep:
    """Make the metric row of a finished step durable and export it. Ends in StepRecorded."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SetTimer:
    """Ends in TimerFired after `after_s`; a timer of the same name is replaced; after_s <= 0 clears it."""

    name: str
    after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRun:
    """The run is over: `status` is done, failed, cancelled or requeued (nodes that it cannot do without are gone, and
    others may be had); `reason` is the first cause."""

    status: str
    reason: str = ""


Decision = (
    StartNode
    | EndNode
    | StartWorker
    | ShiftDown
    | ShiftUp
    | AskPlanner
    | FenceReplica
    | EndStray
    | StartTask
    | EndTask
    | Dispatch
    | Abort
    | CommitBatch
    | CommitTrained
    | CopyVersion
    | EndCopy
    | SealVersion
    | LoadVersion
    | RecordStep
    | SetTimer
    | EndRun
)
