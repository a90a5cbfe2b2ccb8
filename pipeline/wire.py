"""The channel's messages: one tagged union per direction, versioned; decoding is strict.

Controller ⇄ agent: a ROUTER and DEALERs. An agent relays what carries a `worker` to and from that worker's
socketpair unchanged. Every frame carries the attempt: a peer that hears of a higher one stops; frames of an older
one are answered with `Quit`. Frames are numbered per direction, so a lost frame is seen as a gap.
Payload (tokens, weights) never travels here.
"""

from typing import Any, Generic, TypeVar

import msgspec

from pipeline.wire_counts import Counts
from pipeline.wire_gps import FetchAsked, FetchFailed, Holders, Move, Moved, MoveFailed
from pipeline.wire_launch import EndLaunch, Launch, LaunchAsked, LaunchEnded, LauncherJoined
from pipeline.wire_shift import Prepare, Probe, Sleep, Slept, Wake, WakeFailed, Woken

PROTOCOL = 2


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base: the tag is the class name."""


# --- controller to agent -------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True):
    """Answer to Join. The agent puts `policy` (version `version`) and `genrm` into its shared memory;
    `preload` are dotted modules for the zygote to import before it forks. `has_mover`: there are other nodes, so
    this one keeps a mover. Of `num_piles` the node holds `piles`."""

    policy: str
    policy_dtype: str
    version: int
    genrm: str
    genrm_dtype: str
    preload: list[str]
    has_mover: bool
    num_piles: int = 1
    piles: list[int] = []


class Quit(_Message, frozen=True):
    """Leave now: end the workers, unlink the shared memory. `is_welcome_again`: another agent of the node is not only
    allowed, it is waited for."""

    reason: str
    is_welcome_again: bool = False


class Beat(_Message, frozen=True):
    """Either direction: I live."""


class StartWorker(_Message, frozen=True):
    worker: str
    role: str
    index: int
    life: int
    slots: list[int]
    version: int
    main: str  # dotted path of the worker's main function
    options: dict[str, Any]
    preload: list[str] = []  # what it imports first, unless it is a fork
    is_shared: bool = False  # others live on its slots: it sleeps before it says that it is ready


class KillWorker(_Message, frozen=True):
    worker: str
    reason: str


class SealVersion(_Message, frozen=True):
    """`piles`: what the node holds of it; none: all."""

    version: int
    piles: list[int] = []


class RunTask(_Message, frozen=True):
    """The pickled task is in `folder`, in submitit's layout, already in place."""

    worker: str
    task: str
    folder: str


class DispatchTask(_Message, frozen=True):
    worker: str
    task: str
    ids: list[str]
    turns: list[int]


class AbortTask(_Message, frozen=True):
    worker: str
    task: str
    ids: list[str]


class EndTask(_Message, frozen=True):
    worker: str
    task: str


class LoadVersion(_Message, frozen=True):
    worker: str
    version: int
    keep_kv: bool
    probe: Probe | None


class WorkerOrder(_Message, frozen=True):
    """What a worker is born with: the controller's words, and where it is. From the agent, through its zygote."""

    start: StartWorker
    run: str  # the run's folder
    node: str
    attempt: int
    gps: str  # base name of the node's shared memory
    host: str  # the node's own address
    env: dict[str, str]  # what it sees besides the zygote's environment: its devices


ToAgent = (
    Welcome
    | Quit
    | Beat
    | StartWorker
    | KillWorker
    | SealVersion
    | Move
    | Holders
    | FetchFailed
    | RunTask
    | DispatchTask
    | AbortTask
    | EndTask
    | LoadVersion
    | Prepare
    | Sleep
    | Wake
    | Launch
    | EndLaunch
    | LaunchEnded
)
"""Or to the launcher."""
ToWorker = (
    RunTask | DispatchTask | AbortTask | EndTask | LoadVersion | Prepare | Sleep | Wake | Move | Holders | FetchFailed
)


# --- agent to controller -------------------------------------------------------------------------------------------


class Join(_Message, frozen=True):
    node: str
    num_slots: int
    pid: int


class NodeReady(_Message, frozen=True):
    """The weights are in shared memory and the zygote answers; `gps` is the base name of the segments."""

    gps: str
    seconds: dict[str, float]


class NodeFailed(_Message, frozen=True):
    """The agent leaves; `reason` with the log tail."""

    reason: str


