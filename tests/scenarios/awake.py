"""Who is awake on which GPU of a run in a job, told three times: by /proc, by the agents, by the ledger.

An emulated worker that is awake has memory which /proc/PID/maps shows under the names of its devices (stages.ballast),
each time another file: what is there in two looks was there between them. The ledger of any moment is what the core
says when it takes the run's journal again. A worker that is on its way down, up or to its start may be either; whoever
the ledger has ready, or asleep, must be so in /proc at that moment.
"""

import contextlib
import itertools
import json
import os
import re
import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config import load_resolved
from pipeline.controller import make_plan
from pipeline.core.core import Core
from pipeline.core.worker import WorkerState
from pipeline.journal import read_journal
from pipeline.run_folder import RunFolder, read_json
from tests.cluster import SlurmCluster
from tests.fakes.looker import Looker

_LOG = re.compile(r"^/logs/attempt_(\d+)/([^/-]+)-((?:rollout|reward|train)-\d+)\.log$")
_HELD = re.compile(r" (\d+) +/memfd:gpus:(\S*) \(deleted\)$", re.MULTILINE)
_AWAKE = {WorkerState.READY: True, WorkerState.LOADING: True, WorkerState.ASLEEP: False}
"""Of the others nothing is known."""


@dataclass(frozen=True, slots=True)
class Held:
    """Devices, from the first moment at which they were seen to the last."""

    devices: tuple[int, ...]
    first: float
    last: float


@dataclass(frozen=True, slots=True)
class Process:
    """`held`: nothing, if it was asleep in both looks; one thing, if that was there in both; else what was seen."""

    attempt: int
    node: str
    worker: str
    pid: int
    held: tuple[Held, ...]
    is_steady: bool

    @property
    def devices(self) -> tuple[int, ...] | None:
        """Of those that it was awake on all the time; None: it slept."""
        return self.held[0].devices if self.held else None


@dataclass(frozen=True, slots=True)
class Instant:
    """/proc as it was between two moments; before them the status was written, at `told` (all by the same clock)."""

    told: float
    began: float
    ended: float
    processes: tuple[Process, ...]
    status: dict[str, Any]


class Look(Looker):
    """Takes instants until it is left."""

    def __init__(self, run: RunFolder, cluster: SlurmCluster, period_s: float = 0.03) -> None:
        super().__init__(period_s)
        self._run, self._cluster = run, cluster
        self.instants: list[Instant] = []
        self.workers: dict[int, tuple[int, str, str]] = {}
        """Attempt, node and name of each, by pid."""
        self.nodes: dict[int, list[str]] = {}
        """Under which each worker was found; under none, if it was dead by then."""

    def look(self) -> None:
        self._find_new()
        status = read_json(self._run.status) or {}
        began = time.monotonic()
        told = began - (time.time() - status.get("updated", 0.0))
        looks = [{pid: _look(pid) for pid in self.workers} for _ in range(2)]
        ended = time.monotonic()
        found = [_process(*who, pid, looks[0][pid], looks[1][pid]) for pid, who in self.workers.items()]
        self.instants.append(Instant(told, began, ended, tuple(one for one in found if one), status))

    def _find_new(self) -> None:
        for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
            if pid not in self.workers:
                with contextlib.suppress(OSError):  # it has just ended
                    log = _LOG.search(os.readlink(f"/proc/{pid}/fd/1").removeprefix(str(self._run.path)))
                    if log is not None:
                        self.workers[pid] = int(log[1]), log[2], log[3]
                        self.nodes[pid] = [node for node in self._cluster.nodes if pid in self._cluster.processes(node)]


_Seen = tuple[float, str, tuple[int, ...]] | None
"""When, which file, which devices; of one that sleeps no file and none. None: it is dead."""


def _look(pid: int) -> _Seen:
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return None
    if not maps:  # it is dying
        return None
    awake = _HELD.search(maps)
    devices = tuple(map(int, awake[2].split(","))) if awake else ()
    return time.monotonic(), awake[1] if awake else "", devices


def _process(attempt: int, node: str, worker: str, pid: int, one: _Seen, two: _Seen) -> Process | None:
    if one is None or two is None:
        return None
    is_steady = one[1] == two[1]
    spans = [(one, two)] if is_steady else [(one, one), (two, two)]
    held = tuple(Held(first[2], first[0], last[0]) for first, last in spans if first[1])
    return Process(attempt, node, worker, pid, held, is_steady)


Standing = tuple[int, str, tuple[int, ...], int, WorkerState]
"""Of a worker: attempt, node, slots, life, state."""


