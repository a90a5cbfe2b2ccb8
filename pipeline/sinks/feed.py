"""The run's side of the user's sinks. Every method returns at once (`close` within its limit) and none raises.

A row is sent when it is durable; once the sink has taken it, that is noted in the run's folder, so that each step comes
once, however often the run goes on.
"""

import contextlib
import json
import os
import queue
import re
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.compose import parse
from pipeline.config import Config, without_passwords, without_secrets
from pipeline.metrics import Row, only_finite
from pipeline.processes import SHIELD, describe_exit, python_command, python_environment, say
from pipeline.run_folder import RunFolder, read_json, write_json

_START_S, _CALL_S = 120.0, 60.0
"""How long a sink's start and each other call may take."""


class _GaveUp(Exception):
    """The sink is no more; the message says why."""


class Sinks:
    """All of `tracking.also`. `call_s`: how long one call to a sink may take."""

    def __init__(self, run: RunFolder, config: Config, attempt: int, call_s: float = _CALL_S) -> None:
        self._feeds = [_Feed(path, run, config, attempt, call_s) for path in config.tracking.also]

    @property
    def state(self) -> list[dict[str, Any]]:
        """For status.json: each sink with the last step that it took, and what is wrong with it."""
        return [{"path": feed.path, "last_step": feed.last_step, "trouble": feed.trouble} for feed in self._feeds]

    def resume(self, rows: Iterable[tuple[int, Row]]) -> None:
        """The durable rows of earlier attempts: what a sink has not taken yet is sent."""
        for step, row in rows:
            self.log(step, row)

    def log(self, step: int, row: Row) -> None:
        for feed in self._feeds:
            feed.put(step, row)

    def open(self) -> None:
        """Start them: call it once the engines are up."""
        for feed in self._feeds:
            feed.open()

    def close(self, status: str, timeout_s: float = 30.0) -> None:
        """Send what waits, and the end. A sink that needs longer is ended."""
        deadline = time.monotonic() + timeout_s
        for feed in self._feeds:
            feed.end(status)
        for feed in self._feeds:
            feed.join(max(0.0, deadline - time.monotonic()))


class _Feed:
    """One sink: its rows, its thread and its process, which dies with the thread."""

    def __init__(self, path: str, run: RunFolder, config: Config, attempt: int, call_s: float) -> None:
        self.path, self.trouble = path, ""
        self._run, self._config, self._attempt, self._call_s = run, config, attempt, call_s
        self._name = re.sub(r"\W+", "_", path.rpartition("/")[2])
        note = read_json(run.sink(self._name)) or {"id": uuid.uuid4().hex, "last_step": -1}
        self._id, self.last_step = str(note["id"]), int(note["last_step"])
        self._queue: queue.SimpleQueue[tuple[int, Row] | str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_over = self._has_rows = False

    def put(self, step: int, row: Row) -> None:
        if not self._is_over and step > self.last_step:
            self._has_rows = True
            self._queue.put((step, row))

    def open(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=f"sink {self.path}", daemon=True)
            self._thread.start()

    def end(self, status: str) -> None:
        """Of a run that neither has rows nor was ever opened (a failed start) nothing is told."""
        self._queue.put(status)
        if self._has_rows:
            self.open()

    def join(self, timeout_s: float) -> None:
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive() and self._process is not None:
            self._complain("it did not close in time; what it lacks is told when the run goes on")
            self._process.kill()
            self._thread.join()

    def _work(self) -> None:
        """Consumes rows, produces calls of the sink; ends with the run, or when the sink is given up. Waits for rows,
        and for the sink, each time with a limit."""
        mine, its = socket.socketpair()
        try:
            self._run.sink(self._name).parent.mkdir(mode=0o700, exist_ok=True)
            with mine, mine.makefile("rb") as answers:
                self._process = self._begin(its)
                its.close()
                if error := self._answer(mine, answers, _START_S):
                    raise _GaveUp(f"it could not be started: {error}")
                while not isinstance(item := self._queue.get(), str):
                    step, row = item
                    metrics = {name: value for name, value in only_finite(row).items() if value is not None}
                    metrics.pop("time", None)
                    if error := self._ask(mine, answers, {"step": step, "metrics": metrics}):
                        self._complain(error)
                        continue
                    self.last_step = step
                    write_json(self._run.sink(self._name), {"id": self._id, "last_step": step}, durable=False)
                if error := self._ask(mine, answers, {"close": item}):
                    self._complain(error)
        except Exception as error:  # the border: no sink stops a run
            self._complain(f"{error}" if isinstance(error, _GaveUp) else f"{type(error).__name__}: {error}")
        finally:
            self._is_over = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()

    def _begin(self, its: socket.socket) -> "subprocess.Popen[bytes]":
        run = {
            "name": self._run.name,
            "id": self._id,
            "folder": str(self._run.path),
            "attempt": self._attempt,
            "first_step": self.last_step + 1,
            "config": parse(without_secrets(self._config), "config"),
        }
        told = {"path": self.path, "code_path": self._config.run.code_path, "run": run}
        command = python_command("pipeline.sinks.process", str(its.fileno()), str(os.getpid()), json.dumps(told))
        with open(self._log, "ab") as log:
            return subprocess.Popen(
                [*SHIELD, *command],
                env=python_environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[its.fileno()],
            )

    @property
    def _log(self) -> Path:
        return self._run.logs(self._attempt) / f"sink-{self._name}.log"

    def _ask(self, sock: socket.socket, answers: Any, order: dict[str, Any]) -> str:
        """What went wrong, or ""."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):  # that is heard next
            sock.settimeout(self._call_s)
            sock.sendall(json.dumps(order).encode() + b"\n")
        return self._answer(sock, answers, self._call_s)

    def _answer(self, sock: socket.socket, answers: Any, limit_s: float) -> str:
        """Raises _GaveUp if there is none in time."""
        sock.settimeout(limit_s)
        try:
            line = answers.readline()
        except TimeoutError:
            raise _GaveUp(f"it took longer than {limit_s:g} s, and was ended") from None
        except ConnectionResetError:
            line = b""
        if not line:
            assert self._process is not None
            self._process.kill()
            raise _GaveUp(f"its process ended: {describe_exit(self._process.wait())}")
        return str(json.loads(line)["error"])

    def _complain(self, error: str) -> None:
        """Once: what comes after the first trouble stands in the sink's log."""
        if not self.trouble:
            self.trouble = without_passwords(error)
            say(f"tracking.also {self.path}: {self.trouble}; the run goes on; see {self._log}")
