"""The queue server's process as the controller holds it: when it is started again, and when the run must end."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.errors import QueueUnavailable
from pipeline.disk import EXIT_FULL
from pipeline.queue.client import QueueClient
from pipeline.queue.index import Index
from pipeline.queue.process import QueueProcess
from pipeline.queue.segments import SegmentFiles
from pipeline.queue.service import QueueService
from pipeline.run_folder import RunFolder, read_json
from tests.cli.private import Disk, small_disk
from tests.queue.processes import REPOSITORY, make_run, prompts, segment, wait_for

WAIT_S = 20.0


def held(path: Path, restarts: int, act: Callable[[QueueProcess, QueueClient], object]) -> RunFolder:
    """Hold a server, watched, for as long as `act` takes in a thread of its own; then stop it."""
    run = RunFolder(path)
    run.create()
    run.begin_attempt()

    async def hold() -> None:
        process = QueueProcess(run, 1, restarts)
        key = process.make_key()
        process.start()
        client = QueueClient(await process.endpoint(WAIT_S), key, 1, WAIT_S)
        watch = asyncio.create_task(process.watch(QueueClient(client.endpoint, key, 1, 1).ping, 0.4, WAIT_S))
        try:
            await asyncio.wait_for(asyncio.to_thread(act, process, client), WAIT_S)
        finally:
            watch.cancel()
            process.stop()

    asyncio.run(hold())
    return run


def pid_of(process: QueueProcess) -> int:
    return int(read_json(process._endpoint_file)["pid"])


def test_a_server_that_stands_still_is_found_and_started_again(tmp_path: Path) -> None:
    def act(process: QueueProcess, client: QueueClient) -> None:
        client.admit(prompts(1))
        first, start = pid_of(process), time.monotonic()
        os.kill(first, signal.SIGSTOP)
        assert client.stats()["admitted"] == 4  # waits for the next one, on the same port
        assert pid_of(process) != first and not process.failure.done()
        print(f"answers again after {time.monotonic() - start:.2f} s")

    run = held(tmp_path / "run", 1, act)
    assert not list(run.secrets.glob("queue-*.json"))


def test_a_server_whose_writer_is_stuck_does_not_answer(tmp_path: Path) -> None:
    """Its thread that commits never comes back from a call; the others still take some."""
    run = make_run(tmp_path / "run")
    secret = (run.secrets / "queue.key").read_bytes()
    index, files = Index(run.queue / "index.db", 1), SegmentFiles(run.queue / "segments", "a.arrows")
    with QueueService("grpc://127.0.0.1:0", secret, 1, index, files) as service:
        client = QueueClient(f"grpc://127.0.0.1:{service.port}", secret, 1, 5)
        assert client.ping(5)
        stuck, goes_on = threading.Event(), threading.Event()

        def never_return() -> None:
            stuck.set()
            goes_on.wait()

        caller = threading.Thread(target=service._commit.call, args=(never_return,))
        caller.start()
        stuck.wait()
        assert not client.ping(0.2)
        goes_on.set()
        caller.join()
        assert client.ping(5)


def test_an_index_that_is_gone_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    run = held(tmp_path, 3, lambda process, client: client.admit(prompts(1)))
    for file in run.queue.glob("index.db*"):
        file.unlink()
    told: list[str] = []

    async def hold() -> None:
        process = QueueProcess(run, 2, 3)
        run.logs(2).mkdir(parents=True)
        process.start()
        told.append(await asyncio.wait_for(process.failure, WAIT_S))
        process.stop()

    asyncio.run(hold())
    assert "index.db is missing" in told[0]
    assert not (run.queue / "index.db").exists()


def test_deaths_without_progress_are_counted(tmp_path: Path) -> None:
    def act(process: QueueProcess, client: QueueClient) -> None:
        for life in range(3):
            client.stats()
            os.kill(pid_of(process), signal.SIGKILL)
            if life == 0:
                client.stats()
                process.progress()
        wait_for(process.failure.done, "the failure")
        assert process.failure.result().startswith(
            "the queue server ended 2 times without progress (killed by SIGKILL)"
        )
        client.give_up()
        start = time.monotonic()
        with pytest.raises(QueueUnavailable):
            client.stats()
        assert time.monotonic() - start < 5

    held(tmp_path / "run", 1, act)


def test_a_server_that_found_the_disk_full_is_not_started_again(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    run.begin_attempt()

    async def hold() -> str:
        process = QueueProcess(run, 1, restarts=3)
        process.make_key()
        process.start()
        process._ended(EXIT_FULL)
        process.stop()
        return await process.failure

    said = asyncio.run(hold())
    assert said.startswith(f"the queue server could not write to {run.queue}: No space left on device")


def test_a_full_disk_ends_the_server_and_loses_nothing_that_it_acknowledged(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        run = make_run(disk.outside / "run")
        client, server = serve_from(disk)
        rows = prompts(1, 64)
        client.admit(rows)
        client.claim([row.id for row in rows], [1] * 64)
        kept: dict[str, list[int]] = {}
        filler = disk.outside / "fill"
        filler.write_bytes(b"\0" * (1 << 20))
        with pytest.raises(QueueUnavailable):
            for no, row in enumerate(rows):
                tokens = list(range(no, no + 20_000))
                client.put_segments([segment(row.id, tokens)])
                kept[row.id] = tokens
        said = server.communicate(timeout=WAIT_S)[1]
        assert server.returncode == EXIT_FULL and "No space left on device" in said, said
        assert 0 < len(kept) < 64
        filler.unlink()
        (run.secrets / "queue-1.json").unlink()
        client, server = serve_from(disk)
        found = {row.id: row.tokens for row in client.get([row.id for row in rows])}
        server.kill()
        server.communicate()
        assert {id: found[id] for id in kept} == kept


def serve_from(disk: Disk) -> "tuple[QueueClient, subprocess.Popen[str]]":
    """A server on this disk, and a client of it that soon loses its patience."""
    own = [sys.executable, "-m", "pipeline.queue.server", str(disk.path / "run"), "1", "--parent", str(os.getpid())]
    command = ["nsenter", "-t", str(disk.pid), "-m", f"--wd={REPOSITORY}", "--", *own]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    secrets = disk.outside / "run" / "secrets"
    wait_for((secrets / "queue-1.json").exists, "the queue server")
    endpoint = read_json(secrets / "queue-1.json")["endpoint"]
    return QueueClient(endpoint, (secrets / "queue.key").read_bytes(), 1, 1.0), server
