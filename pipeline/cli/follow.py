"""Stay with a run: forward signals to its controller, show progress, report its end."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol, TextIO

from pipeline.cli.runs import Rows, Status, as_argument, how_it_stands, job_output, read_status
from pipeline.cli.show import describe_end, describe_stopped, judge_news
from pipeline.cli.terminal import abandon
from pipeline.disk import is_full
from pipeline.processes import describe_exit, log_tail
from pipeline.run_folder import RunFolder
from pipeline.status import EXIT_CODES, is_stopped
from pipeline.wording import number, seconds, visible

_USER_FAULT = 2
_FAILED = "genrm/failed_"
_POLL_S = 0.1
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Process(Protocol):
    """The controller's process, or what stands for it on another host: then `pid` is None."""

    @property
    def pid(self) -> int | None: ...

    returncode: Any

    def poll(self) -> int | None: ...
    def wait(self, timeout: float) -> int: ...
    def send_signal(self, sig: int) -> None: ...


MetricRow = dict[str, float | None]


class View(Protocol):
    """Shows a run while it goes on. `status` is None until the attempt has written one."""

    def show(self, status: Status | None, rows: list[MetricRow]) -> None: ...
    def close(self) -> None: ...


def follow(run: RunFolder, attempt: int, process: Process, out: TextIO | None = None, rows: Rows | None = None) -> int:
    """Show `attempt` of the run until its controller ends; return the exit code. `rows`: those still to be shown.

    SIGINT, SIGTERM and SIGHUP go to the controller: the first stops the run in order, the second at once. The run
    goes on though nobody reads the output any more.
    """
    rows, out = rows or Rows(run), out or sys.stdout
    view = _Guarded(_make_view(run, out), out)
    with _forwarding_signals(process):
        is_told = False
        while process.poll() is None:
            view.show(_status_of(run, attempt), rows.new())
            if not is_told and process.pid is not None and is_stopped(process.pid):
                is_told = True
                print(describe_stopped(process.pid), file=sys.stderr, flush=True)
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
        view.show(_status_of(run, attempt), rows.new())
        view.close()
        return _end(run, attempt, process, out)


def wait_for_start(run: RunFolder, attempt: int, process: Process) -> int | None:
    """Wait until the detached controller has written its status; the exit code if it ended before."""
    while _status_of(run, attempt) is None:
        try:
            process.wait(_POLL_S)
        except subprocess.TimeoutExpired:
            continue
        return _end(run, attempt, process, sys.stdout)
    return None


def _status_of(run: RunFolder, attempt: int) -> Status | None:
    """The status if it is of this attempt, and not of the one before."""
    status = read_status(run)
    return status if status["attempt"] >= attempt else None


def _end(run: RunFolder, attempt: int, process: Process, out: TextIO) -> int:
    """Report how the controller ended. Its exit code counts only where it could not write how the run ended."""
    status = _status_of(run, attempt)
    if process.returncode == _USER_FAULT:  # it found that it must not run
        text, code = visible(log_tail(run.path / "logs" / "controller.log", 1)), _USER_FAULT
    elif status is not None and status["status"] in EXIT_CODES:
        text, code = describe_end(run, status), EXIT_CODES[status["status"]]
    else:
        how = describe_exit(process.returncode)
        tail = visible(log_tail(run.path / "logs" / "controller.log") or job_output(run))
        text = f"the controller ended without a word: {how}\n{tail}"
        if is_full(run.path):
            text = f"no space left on {visible(str(run.path))}: {text}\nfree space first"
        text += f"\ngo on: pivot-pipeline resume {visible(as_argument(run))}"
        if not run.path.exists():
            text = f"the controller ended ({how}): the run's folder {visible(str(run.path))} is gone"
        code = 130 if process.returncode in (130, -signal.SIGINT) else 1
    try:
        print(text, file=out, flush=True)
    except OSError:  # nobody reads it any more; the code still says it
        abandon(out)
    return code


@contextmanager
def _forwarding_signals(process: Process) -> Iterator[None]:
    def forward(number: int, frame: FrameType | None) -> None:
        if process.poll() is None:
            process.send_signal(number)

    before = {sig: signal.signal(sig, forward) for sig in _FORWARDED}
    try:
        yield
    finally:
        for sig, handler in before.items():
            signal.signal(sig, handler)


class _Guarded:
    """A closed terminal or pipe ends the showing, never the run."""

    def __init__(self, view: View, out: TextIO) -> None:
        self._view, self._out = view, out

    def show(self, status: Status | None, rows: list[MetricRow]) -> None:
        try:
            self._view.show(status, rows)
        except OSError:
            abandon(self._out)

    def close(self) -> None:
        try:
            self._view.close()
        except OSError:
            abandon(self._out)


def _make_view(run: RunFolder, out: TextIO) -> View:
    if not out.isatty():
        return PlainView(run, out)
    from pipeline.cli.live import LiveView

    return LiveView(run, out)


class PlainView:
    """One line when the state changes and one for each step: for logs and pipes."""

    def __init__(self, run: RunFolder, out: TextIO) -> None:
        self._run, self._out, self._state, self._began = run, out, "", time.monotonic()
        self._news: list[str] = []

    def show(self, status: Status | None, rows: list[MetricRow]) -> None:
        state = how_it_stands(status) if status else "starting"
        if not self._state:
            self._say(f"run {visible(self._run.name)} in {visible(str(self._run.path))}")
        if state != self._state:
            self._state = state
            self._say(f"{state} ({seconds(time.monotonic() - self._began)} after the start)")
        if (news := judge_news(status)) != self._news:
            self._news = news
            self._say("\n".join(news))
        total = status["total_steps"] if status else "?"
        for row in rows:
            self._say(f"step {row['step']}/{total}  {describe_row(row)}")

    def close(self) -> None:
        self._out.flush()

    def _say(self, text: str) -> None:
        print(text, file=self._out, flush=True)


def describe_row(row: MetricRow) -> str:
    """The few numbers of a step that one looks at first."""
    shown = (
        ("reward", "critic/score/mean", ".3f"),
        ("accuracy", "val/acc", ".3f"),
        ("judge's false positives", "genrm/false_positive_rate", ".2f"),
        ("tokens", "response_length/mean", ".1f"),
        ("tokens/s", "perf/throughput", ",.0f"),
        ("s/step", "timing_s/step", ".2f"),
    )
    parts = [f"{name} {number(row[key], form)}" for name, key, form in shown if row.get(key) is not None]
    return "  ".join([*parts, *_judge_failures(row)])


def _judge_failures(row: MetricRow) -> list[str]:
    """A judge that fails is a reward that is not there: nobody should have to look for it."""
    share = row.get("genrm/fail_rate")
    if not share:
        return []
    types = {key.removeprefix(_FAILED): num for key, num in row.items() if key.startswith(_FAILED) and num}
    return [f"judge failures {share:.0%} ({', '.join(f'{name} {num:g}' for name, num in sorted(types.items()))})"]
