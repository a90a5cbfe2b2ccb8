"""The thread-safe front of an engine: one thread steps it, any thread asks.

Everything asked for goes through one inbox and is done between two steps, at a token boundary, in order. The loop
consumes the inbox and the engine's outputs, produces outputs into each request's outbox, and waits only for the
inbox, and only while the engine has nothing to do. While there is something to do, the watchdog is fed.
"""

import contextlib
import queue
import time
from collections.abc import Callable
from typing import NoReturn, TypeVar

from pipeline.wire_shift import Probe
from stages.engines.base import Engine, EngineReport, Output, Request, Stored
from stages.engines.speed import Speed
from stages.engines.watchdog import Watchdog

T = TypeVar("T")
COUNTS_EVERY_S = 0.25


class EngineHost:
    """`on_counts` hears of changed counts, and of what was done since, at most four times a second."""

    def __init__(
        self, engine: Engine, on_counts: Callable[[EngineReport], None], watchdog: Watchdog | None = None
    ) -> None:
        self._engine = engine
        self._on_counts = on_counts
        self._watchdog = watchdog or Watchdog()
        self.seconds: dict[str, float] = {}
        """Of the last sleep (`release`) or wake (`read`, `cache`), for who hears of its end."""
        self._is_unfit = False
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._outboxes: dict[str, queue.SimpleQueue[Output]] = {}
        self._fresh: dict[str, int] = {}  # prompt tokens of requests without any token yet, also of an earlier engine
        self._speed = Speed()
        self._counted = engine.counts()
        self._counted_at = time.monotonic()

    @property
    def version(self) -> int:
        """The version of the weights that the engine answers with."""
        return self._engine.version

    def submit(self, requests: list[Request], outbox: "queue.SimpleQueue[Output]") -> None:
        """Outputs arrive in `outbox`, the last of each request with a finish; "error" if the engine refuses it."""
        self._inbox.put(lambda: self._add(requests, outbox))

    def abort(self, ids: list[str] | None) -> None:
        """Stop these requests (None: all). Each one's last output, finish "abort", arrives in its outbox."""
        self._inbox.put(lambda: self._route(self._engine.abort(ids)))

    def load(
        self,
        stored: Stored,
        probe: Probe | None,
        *,
        keep_kv: bool,
        on_end: Callable[[Exception | None], None],
    ) -> None:
        """Take this version at the next token boundary. What runs is aborted before, unless `keep_kv`. `on_end` hears
        of the end, or of the failure, on the engine's thread.

        After a failure nobody knows what the weights are: until a load succeeds, all requests end with "abort".
        """

        def run() -> None:
            with self._watchdog.allowing(stored.wait_s, "limits.publish_s"):
                on_end(self._load(stored, probe, keep_kv))

        self._inbox.put(run)

    def sleep(self, on_end: Callable[[Exception | None], None]) -> None:
        """Give up the memory of weights and caches at the next token boundary. What runs is aborted before; while it
        sleeps, all requests end with "abort". `on_end` hears of the end, or of the failure, on the engine's thread."""
        self._inbox.put(lambda: on_end(self._sleep()))

    def wake(self, stored: Stored, probe: Probe | None, *, on_end: Callable[[Exception | None], None]) -> None:
        """Take the memory again, with this version. `on_end` as in `sleep`. After a failure, too, all requests end with
        "abort"."""

        def run() -> None:
            with self._watchdog.allowing(stored.wait_s, "limits.publish_s"):
                on_end(self._wake(stored, probe))

        self._inbox.put(run)

    def call(self, function: Callable[[Engine], T]) -> T:
        """Run `function` on the engine's thread, wait, return or raise what it does. Not from that thread."""
        reply: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                reply.put((function(self._engine), None))
            except BaseException as error:
                reply.put((None, error))

        self._inbox.put(run)
        value, error = reply.get()
        if error is not None:
            raise error
        return value  # type: ignore[return-value]

    def post(self, function: Callable[[Engine], None]) -> None:
        """Run `function` on the engine's thread, without waiting. What it raises ends the worker."""
        self._inbox.put(lambda: function(self._engine))

    def run(self) -> NoReturn:
        """The engine's loop, on the thread that made the engine. Ends only by an exception."""
        self._watchdog.start()
        while True:
            self._drain()
            if self._engine.has_unfinished():
                self._watchdog.feed()
                self._step()
            self._report(time.monotonic())

    def _step(self) -> None:
        started = time.monotonic()
        outputs = self._engine.step()
        self._route(outputs)
        self._speed.step(time.monotonic() - started, self._engine.work())

    def _drain(self) -> None:
        if not self._engine.has_unfinished():
            self._wait()
        with contextlib.suppress(queue.Empty):
            while True:
                self._inbox.get_nowait()()

    def _wait(self) -> None:
        """Until something is asked; or until the last change of the counts is due, if it was not reported yet."""
        due = self._counted_at + COUNTS_EVERY_S - time.monotonic()
        pending = self._engine.counts() != self._counted
        self._watchdog.pause()
        waits = [max(0.0, due)] if pending else []
        waits += [self._watchdog.rest_after_s] if self._watchdog.rest_after_s is not None else []
        try:
            asked = self._inbox.get(timeout=min(waits, default=None))
        except queue.Empty:
            self._watchdog.rest()
        else:
            self._watchdog.feed()
            asked()

    def _report(self, now: float) -> None:
        if now - self._counted_at < COUNTS_EVERY_S:
            return
        counts = self._engine.counts()
        if counts != self._counted:
            self._counted, self._counted_at = counts, now
            self._on_counts(self._speed.take(counts))

    def _load(self, stored: Stored, probe: Probe | None, keep_kv: bool) -> Exception | None:
        if not keep_kv:
            self._route(self._engine.abort())
        try:
            self._engine.load(stored, probe, keep_kv=keep_kv)
        except Exception as error:
            self._is_unfit = True
            self._route(self._engine.abort())
            return error
        self._is_unfit = False
        return None

    def _sleep(self) -> Exception | None:
        started = time.monotonic()
        self._watchdog.feed()
        self._route(self._engine.abort())
        try:
            self._engine.sleep()
        except Exception as error:
            self._is_unfit = True
            return error
        self.seconds = {"release": time.monotonic() - started}
        return None

    def _wake(self, stored: Stored, probe: Probe | None) -> Exception | None:
        try:
            self.seconds = self._engine.wake(stored, probe)
        except Exception as error:
            self._is_unfit = True
            return error
        self._is_unfit = False
        return None

    def _add(self, requests: list[Request], outbox: "queue.SimpleQueue[Output]") -> None:
        version = self._engine.version
        for request in requests:
            if self._is_unfit or self._engine.is_asleep:
                outbox.put(Output(id=request.id, version=version, finish="abort"))
                continue
            try:
                if request.id in self._outboxes:
                    raise ValueError(f"request {request.id} is already running")
                self._engine.add(request)
            except ValueError as error:
                print(f"request refused: {error}")
                outbox.put(Output(id=request.id, version=version, finish="error"))
            else:
                self._outboxes[request.id] = outbox
                if not request.num_kept:
                    self._fresh[request.id] = len(request.prompt_ids)

    def _route(self, outputs: list[Output]) -> None:
        for output in outputs:
            num_tokens = self._fresh.pop(output.id, 0) if output.tokens or output.finish else 0
            if num_tokens and output.tokens:
                self._speed.start(num_tokens, output.num_cached)
            outbox = self._outboxes.pop(output.id) if output.finish else self._outboxes[output.id]
            outbox.put(output)
