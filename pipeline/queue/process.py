"""The queue server's process, as the controller holds it: started, watched, and started again on its port."""

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable
from typing import NoReturn

from pipeline.core.errors import RunError
from pipeline.disk import EXIT_FULL
from pipeline.processes import (
    SHIELD,
    beat_period_s,
    describe_exit,
    dying_with,
    log_tail,
    python_command,
    python_environment,
    say,
    when_ended,
)
from pipeline.run_folder import RunFolder, read_json

_POLL_S = 0.005


class QueueProcess:
    """Make it inside the running loop. `failure` is set, and says why, if the server cannot go on: it ended before it
    ever served, the disk is full, or it ended more than `restarts` times without progress in between. After any other
    end it is started again."""

    def __init__(self, run: RunFolder, attempt: int, restarts: int, host: str = "127.0.0.1") -> None:
        self._run, self._attempt, self._restarts, self._host = run, attempt, restarts, host
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._endpoint_file = run.secrets / f"queue-{attempt}.json"
        self._log = run.logs(attempt) / "queue.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_wanted = True
        self._num_deaths = 0
        self._why_killed = ""
        self._endpoint = ""
        """Where it has served."""

    def make_key(self) -> bytes:
        """The run's queue secret, made once."""
        path = self._run.secrets / "queue.key"
        if not path.exists():
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(fd, "wb") as file:
                file.write(secrets.token_bytes(32))
        return path.read_bytes()

    def start(self, port: int = 0) -> None:
        """It dies with this process. Call from the main thread."""
        where = ("--host", self._host, "--port", str(port))
        args = (str(self._run.path), str(self._attempt), *where, "--parent", str(os.getpid()))
        with open(os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:
            self._process = subprocess.Popen(
                [*SHIELD, *python_command("pipeline.queue.server", *args)],
                env=python_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=dying_with(signal.SIGKILL),
            )
        when_ended(self._process, self._ended)

    async def endpoint(self, timeout_s: float) -> str:
        """Where it serves. Raises RunError with its log's end if it does not within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            found = read_json(self._endpoint_file)
            if found is not None:
                self._endpoint = str(found["endpoint"])
                return self._endpoint
            await asyncio.sleep(_POLL_S)
        raise RunError(f"the queue server did not start within {timeout_s:g} s\n{log_tail(self._log)}")

    async def watch(self, ping: Callable[[float], bool], heartbeat_s: float, start_s: float) -> NoReturn:
        """Kill the server when it does not answer: it is stopped, or stuck. Endless.

        `ping(timeout_s)` tries once, in a thread. A server may be silent for `heartbeat_s`, one that was just started
        for a third of `start_s`: its callers wait no longer than that, and the next one must be up in time for them.
        """
        watched, answered, limit_s, name = self._process, time.monotonic(), heartbeat_s, "limits.heartbeat_s"
        before, pause_s = time.monotonic(), beat_period_s(heartbeat_s)
        while True:
            if time.monotonic() - before > heartbeat_s + 2 * pause_s:  # this process itself stood still
                answered = time.monotonic()
            before = time.monotonic()
            if self._process is not watched:
                watched, answered, name = self._process, time.monotonic(), "a third of limits.request_s"
                limit_s = max(heartbeat_s, start_s / 3)
            if await asyncio.to_thread(ping, heartbeat_s):
                answered, limit_s, name = time.monotonic(), heartbeat_s, "limits.heartbeat_s"
            elif self._process is watched and time.monotonic() - answered >= limit_s and watched is not None:
                self._why_killed = f"it did not answer for {time.monotonic() - answered:.1f} s ({name})"
                watched.kill()
            await asyncio.sleep(pause_s if name == "limits.heartbeat_s" else _POLL_S)

    def progress(self) -> None:
        """The run got further: ends before this do not count any more."""
        self._num_deaths = 0

    def stop(self) -> None:
        """What it acknowledged is durable, so it need not be asked."""
        self._is_wanted = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        with contextlib.suppress(OSError):  # it may not be what the run is remembered for
            for file in self._run.secrets.glob("queue-*.json"):  # those of killed attempts too
                file.unlink(missing_ok=True)

    def _ended(self, returncode: int) -> None:
        if not self._is_wanted or self.failure.done():
            return
        self._num_deaths += 1
        how, self._why_killed = self._why_killed or describe_exit(returncode), ""
        if returncode == EXIT_FULL:
            reason = f"the queue server could not write to {self._run.queue}: {os.strerror(EXIT_FULL)}"
        elif not self._endpoint:
            reason = f"the queue server ended before it served ({how})"
        elif self._num_deaths > self._restarts:
            reason = f"the queue server ended {self._num_deaths} times without progress ({how})"
        else:
            say(f"the queue server ended ({how}) and is started again")
            try:
                self.start(int(self._endpoint.rpartition(":")[2]))
                return
            except OSError as error:
                reason = f"the queue server ended ({how}) and cannot be started again: {error}"
        self.failure.set_result(f"{reason}\n{log_tail(self._log)}")
