"""What the lines of a recorded run (recorder.py) and a memory trace (memory_trace.py) say of its shifts."""

import bisect
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

Lines = Sequence[Sequence[Any]]
SETTLED_S = 0.3
"""Counts are told at most four times a second: of an engine that has slept longer, the first token is told at once."""


@dataclass
class Down:
    """`down_s`: from the decision to the report that the slots are free. `new`: who is to follow."""

    worker: str
    at: float
    down_s: float
    num_aborted: int
    phases: dict[str, float]
    new: str = ""


@dataclass
class Up:
    """All from the decision: `woken_s` to the report; `token_s` to the first token that the controller hears of, a
    trainer's to the first task; None: none came before it went down. `work_waited`: it was given sequences as soon as
    it was awake. `both_s`: from the decision that sent down whom it follows."""

    worker: str
    at: float
    woken_s: float
    phases: dict[str, float]
    asleep_s: float
    token_s: float | None = None
    work_waited: bool = False
    both_s: float | None = None
    followed: str = ""


@dataclass
class _Seen:
    down: Down | None = None
    up: Up | None = None
    slept_at: float = float("inf")
    num_tokens: int = 0
    is_given: bool = False


@dataclass
class Shifts:
    downs: list[Down] = field(default_factory=list)
    ups: list[Up] = field(default_factory=list)
    lives: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    costly: dict[str, dict[str, int]] = field(default_factory=dict)
    """By worker, by how much its counters grew from the first report to the last."""

    @property
    def num_between(self) -> int:
        """Shifts rollout to reward, or back."""
        return sum(_role(up.worker) != "train" and _role(up.followed) in ("rollout", "reward") for up in self.ups)

    @property
    def num_train(self) -> int:
        return sum("train" in (_role(up.worker), _role(up.followed)) for up in self.ups if up.followed)


def shifts_of(lines: Lines) -> Shifts:
    found = Shifts()
    seen: dict[str, _Seen] = defaultdict(_Seen)
    first: dict[str, dict[str, int]] = {}
    leaving: dict[str, Down] = {}  # by who follows
    for at, kind, worker, what in lines:
        of = seen[worker]
        match kind:
            case "ready":
                found.lives[worker].append(what["pid"])
                of.slept_at = at
            case "down":
                of.down, of.up = Down(worker, at, 0.0, 0, {}, "".join(what["following"][:1])), None
                leaving |= dict.fromkeys(what["following"], of.down)
            case "slept":
                of.slept_at = at
                if of.down is not None:
                    down, of.down = of.down, None
                    down.down_s, down.num_aborted, down.phases = at - down.at, what["num_aborted"], what["seconds"]
                    found.downs.append(down)
                _count(found, first, worker, what["costly"])
            case "up":
                of.up, of.is_given = Up(worker, at, 0.0, {}, at - of.slept_at), False
                if before := leaving.pop(worker, None):
                    of.up.followed = before.worker
            case "woken" if of.up is not None:
                of.up.woken_s, of.up.phases = at - of.up.at, what["seconds"]
                found.ups.append(of.up)
                _count(found, first, worker, what["costly"])
            case "dispatch" if of.up is not None and of.up.woken_s and not of.is_given:
                of.is_given, of.up.work_waited = True, what["after"] == "WorkerWoken"
            case "counts":
                if what["num_tokens"] > of.num_tokens and of.is_given:
                    _begun(of.up, at, found)
                of.num_tokens = what["num_tokens"]
            case "segments" if any(num for _, _, num, _ in what["segments"]) and of.is_given:
                _begun(of.up, at, found)
            case "verdicts" if of.is_given:
                _begun(of.up, at, found)
            case "started" if worker.startswith("train"):
                _begun(of.up, at, found)
    return found


def _begun(up: Up | None, at: float, found: Shifts) -> None:
    if up is None or up.token_s is not None:
        return
    up.token_s = at - up.at
    before = next((d for d in reversed(found.downs) if d.worker == up.followed and d.at <= up.at), None)
    if before is not None:
        up.both_s = at - before.at


def _count(found: Shifts, first: dict[str, dict[str, int]], worker: str, costly: dict[str, int]) -> None:
    before = first.setdefault(worker, costly)
    found.costly[worker] = {name: costly[name] - before[name] for name in costly}


def _role(worker: str) -> str:
    return worker.partition("-")[0]


# --- memory -----------------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """Of one worker: when a look began and ended, and how much it found."""

    at: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)

    def before(self, at: float) -> tuple[float, int] | None:
        index = bisect.bisect_left(self.ended, at) - 1
        return (self.at[index], self.held[index]) if index >= 0 else None

    def after(self, at: float) -> tuple[float, int, int] | None:
        index = bisect.bisect_right(self.at, at)
        return (self.at[index], self.held[index], self.shared[index]) if index < len(self.at) else None


@dataclass
class Change:
    """Of a worker's private memory with one half of a shift; `context`: what its worker holds more when it is awake."""

    worker: str
    at: float
    by: int
    context: int
    late_s: float
    shared: int


def _end(half: Down | Up) -> float:
    return half.at + (half.down_s if isinstance(half, Down) else half.woken_s)


def traces_of(samples: Iterable[Sequence[Any]]) -> dict[str, Trace]:
    found: dict[str, Trace] = defaultdict(Trace)
    for worker, _, at, ended, held, shared in samples:
        trace = found[worker]
        trace.at.append(at)
        trace.ended.append(ended)
        trace.held.append(held)
        trace.shared.append(shared)
    return dict(found)


def changes_of(shifts: Shifts, traces: dict[str, Trace]) -> tuple[list[Change], list[Change]]:
    """Of all downs and ups, from the last sample before the decision to the first one after the report. Left out are
    halves between which and the worker's next one, or the one before, it was not looked at."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for half in [*shifts.downs, *shifts.ups]:
        spans[half.worker].append((half.at, _end(half)))
    falls, rises = [], []
    for half in [*shifts.downs, *shifts.ups]:
        trace = traces.get(half.worker)
        before, after = (trace.before(half.at), trace.after(_end(half))) if trace else (None, None)
        if before is None or after is None:
            continue
        others = [span for span in spans[half.worker] if span[0] != half.at]
        if any(begin < after[0] and end > before[0] for begin, end in others):
            continue
        is_down = isinstance(half, Down)
        by = before[1] - after[1] if is_down else after[1] - before[1]
        change = Change(half.worker, half.at, by, 0, after[0] - _end(half), after[2])
        (falls if is_down else rises).append(change)
    by_worker: dict[str, list[int]] = defaultdict(list)
    for change in rises:
        by_worker[change.worker].append(change.by)
    for change in [*falls, *rises]:
        change.context = int(median(by_worker[change.worker] or [0]))
    return falls, rises