class Ledger:
    """Of all attempts of a run, at each moment of the past."""

    def __init__(self, run: RunFolder) -> None:
        self._times: list[float] = []
        self._standings: list[dict[str, Standing]] = []
        for attempt in run.attempts():
            core = Core(make_plan(load_resolved(run.config)))
            for at, event in read_journal(run.journal(attempt)):
                core.handle(event, at)
                now = {w.name: (attempt, w.node, w.slots, w.life, w.state) for w in core.fleet.workers.values()}
                if not self._standings or now != self._standings[-1]:
                    self._add(at, now)
            self._add(at, {})  # what ends with it the journal does not tell

    def _add(self, at: float, now: dict[str, Standing]) -> None:
        self._times.append(at)
        self._standings.append(now)

    def settled(self, began: float, ended: float) -> dict[str, tuple[Standing, bool]]:
        """The workers who were ready, or asleep, all of this time: what they were last, and whether awake."""
        first, last = bisect_right(self._times, began) - 1, bisect_right(self._times, ended)
        if first < 0:
            return {}
        found = {}
        for name, standing in self._standings[last - 1].items():
            all_of_them = [standings.get(name) for standings in self._standings[first:last]]
            states = {_AWAKE.get(one[4]) if one and one[:4] == standing[:4] else None for one in all_of_them}
            if len(states) == 1 and (is_awake := states.pop()) is not None:
                found[name] = standing, is_awake
        return found

    def ends(self, name: str, standing: Standing, after: float) -> bool:
        """Whether this life of the worker is over later on."""
        later = self._standings[bisect_right(self._times, after) :]
        return any(
            name not in now or now[name][:4] != standing[:4] or now[name][4] in (WorkerState.DEAD, WorkerState.FENCED)
            for now in later
        )


@dataclass
class Compared:
    """`faults`: what was seen and may not be. `num_instants`: in which /proc was compared with the ledger, `num_told`
    with an agent's report; `num_awake`: workers of each role that were found awake as the ledger has them."""

    num_instants: int = 0
    num_told: int = 0
    num_awake: Counter[str] = field(default_factory=Counter)
    num_asleep: int = 0
    faults: list[str] = field(default_factory=list)


def compare(run: RunFolder, look: Look) -> Compared:
    """Of a run that has ended."""
    ledger, found = Ledger(run), Compared()
    for pid, (_, node, worker) in look.workers.items():
        if look.nodes[pid] not in ([], [node]):
            found.faults.append(f"{worker} of {node} runs on {look.nodes[pid]}")
    for instant in look.instants:
        there = {(p.attempt, p.worker): p for p in instant.processes}
        found.faults += _shared_gpus(instant)
        settled = ledger.settled(instant.began, instant.ended)
        if not settled:
            continue
        found.num_instants += 1
        for name, (standing, is_awake) in settled.items():
            attempt, node, slots, _, state = standing
            process = there.get((attempt, name))
            if process is None:
                if not ledger.ends(name, standing, instant.ended):
                    found.faults.append(f"{name} is {state}, and has no process")
            elif not process.is_steady or (process.node, process.devices) != (node, slots if is_awake else None):
                found.faults.append(f"{name} is {state} on {node} {slots}, /proc says {process}")
            else:
                found.num_awake[name.partition("-")[0]] += is_awake
                found.num_asleep += not is_awake
        found.faults += _misreported(instant, found, ledger, there)
    return found


def _shared_gpus(instant: Instant) -> list[str]:
    """GPUs on which two are awake at the same moment."""
    held = [(p.node, p.worker, one) for p in instant.processes for one in p.held]
    return [
        f"{who} and {other} are awake on GPUs of {node}: {one}, {two}"
        for (node, who, one), (place, other, two) in itertools.combinations(held, 2)
        if node == place and who != other and set(one.devices) & set(two.devices)
        if max(one.first, two.first) <= min(one.last, two.last)
    ]


def _misreported(instant: Instant, found: Compared, ledger: Ledger, there: dict[tuple[int, str], Process]) -> list[str]:
    """The agents' report against the ledger of the same moment, and where nothing has changed since, against /proc."""
    status, faults, is_compared = instant.status, [], False
    since = ledger.settled(instant.told, instant.ended)
    for worker in status.get("workers", ()):
        name, is_awake = worker["name"], _AWAKE.get(WorkerState(worker["state"]))
        bound = status["bindings"].get(worker["node"], {}).get(name)
        if is_awake is None or bound is None:
            continue
        if (bound["awake"], bound["slots"]) != (is_awake, worker["slots"]):
            faults.append(f"the ledger has {worker}, its agent says {bound}")
        process = there.get((status["attempt"], name))
        if name in since and since[name][0][0] == status["attempt"] and process is not None:
            is_compared = True
            if (process.pid, process.devices is not None) != (bound["pid"], bound["awake"]):
                faults.append(f"its agent says {bound}, /proc says {process}")
    found.num_told += is_compared
    return faults


def shifts(run: RunFolder) -> list[dict[str, Any]]:
    """Those that were made, as the watcher wrote them down."""
    lines = [json.loads(line) for line in run.decisions.read_text().splitlines()]
    return [line for line in lines if line["kind"] == "shift" and not line["failure"]]
