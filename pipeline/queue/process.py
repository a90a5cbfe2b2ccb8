"""The queue server's process, as the controller holds it: started, and started again on its port when it dies."""

import asyncio
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from pipeline.core.errors import RunError
from pipeline.processes import (
    SHIELD,
    describe_exit,
    dying_with,
    log_tail,
    python_command,
    python_environment,
    when_ended,
)
from pipeline.run_folder import RunFolder, read_json

_POLL_S = 0.005


class QueueProcess:
    """`on_failure` hears why if the server ends before it ever served; afterwards it is started again instead."""

    def __init__(self, run: RunFolder, attempt: int, on_failure: Callable[[str], None]) -> None:
        self._run, self._attempt, self._on_failure = run, attempt, on_failure
        self._endpoint_file = run.secrets / f"queue-{attempt}.json"
        self._log = run.logs(attempt) / "queue.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._is_wanted = True

    def make_key(self) -> bytes:
        """The run's queue secret, made once."""
        path = self._run.secrets / "queue.key"
        if not path.exists():
            fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with open(fd, "wb") as file:
                file.write(secrets.token_bytes(32))
        return path.read_bytes()

    def start(self, port: int = 0) -> None:
        """It dies with this process. Call from the main thread, inside the running loop."""
        args = (str(self._run.path), str(self._attempt), "--port", str(port), "--parent", str(os.getpid()))
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
                return str(found["endpoint"])
            await asyncio.sleep(_POLL_S)
        raise RunError(f"the queue server did not start within {timeout_s:g} s\n{log_tail(self._log)}")

    def stop(self) -> None:
        """What it acknowledged is durable, so it need not be asked."""
        self._is_wanted = False
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _ended(self, returncode: int) -> None:
        if not self._is_wanted:
            return
        found = read_json(self._endpoint_file)
        if found is None:
            self._on_failure(
                f"the queue server ended before it served ({describe_exit(returncode)})\n{log_tail(self._log)}"
            )
            return
        print(f"the queue server ended ({describe_exit(returncode)}) and is started again", file=sys.stderr, flush=True)
        self.start(int(found["endpoint"].rpartition(":")[2]))
