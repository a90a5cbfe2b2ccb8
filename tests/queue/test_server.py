"""The server as a process: who may speak to it, what survives its death, who holds the index, when it ends."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow.flight as fl
import pytest

from pipeline.core.errors import Fenced, QueueUnavailable
from pipeline.queue.channel import ServerHandshake
from pipeline.queue.client import QueueClient
from pipeline.queue.schema import sequence_id
from tests.queue.processes import REPOSITORY, Server, make_run, prompts, segment, spawn, wait_for


def test_a_peer_without_the_secret_is_refused(shared: Server) -> None:
    for secret in (b"x" * 32, b""):
        stranger = QueueClient(shared.endpoint, secret, 1, deadline_s=5)
        with pytest.raises(PermissionError, match="refused our secret"):
            stranger.stats()
        with pytest.raises(PermissionError, match="refused our secret"):
            stranger.admit(prompts(1))
    mute = fl.connect(shared.endpoint)
    with pytest.raises(fl.FlightUnauthenticatedError):
        list(mute.do_action(fl.Action("stats", b'{"attempt": 1}')))


class _FalseHandshake(ServerHandshake):
    """Lets anyone in, to hear what they say."""

    def authenticate(self, outgoing, incoming) -> None:
        outgoing.write(b"n" * 32)
        incoming.read()
        outgoing.write(b"p" * 32 + self._token)


@pytest.fixture
def false_server() -> Iterator[fl.FlightServerBase]:
    server = fl.FlightServerBase("grpc://127.0.0.1:0", auth_handler=_FalseHandshake(b"guess"))
    yield server
    server.shutdown()


def test_a_server_without_the_secret_is_refused(false_server: fl.FlightServerBase) -> None:
    client = QueueClient(f"grpc://127.0.0.1:{false_server.port}", b"x" * 32, 1, deadline_s=5)
    with pytest.raises(PermissionError, match="does not know the secret"):
        client.admit(prompts(1))


def test_another_attempt_is_fenced(shared: Server, queue: QueueClient, step: int) -> None:
    rows = prompts(step)
    queue.admit(rows)
    for attempt in (0, 2):
        other = QueueClient(shared.endpoint, (shared.run.secrets / "queue.key").read_bytes(), attempt, 5)
        for call in (
            lambda other=other: other.admit(prompts(step + 1)),
            lambda other=other: other.claim([rows[0].id], [9]),
            lambda other=other: other.restore(0, strict=True),
        ):
            with pytest.raises(Fenced, match=f"attempt {attempt} called the queue server of attempt 1"):
                call()
    assert len(queue.claim([rows[0].id], [1])) == 1


def test_files_are_private(shared: Server, queue: QueueClient, step: int) -> None:
    queue.admit(prompts(step))
    files = [p for p in shared.run.queue.rglob("*") if p.is_file()] + list(shared.run.secrets.glob("queue-*.json"))
    assert {"index.db", "index.db-wal", "queue-1.json"} <= {p.name for p in files}
    assert [p.name for p in files if p.stat().st_mode & 0o077 and p.name != "queue.key"] == []


def test_group_signals_do_not_end_it(shared: Server, queue: QueueClient) -> None:
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
        shared.process.send_signal(signum)
        queue.stats()
    status = Path(f"/proc/{shared.process.pid}/status").read_text()
    pending = [line for line in status.splitlines() if line.startswith(("ShdPnd", "SigPnd"))]
    assert all(int(line.split()[1], 16) == 0 for line in pending)
    assert shared.process.poll() is None


def test_concurrent_puts_share_a_commit(shared: Server, step: int) -> None:
    rows = prompts(step, 160)
    shared.client().admit(rows)
    shared.client().claim([row.id for row in rows], [1] * 160)
    queue = shared.client()  # one client for all threads
    before = queue.stats()["syncs"]

    def put(part: int) -> None:
        for row in rows[part::8]:
            queue.put_segments([segment(row.id, [1, 2, 3])])

    threads = [threading.Thread(target=put, args=(part,)) for part in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {row.state for row in queue.get([row.id for row in rows])} == {"generated"}
    assert queue.stats()["syncs"] - before < 120


def test_kill_in_the_middle_of_puts(server: Server) -> None:
    """Nothing acknowledged is lost, nothing is doubled, and every put gets through in the end."""
    num_threads, num_segments = 4, 40
    rows = prompts(1, num_threads)
    server.client().admit(rows)
    server.client().claim([row.id for row in rows], [1] * num_threads)
    acknowledged = [0] * num_threads
    idle = server.client()
    idle.stats()

    def produce(no: int) -> None:
        queue, id = server.client(), rows[no].id
        for idx in range(num_segments):
            last = idx == num_segments - 1
            queue.put_segments([segment(id, [no * 1000 + idx] * (no + 1), "stop" if last else "flush", idx=idx)])
            acknowledged[no] += 1

    threads = [threading.Thread(target=produce, args=(no,)) for no in range(num_threads)]
    for thread in threads:
        thread.start()
    for life in range(1, 4):
        wait_for(lambda life=life: sum(acknowledged) >= 30 * life, "acknowledged puts")
        server.kill()
        promised = list(acknowledged)
        assert sum(promised) < num_threads * num_segments, "killed too late to mean anything"
        server.restart()
        durable = server.client().get([row.id for row in rows])
        assert all(row.num_segments >= promised[no] for no, row in enumerate(durable))
    for thread in threads:
        thread.join()
    for no, row in enumerate(server.client().get([row.id for row in rows])):
        assert row.state == "generated"
        assert row.tokens == [no * 1000 + idx for idx in range(num_segments) for _ in range(no + 1)]
    assert idle.stats()["segments"] == num_threads * num_segments
    assert len(list((server.run.queue / "segments").iterdir())) == 4


def test_no_answer_is_named_with_endpoint_and_seconds(server: Server) -> None:
    queue = server.client(deadline_s=0.5)
    queue.stats()
    server.process.send_signal(signal.SIGSTOP)
    for client in (queue, server.client(deadline_s=0.5)):
        with pytest.raises(QueueUnavailable, match=rf"{server.endpoint} did not answer `stats` within 0.5 s"):
            client.stats()
    server.process.send_signal(signal.SIGCONT)
    queue.stats()
    server.kill()
    with pytest.raises(QueueUnavailable, match=rf"{server.endpoint} did not answer `put of 4 prompts` within 0.5 s"):
        queue.admit(prompts(1))


class _Forgetful(fl.FlightServerBase):
    """Takes a put and ends the call without a word."""

    def do_put(self, context, descriptor, reader, writer) -> None:
        reader.read_all()


def test_a_put_without_acknowledgement_is_not_durable() -> None:
    secret = b"x" * 32
    server = _Forgetful("grpc://127.0.0.1:0", auth_handler=ServerHandshake(secret))
    try:
        client = QueueClient(f"grpc://127.0.0.1:{server.port}", secret, 1, deadline_s=0.3)
        with pytest.raises(QueueUnavailable, match=r"put of 4 prompts.*no acknowledgement"):
            client.admit(prompts(1))
    finally:
        server.shutdown()


def test_a_held_index_names_its_holder(server: Server) -> None:
    code = (
        "import sys; from pathlib import Path; from pipeline.queue.server import serve;"
        "from pipeline.run_folder import RunFolder; serve(RunFolder(Path(sys.argv[1])), 2, 0, index_wait_s=0.2)"
    )
    second = subprocess.run(
        [sys.executable, "-c", code, str(server.run.path)], cwd=REPOSITORY, capture_output=True, text=True, timeout=30
    )
    assert second.returncode == 1
    assert f"the queue server of attempt 1, pid {server.process.pid} on host" in second.stderr
    assert "index.db is held by another process since 0.2 s" in second.stderr
    server.client().stats()


def test_a_new_attempt_waits_for_the_older_server_to_go(server: Server) -> None:
    server.client().admit(prompts(3))
    second = spawn(server.run, attempt=2)
    try:
        said = second.stderr.readline()
        assert said.startswith("queue server of attempt 2 waits 10 s"), said
        assert f"attempt 1, pid {server.process.pid} on host" in said
        server.kill()
        wait_for(lambda: (server.run.secrets / "queue-2.json").exists(), "the second server")
    finally:
        second.kill()
        second.wait()
        second.stderr.close()
    stale = spawn(server.run, attempt=1)
    assert "attempt 1 may not serve a queue that attempt 2 has served" in stale.communicate(timeout=30)[1]
    assert stale.returncode == 1
    server.attempt = 2
    server.start()
    queue = server.client()
    assert queue.get([sequence_id(3, 1, 1)])[0].state == "admitted"


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    code = (
        "import subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-m', 'pipeline.queue.server', {str(run.path)!r}, '1']); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY)
    try:
        wait_for(lambda: (run.secrets / "queue-1.json").exists(), "the server")
        (server,) = psutil.Process(parent.pid).children()
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the server's end")

    orphan = [sys.executable, "-m", "pipeline.queue.server", str(run.path), "1", "--parent", str(parent.pid)]
    assert subprocess.run(orphan, cwd=REPOSITORY, timeout=30).returncode == 3
