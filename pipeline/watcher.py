"""The controller's watcher: what happens in a live run, told to the monitor; the planner's questions, answered.

    wire messages, events ▶ reports ▶ Monitor ─ snapshot ▶ (a thread) decide ▶ PlanMade ▶ core
                                        └▶ CostsMeasured, metrics, planner/decisions.jsonl, timeline.jsonl

It reads the core and changes nothing there. All but `decide` and writing happens on the controller's loop. Whatever
goes wrong here is said, and the run goes on as if the planner said: stay.
"""

import asyncio
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pipeline.config import Config
from pipeline.core import decisions as de
from pipeline.core import events as ev
from pipeline.core.events import INFERENCE, Role
from pipeline.core.iteration import IterationCost
from pipeline.core.modes import ModeName, shared_roles
from pipeline.core.monitor import Monitor
from pipeline.core.reports import CacheKnown, Report
from pipeline.core.snapshot import Snapshot
from pipeline.processes import say
from pipeline.run_folder import RunFolder
from pipeline.watching.book import Book, began
from pipeline.watching.hands import Hands
from pipeline.watching.history import Line
from pipeline.watching.judge import Failing, JudgeWatch
from pipeline.watching.ports import Places, WatchedCore
from pipeline.watching.progress import Progress
from pipeline.watching.running import Running
from pipeline.watching.seen import Seen
from pipeline.watching.shifts import Shifts, figures
from pipeline.watching.usage import Usage
from pipeline.wire import FromWorker, WorkerExited, WorkerReady
from pipeline.wire_counts import Counts
from pipeline.wire_shift import Slept, WakeFailed, Woken

if TYPE_CHECKING:
    from pipeline.watching.plans import Answer, Decide
    from pipeline.watching.worth import Prediction, Worth

_CHANGED = 0.05
"""A cost that changed by less is not told again."""
_TYPICAL = (16.0, 8192.0)
"""Batch and context at which two costs are compared."""


