"""The agent's side of a zygote, against a zygote of the test's own making."""

import asyncio
import socket
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from pipeline import wire
from slurm import zygote
from slurm.workers import Workers
from tests.slurm.rig import start_order

ORDER = wire.WorkerOrder(
    start=start_order("w", main="m:main"),
    run="/nowhere",
    node="n0",
    attempt=1,
    gps="base",
    host="127.0.0.1",
    env={},
)


def hear(saying: bytes, tmp_path: Path) -> list[Any]:
    """What reaches the agent of a worker that says this and is dead before any of it was read."""
    heard: list[Any] = []

    async def serve() -> None:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ended = asyncio.Event()

        def on_exit(worker: str, reason: str) -> None:
            heard.append((worker, reason))
            ended.set()

        process = subprocess.Popen(["sleep", "60"])
        workers = Workers(process, mine, heard.append, on_exit, lambda *_: None)
        await workers.fork(ORDER, tmp_path / "w.log")
        _, (fd,), _, _ = socket.recv_fds(its, zygote.MAX_MESSAGE_BYTES, 1)
        with socket.socket(fileno=fd) as worker:
            worker.sendall(saying)
        its.send(msgspec.msgpack.encode(zygote.Exited(worker="w", code=-9)))
        serving = asyncio.create_task(workers.serve())
        await asyncio.wait_for(ended.wait(), 10)
        serving.cancel()
        await workers.close()
        its.close()

    asyncio.run(serve())
    return heard


def test_a_worker_is_heard_out_before_its_end_is_told(tmp_path: Path) -> None:
    said = [wire.Admitted(worker="w", step=step, ids=["x" * 1000]) for step in range(100)]
    (tmp_path / "w.log").write_text("last line\n")
    heard = hear(b"".join(map(wire.encode_message, said)), tmp_path)
    assert heard == [*said, ("w", "killed by SIGKILL\nlast line")]


def test_half_a_message_is_not_passed_on(tmp_path: Path) -> None:
    whole = wire.TaskStarted(worker="w", task="t")
    cut = wire.encode_message(wire.TaskEnded(worker="w", task="t"))[:-1]
    assert hear(wire.encode_message(whole) + cut, tmp_path) == [whole, ("w", "killed by SIGKILL\n")]


def test_a_message_that_nobody_understands_is_named_as_the_fault(tmp_path: Path) -> None:
    ((worker, reason),) = hear(b"\x03\x00\x00\x00abc", tmp_path)
    assert worker == "w" and "could not be passed on" in reason


def test_a_zygote_that_dies_with_an_unread_message_has_ended() -> None:
    """The kernel then resets the connection."""

    async def serve() -> str:
        mine, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        process = subprocess.Popen(["sleep", "60"])
        workers = Workers(process, mine, lambda _: None, lambda *_: None, lambda *_: None)
        workers.kill("w")
        process.kill()
        its.close()
        reason = await asyncio.wait_for(workers.serve(), 10)
        await workers.close()
        return reason

    assert asyncio.run(serve()) == "the zygote ended: killed by SIGKILL"
