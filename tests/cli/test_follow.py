"""Staying with a run: against a process that behaves as a controller does, and is one in nothing else."""

import io
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.cli.follow import describe_row, follow, wait_for_start
from pipeline.cli.runs import Rows, read_status, signal_controller
from pipeline.run_folder import RunFolder, read_json
from pipeline.tracking import MetricsLog
from tests.cli.conftest import Pivot, environment

FAKE = Path(__file__).with_name("fake_controller.py")


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "my run")
    made.create()
    (made.path / "logs").mkdir()
    return made


def start(run: RunFolder, mode: str) -> "subprocess.Popen[bytes]":
    with open(run.path / "logs" / "controller.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, str(FAKE), str(run.path), mode],
            env=environment(),
            stdout=log,
            stderr=log,
            process_group=0,
        )


def when(condition: Callable[[], object], then: Callable[[], object]) -> threading.Thread:
    def watch() -> None:
        deadline = time.monotonic() + 30
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.01)
        then()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def is_running(run: RunFolder) -> bool:
    return (read_json(run.status) or {}).get("status") == "running"


def send_self(sig: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), sig)


def test_a_run_is_followed_to_its_end(run: RunFolder) -> None:
    out = io.StringIO()
    assert follow(run, 1, start(run, "done"), out) == 0
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line.startswith("step ")] == [
        "step 1/2  reward 0.250  tokens/s 1,234",
        "step 2/2  reward 0.500  accuracy 0.750",
    ]
    assert any(line.startswith("my run: done") for line in lines)


def test_r06_a_failure_exits_with_1_and_names_the_cause(run: RunFolder) -> None:
    out = io.StringIO()
    assert follow(run, 1, start(run, "fail"), out) == 1
    text = out.getvalue()
    assert "cause (reward on local-0): worker reward-0 died\nlast lines of its log:\nKilled" in text
    assert "pivot-pipeline resume" in text


def test_a_controller_that_ends_without_a_word_is_a_failure(run: RunFolder) -> None:
    out = io.StringIO()
    assert follow(run, 1, start(run, "mute"), out) == 1
    assert "exit code 7" in out.getvalue() and "Traceback: it broke \\x1b[2J" in out.getvalue()


def test_a_killed_controller_is_a_failure(run: RunFolder) -> None:
    out, process = io.StringIO(), start(run, "wait")
    killer = when(lambda: is_running(run), process.kill)
    assert follow(run, 1, process, out) == 1
    killer.join()
    assert "killed by SIGKILL" in out.getvalue()


@pytest.mark.parametrize("sig", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_stops_the_run_in_order(run: RunFolder, sig: signal.Signals) -> None:
    sender = when(lambda: is_running(run), send_self(sig))
    assert follow(run, 1, start(run, "wait"), io.StringIO()) == 130
    sender.join()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_ctrl_c_reaches_the_controller_too(run: RunFolder) -> None:
    first = when(lambda: is_running(run), send_self(signal.SIGINT))
    second = when((run.path / "asked").exists, send_self(signal.SIGINT))
    assert follow(run, 1, start(run, "stubborn"), io.StringIO()) == 130
    first.join()
    second.join()


def test_the_status_of_an_earlier_attempt_is_not_taken_for_this_one(run: RunFolder) -> None:
    assert follow(run, 1, start(run, "done"), io.StringIO()) == 0
    assert follow(run, 2, start(run, "mute"), io.StringIO()) == 1


def test_a_detached_start_is_waited_for(run: RunFolder) -> None:
    process = start(run, "wait")
    assert wait_for_start(run, 1, process) is None
    assert signal_controller(read_status(run), signal.SIGTERM)
    assert process.wait(30) == 130
    assert not signal_controller(read_status(run), signal.SIGTERM)


def test_the_second_ctrl_c_of_cancel_reaches_the_controller(run: RunFolder, pivot: Pivot) -> None:
    run.config.touch()
    process = start(run, "stubborn")
    wait_for_start(run, 1, process)
    sender = when((run.path / "asked").exists, send_self(signal.SIGINT))
    assert pivot("cancel", str(run.path)).code == 0
    assert process.wait(30) == 130
    sender.join()


def test_logs_are_followed_until_the_run_ends(run: RunFolder, pivot: Pivot) -> None:
    run.config.touch()
    process = start(run, "wait")
    wait_for_start(run, 1, process)
    log = run.process_log(1, "local-0", "rollout-0")
    log.write_text("first\nha")

    def go_on() -> None:
        with open(log, "a") as file:
            file.write("lf\nand the end")
        process.terminate()
        process.wait()

    writer = threading.Timer(0.3, go_on)
    writer.start()
    done = pivot("logs", str(run.path), "-f", "--role", "rollout")
    writer.join()
    assert (done.code, done.out) == (0, "==> attempt_1/local-0-rollout-0.log <==\nfirst\nhalf\nand the end\n")


def test_a_detached_start_that_fails_says_so(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert wait_for_start(run, 1, start(run, "mute")) == 1
    assert "exit code 7" in capsys.readouterr().out


def test_a_reader_that_leaves_does_not_end_the_run(run: RunFolder) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", buffering=1) as out:
        assert follow(run, 1, start(run, "done"), out) == 0


def test_a_terminal_shows_the_run_in_place(run: RunFolder) -> None:
    terminal, end = pty.openpty()
    seen: list[bytes] = []

    def read() -> None:
        while True:
            try:
                seen.append(os.read(terminal, 4096))
            except OSError:  # the other end was closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    process = start(run, "wait")
    sender = when(lambda: b"".join(seen).count(b"step 1 of 2") and b"scored" in b"".join(seen), process.terminate)
    with open(end, "w") as out:
        assert follow(run, 1, process, out) == 130
    reader.join()
    sender.join()
    os.close(terminal)
    text = b"".join(seen).decode()
    assert "rollout: 3 scored" in text and "reward 0.250" in text and "my run: cancelled" in text


def test_each_row_is_shown_once_though_the_file_is_replaced(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    rows = Rows(run)
    assert rows.new() == []
    log = MetricsLog(run.metrics)
    log.append(1, {"a": 1.0, "a long name": 1.0})
    assert [row["step"] for row in rows.new()] == [1]
    log.rewrite([(1, {"a": 1.0}), (2, {"a": 2.0})])
    assert [row["step"] for row in rows.new()] == [2]
    with open(run.metrics, "a") as file:
        file.write('{"step": 3, ')
        file.flush()
        assert rows.new() == []
        file.write('"a": 3.0}\n')
    assert [row["step"] for row in rows.new()] == [3]


def test_a_judge_that_fails_is_shown_with_each_step() -> None:
    row = {"critic/score/mean": 0.5, "genrm/fail_rate": 0.25, "genrm/failed_timeout": 3.0, "genrm/failed_empty": 1.0}
    assert describe_row(row) == "reward 0.500  judge failures 25% (empty 1, timeout 3)"
    assert "judge" not in describe_row({"critic/score/mean": 0.5, "genrm/fail_rate": 0.0})
