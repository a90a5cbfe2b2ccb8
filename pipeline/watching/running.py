"""What runs and what waits: counted anew for each picture, from the core's sequences, so that nothing can drift.

Tokens come to the core when they are durable, every `rollout.flush_s`, and those of a verdict only with its end. What
was generated since is reckoned: each iteration of an engine gives a token to each sequence that it runs, and engines
report how many they made. Those that wait within the engine, the last that it was given, get none.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.core import events as ev
from pipeline.core.dag import StepProgress as Step
from pipeline.core.decisions import Decision, Dispatch
from pipeline.core.events import INFERENCE, Role
from pipeline.core.length_model import Ages, count_ages
from pipeline.core.reports import QueueReport, ReplicaEnded, ReplicaReport, Report, SequencesEnded, StepProgress
from pipeline.core.sequences import Sequence, SequenceState
from pipeline.core.snapshot import Snapshot
from pipeline.core.worker import Worker
from pipeline.watching.hands import Hands
from pipeline.watching.ports import Places, WatchedCore
from pipeline.watching.progress import is_judged
from pipeline.wire_counts import Counts

_CUT_SHORT = ("timeout",)
"""Failures of a judge that was not let finish: how long it would have become is not known."""


@dataclass(slots=True)
class _Engine:
    """`iterations` it made in all, `waiting`: requests that it has and does not run."""

    replica: int
    iterations: float = 0.0
    waiting: int = 0
    kv_tokens: int = 0
    ages: Mapping[int, Ages] | None = None


_Runs = tuple[int, int, int, float]
"""Order of dispatch, step, tokens that are durable, and the engine's iterations then."""


@dataclass(slots=True)
class _Mark:
    """Of a sequence that was dispatched and has not ended in that role: when its tokens were last known, by its
    engine's iterations. `order`: of dispatch."""

    worker: str
    role: Role
    iterations: float
    order: int


