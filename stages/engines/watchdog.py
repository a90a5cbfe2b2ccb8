"""Ends a process whose engine hangs, and says where.

A Python thread does it, with the limit's name in the log's last line. A hang may hold the GIL: then it cannot, and a
little later faulthandler's timer does, which is C code in a thread of its own. Both write the tracebacks of all threads
and exit with code 1.
"""

import faulthandler
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_REARM = 0.1  # of the limit: how stale the timer may be (arming it starts a thread: 70 µs)
_MARGIN = 0.2  # of the limit: how much later than the Python thread the timer is


class Watchdog:
    """While it is fed, each gap must be shorter than `limit_s`; a process that is hung ends within 1.3 limits.

    One per process, fed by one thread. It writes to `file` (a descriptor). With an infinite limit it does nothing.
    """

    def __init__(self, name: str = "no limit", limit_s: float = math.inf, file: int = 2) -> None:
        self._name, self._limit_s, self._file = name, limit_s, file
        self._what = ""
        self._due = math.inf  # when to write the line
        self._rearm_at = -math.inf

    @property
    def rest_after_s(self) -> float | None:
        """An armed timer must be fed or put to rest within this time; None: it is not armed."""
        return None if self._rearm_at == -math.inf else self._limit_s * _REARM

    def start(self) -> None:
        """Before it is fed for the first time, in the process that is watched."""
        if self._limit_s < math.inf:
            self._say(f"an engine that hangs for {self._name} ({self._limit_s:g} s) ends this process")
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def feed(self) -> None:
        """There is work, and it goes on."""
        if self._limit_s < math.inf:
            now = time.monotonic()
            self._due = now + self._limit_s
            if now >= self._rearm_at:
                self._arm(now, self._limit_s)

    def pause(self) -> None:
        """There is no work; within `rest_after_s` there will be some again, or `rest` is called."""
        self._due = math.inf

    def rest(self) -> None:
        """There is no work."""
        self._due = math.inf
        if self._rearm_at > -math.inf:
            faulthandler.cancel_dump_traceback_later()
            self._rearm_at = -math.inf

    @contextmanager
    def allowing(self, extra_s: float, what: str) -> Iterator[None]:
        """A piece of work that may take the limit and `extra_s`, whose name is `what`."""
        if self._limit_s < math.inf:
            now = time.monotonic()
            self._what, self._due = f" + {what}", now + self._limit_s + extra_s
            self._arm(now, self._limit_s + extra_s)
        try:
            yield
        finally:
            self._what, self._rearm_at = "", min(self._rearm_at, time.monotonic())
            self.feed()

    def _arm(self, now: float, limit_s: float) -> None:
        faulthandler.dump_traceback_later(limit_s + self._limit_s * _MARGIN, exit=True, file=self._file)
        self._rearm_at = now + self._limit_s * _REARM

    def _watch(self) -> None:
        """Consumes nothing; waits for the time at which the limit is overrun; ends with the process."""
        while True:
            time.sleep(self._limit_s * _MARGIN / 4)
            if time.monotonic() >= self._due:
                over = f"{self._name}{self._what} is over: the engine hangs"
                self._say(f"{over}, and this is where its threads are")
                faulthandler.dump_traceback(file=self._file)
                self._say(over)  # once more: who reports the death reads the end of the log
                os._exit(1)

    def _say(self, text: str) -> None:
        os.write(self._file, f"{text}\n".encode())
