"""Nothing is acknowledged before it is durable, whatever the server was doing when it died."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.queue.client import QueueClient
from pipeline.run_folder import RunFolder, read_json
from tests.queue.processes import REPOSITORY, Server, make_run, score_all, wait_for

_TRACED = "pwrite64,fdatasync,fsync,sendmsg"


def server_command(run: RunFolder, port: int = 0) -> list[str]:
    command = [sys.executable, "-m", "pipeline.queue.server", str(run.path), "1", "--port", str(port)]
    return [*command, "--parent", str(os.getpid())]


def client_of(run: RunFolder) -> QueueClient:
    file = run.secrets / "queue-1.json"
    wait_for(file.exists, "the queue server")
    return QueueClient(read_json(file)["endpoint"], (run.secrets / "queue.key").read_bytes(), 1, 20.0)


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[tuple[RunFolder, Path]]:
    """A server whose system calls are written to a file."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    run, log = make_run(tmp_path / "run"), tmp_path / "calls"
    strace = ["strace", "-D", "-f", "-y", "-s", "400", "-e", f"trace={_TRACED}", "-o", str(log)]
    process = subprocess.Popen([*strace, *server_command(run)], cwd=REPOSITORY)
    yield run, log
    process.kill()
    process.wait()


def completed(lines: list[str], call: str, file: str, after: int) -> int:
    """The line at which the first such call after `after` has returned."""
    for number in range(after, len(lines)):
        thread = lines[number].split()[0]
        if not re.match(rf"\d+ +{call}\(\d+<[^>]*{file}>", lines[number]):
            continue
        if "<unfinished" not in lines[number]:
            return number
        return next(n for n in range(number, len(lines)) if re.match(rf"{thread} +<\.\.\. {call} resumed", lines[n]))
    raise AssertionError(f"no {call} of {file} after line {after}:\n" + "\n".join(lines[after:]))


def test_a_reply_leaves_after_the_sync_of_segment_and_commit(traced: tuple[RunFolder, Path]) -> None:
    run, log = traced
    queue = client_of(run)
    ids = score_all(queue, 1)
    queue.commit_batch(1, ids, [])
    assert queue.record_step(1, {"a": 1.0})
    wait_for(lambda: log.read_text().count(r"\n\4true") == 1, "the trace of the last reply")
    lines = log.read_text().splitlines()

    puts = [n for n, line in enumerate(lines) if "sendmsg(" in line and r"\n\2ok" in line]
    assert len(puts) == 3  # prompts, segments, verdicts
    start = 0
    for reply in puts:
        written = completed(lines, "pwrite64", r"\.arrows", start)
        synced = completed(lines, "fdatasync", r"\.arrows", written)
        committed = completed(lines, "fdatasync", r"index\.db-wal", synced)
        assert written < synced < committed < reply, "\n".join(lines[start : reply + 1])
        start = reply + 1
    (reply,) = (n for n, line in enumerate(lines) if "sendmsg(" in line and r"\n\4true" in line)
    written = max(n for n, line in enumerate(lines[:reply]) if "pwrite64(" in line and "index.db-wal>" in line)
    assert written < completed(lines, "fdatasync", r"index\.db-wal", written) < reply


@pytest.mark.parametrize(
    ("point", "nth"),  # of the put of segments
    [
        ("before_write", 2),
        ("after_write", 2),
        ("after_sync", 2),
        ("before_commit", 3),
        ("after_commit", 3),
        ("before_reply", 3),
    ],
)
def test_killed_between_any_two_actions_nothing_is_lost_or_doubled(tmp_path: Path, point: str, nth: int) -> None:
    run = make_run(tmp_path / "run")
    told = {"PIVOT_KILL_POINT": f"queue.{point}:{nth}"}
    first = subprocess.Popen(server_command(run), cwd=REPOSITORY, env={**os.environ, **told})
    queue = client_of(run)
    done: list[object] = []

    def work() -> None:
        ids = score_all(queue, 1)
        queue.commit_batch(1, ids[:3], [(ids[3], "judge:empty")], {"queue_depth": 4})
        done.append(queue.commit_trained(1))
        done.append(queue.record_step(1, {"a": 1.0}))

    caller = threading.Thread(target=work)
    caller.start()
    assert first.wait(timeout=20) == -9, f"nothing came to {point}"
    server = Server(run, start_at=int(queue.endpoint.rpartition(":")[2]))
    caller.join(timeout=20)
    try:
        assert done == [(3, 1), True]
        found = queue.batch(1)
        assert [row.tokens for row in found] == [[1, 0], [1, 1], [1, 2]]
        assert [row.num_segments for row in found] == [1, 1, 1] and {row.score for row in found} == {1.0}
        stats = queue.stats()
        assert (stats["trained"], stats["dropped"], stats["segments"], stats["batches"]) == (3, 1, 4, 1)
        assert queue.batch_parts(0) == {1: {"queue_depth": 4}} and queue.step_rows(0) == [(1, {"a": 1.0})]
    finally:
        server.kill()