class Watcher:
    """`post` takes an event on the loop's thread. `fault`: what is done with an error of ours. `decide`: another
    planner. `judge_fails`: who is told if the judge fails on most of the first step."""

    def __init__(
        self,
        core: WatchedCore,
        config: Config,
        post: Callable[[ev.Event], None],
        run: RunFolder,
        *,
        clock: Callable[[], float] = time.monotonic,
        fault: Callable[[Exception], None] | None = None,
        decide: "Decide | None" = None,
        judge_fails: Callable[[Failing], None] = lambda failing: None,
    ) -> None:
        self._core, self._config, self._post, self._clock = core, config, post, clock
        self._fault, self._decide = fault or self._say_once, decide
        self._has_failed = False
        self._judge, self._judge_fails = JudgeWatch(core.plan.sequences_per_step), judge_fails
        self._mode = ModeName(config.placement.mode)
        self._shared = shared_roles(self._mode, core.plan.replicas)
        self._is_shared = bool(self._shared)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="planner")
        attempts = run.attempts()
        attempt = attempts[-1] if attempts else 0
        self._book, self._timeline = (Book(path, attempt, say) for path in (run.decisions, run.timeline))
        age_s = max(0.0, time.time() - (began(run.timeline) or time.time()))
        self._seen = Seen(core, core.plan.block_slots, clock(), age_s)
        self._settings = config.placement.planner.settings()
        self.monitor: Monitor | None = None
        self._told: dict[Role, tuple[IterationCost, float]] = {}
        self._tell_at = 0.0
        self._worths: list[Worth] = []

    # --- what the shell calls --------------------------------------------------------------------------------------

    def heard(self, message: FromWorker | WorkerExited) -> None:
        """Before the event that comes of it."""
        self._safely(self._heard, message)

    def after(self, event: ev.Event, decisions: list[de.Decision], now: float) -> None:
        """The core took the event."""
        self._safely(self._after, event, decisions, now)

    def ask(self, number: int, cause: str) -> None:
        """Answered by PlanMade of this number, in any case."""
        try:
            assert self.monitor is not None, "nothing is known yet"
            now = self._clock()
            answer = self._planning.question(number, cause, self._snapshot(now))
        except Exception as error:
            self._fault(error)
            self._post(ev.PlanMade(number=number, reason=f"the planner failed: {error!r}"))
            return
        asked = asyncio.get_running_loop().run_in_executor(self._thread, answer.find)
        asked.add_done_callback(lambda done: self._answered(answer, done))

    def look(self) -> None:
        """Call some times a second: how things stand is written to timeline.jsonl."""
        self._safely(lambda: self._tell(self._seen.history.look(self._clock())))

    def picture(self) -> dict[str, Any]:
        """How things stand, for status.json: as of the last look."""
        found: dict[str, Any] = {}
        self._safely(lambda: found.update(self._seen.picture(self._clock(), time.time())))
        return found

    def metrics(self, step: int) -> dict[str, float]:
        """For the row of `step`: how things stand, and what was since the last row."""
        found: dict[str, float] = {}
        self._safely(lambda: found.update(self._metrics()))
        return found

    def close(self) -> None:
        """Nothing more is taken. What waits is done before the process ends."""
        self._safely(lambda: self._tell(self._seen.history.rest()))
        self._thread.shutdown(wait=False)

    # --- what happens ----------------------------------------------------------------------------------------------

    def _begin(self, version: int, now: float) -> None:
        from pipeline.beliefs import believe  # numpy, which the queue's client has loaded by now
        from pipeline.watching.plans import Planning

        self._places = places = Places(self._core, self._shared)
        self._hands = Hands(places)
        believed = believe(
            self._config,
            self._core.plan,
            at_s=now,
            version=version,
            train_blocks=places.train,
            block_slots=places.size,
            in_pairs=self._mode is ModeName.SHIFTABLE and self._core.plan.staleness > 0,
        )
        self.monitor = Monitor(believed)
        self._usage = Usage({r.role: r.slots for r in self._core.plan.replicas}, places.size, now)
        self._progress = Progress(self._core, places, version)
        self._running = Running(self._core, places, self._hands, believed)
        self._shifts = Shifts()
        self._planning = Planning(self._core, places, self._config.placement.planner, self._decide)

    def _feed(self, *reports: Report) -> None:
        assert self.monitor is not None
        self.monitor.feed(*reports)
        self._usage.take(reports)
        self._seen.take(reports)

    def _heard(self, message: FromWorker | WorkerExited) -> None:
        if self.monitor is None:
            return
        now = self._clock()
        match message:
            case Counts():
                self._seen.history.rates.heard(message, now)
                self._feed(*self._running.heard(message, now))
                self._tell_costs(now)
            case Slept() | Woken() | WakeFailed():
                self._shifts.heard(message, self._block_of(message.worker), now)
            case WorkerReady():
                self._running.begun(message.worker)
                worker = self._core.fleet.workers.get(message.worker)
                if message.kv_tokens and worker is not None and worker.role in INFERENCE:
                    known = CacheKnown(at_s=now, role=worker.role, kv_tokens=float(message.kv_tokens))
                    self._feed(known)
            case WorkerExited():
                self._running.begun(message.worker)
                self._seen.history.rates.ended(message.worker)

    def _after(self, event: ev.Event, decisions: list[de.Decision], now: float) -> None:
        if isinstance(event, ev.VerdictGiven) and (failing := self._judge.take(event.verdicts)) is not None:
            self._judge_fails(failing)
        if isinstance(event, ev.RunRestored):
            self._begin(event.version, now)
        if self.monitor is None:
            return
        if self._hands.may_have_changed(event, decisions):
            self._move(event, decisions, now)
        self._feed(*self._progress.look(now), *self._running.take(event, decisions, now))
        if isinstance(event, ev.StepRecorded):
            self._tell(self._seen.record(event.step, now))
        if due := self._planning.due(self._progress):
            judged, published = dict(self._progress.judged), dict(self._progress.published)
            self._in_thread(self._weigh, due, judged, published, self._snapshot(now))

    def _move(self, event: ev.Event, decisions: list[de.Decision], now: float) -> None:
        """Blocks may have changed hands."""
        assert self.monitor is not None
        reports: list[Report] = list(self._hands.look(now))
        self._feed(*reports)
        if not self._is_shared:
            return
        number, planned = (event.number, dict(event.moves)) if isinstance(event, ev.PlanMade) else (None, {})
        self._shifts.take(reports, number, planned)
        workers = self._core.fleet.workers
        ordered = {d.worker for d in decisions if isinstance(d, de.ShiftDown | de.ShiftUp)}
        blocks = {name: block for name in ordered if (block := self._block_of(name)) is not None}
        self._shifts.order(decisions, workers, blocks, now)
        for shift in self._shifts.ended():
            self._planning.shifted(shift)
            self._seen.shifts.ended(shift, time.time(), max(self._core.steps, default=0))
            self._write("shift", now, shift.line() | {"slots": self._places.slots_of(shift.block)})

    def _block_of(self, name: str) -> int | None:
        worker = self._core.fleet.workers.get(name)
        return self._places.block_of(worker) if worker is not None else None

    def _snapshot(self, now: float) -> Snapshot:
        assert self.monitor is not None
        self._feed(*self._hands.heard(now), *self._running.picture(now))
        return self.monitor.snapshot(now)

    # --- what follows ----------------------------------------------------------------------------------------------

    def _answered(self, answer: "Answer", done: "asyncio.Future[None]") -> None:
        if done.cancelled():  # at the end
            return
        error = done.exception()
        if isinstance(error, Exception):
            self._fault(error)
            answer.fail(error)
        self._planning.keep(answer)
        if answer.moves:
            self._seen.shifts.decided(answer.number, answer.prediction.gain_s if answer.prediction else None)
        self._write("decision", answer.snapshot.at_s, answer.line())
        self._post(answer.event())

    def _weigh(
        self,
        due: "list[tuple[float, Prediction]]",
        judged: dict[int, float],
        published: dict[int, float],
        then: Snapshot,
    ) -> None:
        """In the planner's thread: what plans were worth, now that it is seen."""
        from pipeline.watching.plans import weigh, worth_line

        for worth in weigh(due, judged, published, then):
            self._worths.append(worth)
            self._seen.shifts.weighed(worth.prediction.number, worth.gain_s)
            self._book.write("worth", then.at_s, worth_line(worth))

    def _tell_costs(self, now: float) -> None:
        assert self.monitor is not None
        if now < self._tell_at:
            return
        self._tell_at = now + self._settings.every_s(self.monitor.cycle_s)
        for role in INFERENCE:
            cost, rest = self.monitor.cost(role), self.monitor.rest_tokens(role)
            before = self._told.get(role)
            if before is None or _differs(before[0], cost) or abs(rest - before[1]) > _CHANGED * before[1]:
                self._told[role] = cost, rest
                self._post(ev.CostsMeasured(role=role, cost=cost, rest_tokens=rest))

    def _metrics(self) -> Mapping[str, float]:
        if self.monitor is None:
            return {}
        now = self._clock()
        self._snapshot(now)
        found = self.monitor.figures(now) | self._usage.since(now)
        if self._is_shared:
            shifts, asked = self._planning.since()
            found |= figures(shifts) | asked
            worths, self._worths = [w for w in self._worths if w.prediction.is_shift], []
            if worths:
                found |= {
                    "shift/predicted_gain_s": sum(w.prediction.gain_s for w in worths) / len(worths),
                    "shift/measured_gain_s": sum(w.gain_s for w in worths) / len(worths),
                    "shift/regret_s": sum(w.regret_s for w in worths) / len(worths),
                }
        return found

    def _write(self, kind: str, at_s: float, line: Mapping[str, Any]) -> None:
        self._in_thread(self._book.write, kind, at_s, line)

    def _tell(self, lines: Iterable[Line]) -> None:
        for kind, at_s, line in lines:
            self._in_thread(self._timeline.write, kind, at_s, line)

    def _in_thread(self, call: Callable[..., None], *args: Any) -> None:
        with suppress(RuntimeError):  # at the end nothing more is taken
            self._thread.submit(self._safely, call, *args)

    def _safely(self, call: Callable[..., None], *args: Any) -> None:
        """The border: nobody else depends on what is watched."""
        try:
            call(*args)
        except Exception as error:
            self._fault(error)

    def _say_once(self, error: Exception) -> None:
        if not self._has_failed:
            self._has_failed = True
            say(f"the watcher failed, and the run goes on: {''.join(traceback.format_exception(error))}")


def _differs(one: IterationCost, other: IterationCost) -> bool:
    pairs = ((one.iteration_s(*_TYPICAL), other.iteration_s(*_TYPICAL)), (one.prefill_s, other.prefill_s))
    return any(abs(a - b) > _CHANGED * a for a, b in pairs)
