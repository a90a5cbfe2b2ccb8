"""One lookout for all jobs of a process, without accounting: one squeue each few seconds, whoever asks about whatever.

What it tells is what Slurm said, and when. It never concludes that a run is over, nor that a job failed because Slurm
is silent: an outage leaves every job as it was last seen. The end of a run is the run's own marker file.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from pipeline.core.errors import SlurmError
from slurm.commands import Clients
from slurm.parse import JobState

_PERIOD_S = 3.0
"""Each poll costs Slurm's controller a lock; sites ask users for not more than one each second."""
_SETTLE_S = 30.0
"""So long a job that was just submitted may be missing: sites put a cache before squeue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What is known of a job now.

    `job`: what Slurm said last, None if it never listed the job. `is_gone`: it answered, and does not list the job
    (any more). `silent_s`: how long it has not answered, None where its last answer is at most a poll old. `error`:
    the client's words, if the last poll failed.
    """

    job: JobState | None
    is_gone: bool
    silent_s: float | None
    error: str = ""

    @property
    def state(self) -> str:
        """Slurm's word, or GONE, or UNKNOWN: not (yet) listed, or Slurm is silent."""
        if self.is_gone:
            return "GONE"
        return "UNKNOWN" if self.job is None or self.silent_s is not None else self.job.state


class Lookout:
    """May be asked from any thread; the one that finds the last answer too old asks Slurm, the others wait for it."""

    def __init__(
        self,
        clients: Clients,
        period_s: float = _PERIOD_S,
        settle_s: float = _SETTLE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clients = replace(clients, tries=1)  # the next poll is the next try
        self._period_s, self._settle_s, self._clock = period_s, settle_s, clock
        self._lock = threading.Lock()
        self._watched_at: dict[str, float] = {}
        self._seen: dict[str, JobState] = {}
        self._listed: frozenset[str] = frozenset()
        self._answered_at: float | None = None
        """When the last question that was answered was put."""
        self._asked_at: float | None = None
        self._error = ""

    def watch(self, job: str) -> None:
        """From now on the job is known to be submitted. Idempotent."""
        with self._lock:
            self._watched_at.setdefault(job, self._clock())

    def look(self, job: str, at_once: bool = False) -> Sighting:
        """What is known of a watched job (KeyError); with `at_once` Slurm is asked now. It may take a client's time
        limit, and never raises what Slurm does."""
        with self._lock:
            watched_at = self._watched_at[job]
            now = self._clock()
            if at_once or self._asked_at is None or now - self._asked_at >= self._period_s:
                self._poll(now)
            return self._sighting(job, watched_at)

    def _poll(self, now: float) -> None:
        try:
            jobs = self._clients.jobs()
        except SlurmError as error:
            self._error = str(error)
        else:
            self._error, self._answered_at, self._listed = "", now, frozenset(jobs)
            self._seen.update((id, job) for id, job in jobs.items() if id in self._watched_at)
        self._asked_at = self._clock()

    def _sighting(self, job: str, watched_at: float) -> Sighting:
        answered_at = self._answered_at
        if answered_at is None or answered_at < watched_at:
            since = watched_at
            is_gone = False
        else:
            since = answered_at
            is_settled = job in self._seen or answered_at - watched_at >= self._settle_s
            is_gone = is_settled and job not in self._listed
        return Sighting(
            job=self._seen.get(job),
            is_gone=is_gone,
            silent_s=self._clock() - since if self._error else None,
            error=self._error,
        )