class WorkerReady(_Message, frozen=True):
    """`held_bytes`: what its process holds of its slots' memory, as slurm.residents measured it; 0: nobody did.
    `kv_tokens`: what the cache of its engine has room for."""

    worker: str
    version: int
    pid: int
    seconds: dict[str, float]
    is_asleep: bool = False
    held_bytes: int = 0
    kv_tokens: int = 0


class Alive(_Message, frozen=True):
    """A worker lives; to its agent alone."""

    worker: str


class WorkerExited(_Message, frozen=True):
    """That process of the worker has ended; or the order for it was refused, and there never was one."""

    worker: str
    life: int
    reason: str


class Binding(msgspec.Struct, frozen=True, array_like=True):
    """A process that is there: which worker's, of which order, with which slots; `is_awake`: they are its own now."""

    worker: str
    life: int
    slots: list[int]
    pid: int
    is_awake: bool = True


class Bindings(_Message, frozen=True):
    """All that the agent has forked and not yet seen ended, but for its mover. Said at each change, after the
    WorkerExited of what has ended."""

    bindings: list[Binding]


class VersionSealed(_Message, frozen=True):
    version: int


class TaskStarted(_Message, frozen=True):
    worker: str
    task: str


class TaskEnded(_Message, frozen=True):
    """The result file is in place."""

    worker: str
    task: str


class Admitted(_Message, frozen=True):
    worker: str
    step: int
    ids: list[str]
    num_prompt_tokens: list[int] = []


class Segment(msgspec.Struct, frozen=True, array_like=True):
    id: str
    idx: int
    num_tokens: int
    version: int
    finish: str


class SegmentsClosed(_Message, frozen=True):
    worker: str
    task: str
    segments: list[Segment]


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    id: str
    score: float | None
    failure: str
    num_tokens: int = 0


class VerdictsGiven(_Message, frozen=True):
    worker: str
    task: str
    verdicts: list[Verdict]


class VersionLoaded(_Message, frozen=True):
    """`gigabytes`: of the version."""

    worker: str
    version: int
    seconds: float
    gigabytes: float


class UpdateFailed(_Message, frozen=True):
    worker: str
    version: int
    reason: str


FromWorker = (
    WorkerReady
    | Slept
    | Woken
    | WakeFailed
    | TaskStarted
    | TaskEnded
    | Admitted
    | SegmentsClosed
    | VerdictsGiven
    | Counts
    | VersionLoaded
    | UpdateFailed
    | Moved
    | MoveFailed
    | FetchAsked
)
ToItsAgent = FromWorker | Alive
"""What a worker says; all but Alive is relayed."""
FromAgent = (
    Join
    | NodeReady
    | NodeFailed
    | Beat
    | WorkerExited
    | Bindings
    | LaunchAsked
    | LauncherJoined
    | LaunchEnded
    | VersionSealed
    | WorkerReady
    | Slept
    | Woken
    | WakeFailed
    | TaskStarted
    | TaskEnded
    | Admitted
    | SegmentsClosed
    | VerdictsGiven
    | Counts
    | VersionLoaded
    | UpdateFailed
    | Moved
    | MoveFailed
    | FetchAsked
)

Body = TypeVar("Body")


class Frame(msgspec.Struct, Generic[Body], frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one ZeroMQ message holds."""

    protocol: int
    attempt: int
    number: int
    body: Body


_encoder = msgspec.msgpack.Encoder()
_to_agent = msgspec.msgpack.Decoder(Frame[ToAgent])
_from_agent = msgspec.msgpack.Decoder(Frame[FromAgent])
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(ToItsAgent)


def encode_frame(body: ToAgent | FromAgent, *, attempt: int, number: int) -> bytes:
    return _encoder.encode(Frame(protocol=PROTOCOL, attempt=attempt, number=number, body=body))


def decode_to_agent(data: bytes) -> Frame[ToAgent]:
    """Raises msgspec.ValidationError on anything that is not exactly such a frame."""
    return _to_agent.decode(data)


def decode_from_agent(data: bytes) -> Frame[FromAgent]:
    """Raises msgspec.ValidationError on anything that is not exactly such a frame."""
    return _from_agent.decode(data)


def encode_message(message: ToWorker | ToItsAgent) -> bytes:
    """For the socketpair between an agent and its worker: 4 bytes of length, then the message."""
    data = _encoder.encode(message)
    return len(data).to_bytes(4, "little") + data


def decode_to_worker(data: bytes) -> ToWorker:
    return _to_worker.decode(data)


def decode_from_worker(data: bytes) -> ToItsAgent:
    return _from_worker.decode(data)