class Running:
    def __init__(self, core: WatchedCore, places: Places, hands: Hands, believed: Snapshot) -> None:
        self._core, self._places, self._hands = core, places, hands
        self._num_sequences = believed.num_sequences
        views = {role: believed.role(role) for role in INFERENCE}
        self._bins = {role: (view.bin_tokens, len(view.survival) - 1) for role, view in views.items()}
        self._prompt = {role: view.prompt_tokens for role, view in views.items()}
        self._engines: dict[str, _Engine] = {}
        self._marks: dict[str, _Mark] = {}
        self._told: dict[str, Role] = {}  # replicas of which the monitor knows
        self._num_dispatched = 0

    # --- what comes

    def heard(self, counts: Counts, now: float) -> Iterable[Report]:
        worker = self._core.fleet.workers.get(counts.worker)
        block = self._places.block_of(worker) if worker is not None else None
        if worker is None or block is None or worker.role not in INFERENCE:
            return
        engine = self._engine(counts.worker)
        engine.iterations += counts.num_iterations
        engine.waiting, engine.kv_tokens = counts.waiting, counts.kv_tokens
        yield ReplicaReport(
            at_s=now,
            replica=engine.replica,
            block=block,
            role=worker.role,
            num_running=counts.running,
            ages=dict(engine.ages or {}),
            kv_tokens=counts.kv_tokens,
            num_iterations=counts.num_iterations,
            decode_s=counts.decode_s,
            batch=counts.batch,
            context=counts.context,
            prefill_tokens=counts.prefill_tokens,
            prefill_s=counts.prefill_s,
            num_started=counts.num_started,
            started_tokens=counts.started_tokens,
            started_prefill_tokens=counts.started_prefill_tokens,
        )
        self._told[counts.worker] = worker.role

    def begun(self, worker: str) -> None:
        """A new process: what its engine had is gone."""
        if worker in self._engines:
            self._engines[worker] = _Engine(self._engines[worker].replica)

    def take(self, event: ev.Event, decisions: Iterable[Decision], now: float) -> Iterable[Report]:
        """Those that have ended, with their lengths; and who was given what."""
        match event:
            case ev.SegmentClosed():
                yield from self._closed(event, now)
            case ev.VerdictGiven():
                yield from self._judged(event, now)
        for decision in decisions:
            if isinstance(decision, Dispatch):
                name, iterations = decision.worker, self._engine(decision.worker).iterations
                role = self._core.fleet.workers[name].role
                for id in decision.ids:
                    self._num_dispatched += 1
                    self._marks[id] = _Mark(name, role, iterations, self._num_dispatched)

    def _closed(self, event: ev.SegmentClosed, now: float) -> Iterable[Report]:
        ended: list[tuple[int, float | None]] = []
        for segment in event.segments:
            mark = self._marks.get(segment.id)
            if segment.finish is ev.Finish.FLUSH:
                if mark is not None:
                    mark.iterations = self._engine(mark.worker).iterations
                continue
            sequence = self._end(segment.id, Role.ROLLOUT) if segment.finish is not ev.Finish.ABORT else None
            if sequence is None:
                continue
            is_whole = segment.num_tokens > 0 or segment.idx == sequence.num_segments  # all pieces were reported
            ended.append((sequence.step - 1, float(sequence.num_tokens) if is_whole else None))
        yield from _ended(Role.ROLLOUT, ended, now)

    def _judged(self, event: ev.VerdictGiven, now: float) -> Iterable[Report]:
        ended: list[tuple[int, float | None]] = []
        for verdict in event.verdicts:
            sequence = self._end(verdict.id, Role.REWARD)
            if sequence is not None:
                is_whole = verdict.num_tokens > 0 and verdict.failure not in _CUT_SHORT
                ended.append((sequence.step - 1, float(verdict.num_tokens) if is_whole else None))
        yield from _ended(Role.REWARD, ended, now)

    def _end(self, id: str, role: Role) -> Sequence | None:
        """The sequence, if it has just ended in that role: once."""
        mark = self._marks.get(id)
        if mark is None or mark.role is not role or id not in self._core.sequences:
            return None
        sequence = self._core.sequences[id]
        if sequence.place.role is role:
            return None
        del self._marks[id]
        return sequence

    # --- the picture

    def picture(self, now: float) -> list[Report]:
        """All that a monitor needs to know of what runs and waits now. Costs a look at each sequence."""
        core, marks = self._core, self._marks
        homes = {name: self._home(worker) for name, worker in core.fleet.workers.items()}
        run: dict[str, list[_Runs]] = {name: [] for name, home in homes.items() if home is not None}
        fresh: dict[Role, Counter[int]] = {role: Counter() for role in INFERENCE}
        begun: dict[Role, dict[int, list[float]]] = {role: {} for role in INFERENCE}
        reports: list[Report] = []
        rollout, running = Role.ROLLOUT, SequenceState.RUNNING
        for number, step in core.steps.items():
            if number <= core.versions.current:
                continue
            num_left = dict.fromkeys(INFERENCE, 0)
            sequences = core.sequences.of_step(number)
            for sequence in sequences:
                place = sequence.place
                role = place.role
                if role is None:
                    continue
                num_left[role] += 1
                tokens = sequence.num_tokens if role is rollout else 0
                if place.state is running:
                    mark = marks.get(sequence.id)
                    there = run.get(mark.worker) if mark is not None else None
                    if mark is not None and there is not None:
                        there.append((mark.order, number - 1, tokens, mark.iterations))
                        continue
                if tokens:  # waits, or goes back to the queue in a moment
                    begun[role].setdefault(number - 1, []).append(tokens)
                else:
                    fresh[role][number - 1] += 1
            reports.append(self._progress(step, num_left if sequences else None, now))
        for role in INFERENCE:
            ages = {n: count_ages(found, *self._bins[role]) for n, found in begun[role].items()}
            reports.append(QueueReport(at_s=now, role=role, num_fresh=dict(fresh[role]), ages=ages))
        return [*self._replicas(homes, run, now), *reports]

    def _progress(self, step: Step, num_left: Mapping[Role, int] | None, now: float) -> Report:
        """`num_left`: in each role; None: the step has no sequences, not yet or not any more."""
        num = self._num_sequences
        if num_left is None:
            rolled = scored = num if is_judged(step) else 0
        else:
            rolled = num - num_left[Role.ROLLOUT]
            scored = rolled - num_left[Role.REWARD]
        return StepProgress(at_s=now, step=step.step - 1, num_rolled_out=rolled, num_scored=scored)

    def _replicas(
        self, homes: Mapping[str, tuple[int, Role] | None], run: Mapping[str, list[_Runs]], now: float
    ) -> Iterable[Report]:
        for name, role in list(self._told.items()):
            if homes.get(name) is None:
                del self._told[name]
                yield ReplicaEnded(at_s=now, replica=self._engine(name).replica, role=role)
        for name, home in homes.items():
            if home is None:
                continue
            block, role = home
            engine, mine = self._engine(name), run[name]
            ages = _ages(engine, mine)
            engine.ages = {step: count_ages(found, *self._bins[role]) for step, found in ages.items()}
            held = float(engine.kv_tokens)
            if mine and not held:
                held = len(mine) * self._prompt[role] + sum(map(sum, ages.values()))
            yield ReplicaReport(
                at_s=now,
                replica=engine.replica,
                block=block,
                role=role,
                num_running=len(mine),
                ages=engine.ages,
                kv_tokens=held if mine else 0.0,
            )
            self._told[name] = role

    def _home(self, worker: Worker) -> tuple[int, Role] | None:
        """Block and role of a worker that serves; None: what it runs goes back, or has gone."""
        if worker.role not in INFERENCE or not worker.serves:
            return None
        block = self._places.block_of(worker)
        return (block, worker.role) if block is not None and self._hands.role(block) is worker.role else None

    def _engine(self, worker: str) -> _Engine:
        return self._engines.setdefault(worker, _Engine(len(self._engines)))


def _ended(role: Role, ended: Iterable[tuple[int, float | None]], now: float) -> Iterable[Report]:
    """Step and length; None: that is not known."""
    by_step: dict[int, list[float | None]] = {}
    for step, length in ended:
        by_step.setdefault(step, []).append(length)
    for step, found in by_step.items():
        lengths = tuple(length for length in found if length is not None)
        unknown = len(found) - len(lengths)
        yield SequencesEnded(at_s=now, role=role, step=step, lengths=lengths, num_unknown=unknown)


def _ages(engine: _Engine, run: list[_Runs]) -> dict[int, list[float]]:
    """By step, tokens of each."""
    if engine.waiting:
        run.sort()
    num_running = len(run) - engine.waiting
    found: dict[int, list[float]] = {}
    for i, (_, step, tokens, iterations) in enumerate(run):
        since = engine.iterations - iterations if i < num_running else 0.0
        found.setdefault(step, []).append(tokens + since)
    return found
